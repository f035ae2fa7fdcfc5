"""Records that follow the ids of the kubelet: the scheduler moves them next to its binds, even if answers are lost."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_world import World
from scheduler_world import SECONDS, Scheduler, add_node, gpu_pod, inventory, record

from scheduler import moves
from scheduler.cluster import ClusterState
from scheduler.leader_check import Fence, held_here
from scheduler.moves import Moves
from scheduler.seen import Container, Pod, PodMarks, PodMeta, PodSpec, holding_of, seen_pod
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.devices import GpuSlice, decode_inventory
from vgpu.kube import writes
from vgpu.kube.client import ApiError, Unreachable
from vgpu.standin.services import wait_for

CARDS = ("GPU-n1-0", "GPU-n1-1")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    add_node(found, "n1", cards=2)
    yield found
    found.close()


@pytest.fixture
def scheduler(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    monkeypatch.setattr(moves, "PERIOD_SECONDS", 0.02)
    found = Scheduler(world, tmp_path)
    found.start()
    yield found
    found.close()


@pytest.fixture
def run(scheduler: Scheduler) -> Iterator[Callable[..., Moves]]:
    """Starts the thread that moves records."""
    running = []

    def start(leads: Callable[[], bool] = lambda: True) -> Moves:
        running.append(Moves(scheduler.client, scheduler.state, leads))
        running[-1].start()
        return running[-1]

    yield start
    for one in running:
        one.stop()


def bound(world: World, scheduler: Scheduler, name: str, memory: int, card: int) -> str:
    """A pod with a slice of this card; its UID."""
    item = world.create(gpu_pod(name, memory, metadata={"annotations": {names.USE_GPU_UUID: CARDS[card]}}))
    assert scheduler.bind(item, "n1") == ""
    uid = str(item["metadata"]["uid"])
    wait_for("the watch tells", lambda: (one := scheduler.state.holding(uid)) and one.confirmed, SECONDS)
    return uid


def ask(world: World, scheduler: Scheduler, name: str, card: int) -> None:
    """Does what the agent does: asks for a move, because the pod was given this card."""
    pod = world.pod(name)
    (piece,) = allocation.decode(pod["metadata"]["annotations"][names.ALLOCATION]).containers["main"]
    there = GpuSlice(CARDS[card], piece.mem, piece.cores)
    text = allocation.encode(Allocation({"main": (piece,)}, {"main": (there,)}))
    writes.patch_pod(world.client, "default", name, {"annotations": {names.ALLOCATION: text}})
    uid = pod["metadata"]["uid"]
    wait_for("the watch tells", lambda: (one := scheduler.state.holding(uid)) and len(one.held) != 1, SECONDS)


def card_of(world: World, name: str) -> tuple[str, ...]:
    found = record(world, name)
    return tuple(piece["uuid"] for piece in found["containers"]["main"]) if "moving" not in found else ()


def test_a_pod_that_asks_for_a_move_holds_both_until_the_leader_makes_it(
    world: World, scheduler: Scheduler, run: Callable[..., Moves]
) -> None:
    uid = bound(world, scheduler, "moves", 6000, card=0)
    ask(world, scheduler, "moves", card=1)
    other = world.create(gpu_pod("other", 3000))
    assert scheduler.filter(other, "n1")["NodeNames"] == []
    assert "no room" in scheduler.bind(other, "n1")
    assert Moves(scheduler.client, scheduler.state, lambda: False).once()
    assert card_of(world, "moves") == ()
    run()
    wait_for("moved", lambda: card_of(world, "moves") == (CARDS[1],), SECONDS)
    wait_for("told", lambda: (one := scheduler.state.holding(uid)) and list(one.held) == [CARDS[1]], SECONDS)
    assert not scheduler.state.claims()
    assert scheduler.bind(other, "n1") == ""
    assert card_of(world, "other") == (CARDS[0],)


def test_a_bind_on_its_way_keeps_the_room_that_it_chose(
    world: World, scheduler: Scheduler, run: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(world, scheduler, "moves", 6000, card=0)
    item = world.create(gpu_pod("binds", 3000, metadata={"annotations": {names.USE_GPU_UUID: CARDS[1]}}))
    real = writes.bind

    def slow(*args: Any) -> None:
        ask(world, scheduler, "moves", card=1)
        Moves(scheduler.client, scheduler.state, lambda: True).once()
        assert record(world, "moves")["containers"]["main"][0]["uuid"] == CARDS[0]
        real(*args)

    monkeypatch.setattr(writes, "bind", slow)
    assert scheduler.bind(item, "n1") == ""
    assert card_of(world, "moves") == ()
    run()
    world.client.request("DELETE", "/api/v1/namespaces/default/pods/binds", body={"gracePeriodSeconds": 0})
    wait_for("moved", lambda: card_of(world, "moves") == (CARDS[1],), SECONDS)


@pytest.mark.parametrize("arrives", [True, False])
def test_pods_that_swapped_cards_are_moved_whatever_becomes_of_the_answers(
    world: World, scheduler: Scheduler, run: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    for name, memory, card in (("one", 6000, 0), ("two", 5000, 1)):
        bound(world, scheduler, name, memory, card)
    for name, card in (("one", 1), ("two", 0)):
        ask(world, scheduler, name, card)
    real, asked = writes.patch_pod, []

    def lost(*args: Any, **more: Any) -> None:
        asked.append(args)
        if arrives or len(asked) % 2 == 0:
            real(*args, **more)
        raise Unreachable("PATCH: the answer was lost")

    monkeypatch.setattr(writes, "patch_pod", lost)
    run()
    wait_for("swapped", lambda: card_of(world, "one") == (CARDS[1],) and card_of(world, "two") == (CARDS[0],), SECONDS)
    assert len(asked) >= 3


def test_a_move_that_is_forbidden_is_tried_again(
    world: World, scheduler: Scheduler, run: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(world, scheduler, "moves", 6000, card=0)
    ask(world, scheduler, "moves", card=1)
    real, asked = writes.patch_pod, threading.Event()

    def refused(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(writes, "patch_pod", real)
        asked.set()
        raise ApiError(403, "Forbidden", "not now")

    monkeypatch.setattr(writes, "patch_pod", refused)
    run()
    assert asked.wait(SECONDS)
    wait_for("moved", lambda: card_of(world, "moves") == (CARDS[1],), SECONDS)


def moving(name: str, here: str, there: str, memory: int) -> Pod:
    """A bound pod that asks for a move; its name is its UID."""
    record = Allocation({"main": (GpuSlice(here, memory),)}, {"main": (GpuSlice(there, memory),)})
    annotations = PodMarks(allocation.encode(record))
    meta = PodMeta(name=name, namespace="default", uid=name, resourceVersion="7", annotations=annotations)
    return Pod(meta, PodSpec(nodeName="n1", containers=[Container(name="main")]))


def test_until_the_watch_tells_a_move_it_may_have_been_made_or_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ClusterState()
    state.set_node("n1", decode_inventory(inventory("n1", cards=3)))
    asked: list[str] = []
    monkeypatch.setattr(writes, "patch_pod", lambda _client, _namespace, name, *_, **__: asked.append(name))
    maker = Moves(world.client, state, lambda: True)
    for pod in (moving("b", *CARDS, memory=6000), moving("a", "GPU-n1-2", CARDS[1], memory=5000)):
        holding = holding_of(pod)
        assert holding is not None
        state.hold(pod.metadata.uid, holding)
        maker.once()
        assert asked == ["b"]
    state.release("b")
    maker.once()
    assert asked == ["b", "a"]


def test_who_leads_is_told_by_the_lease_and_catches_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "vgpu-scheduler-1")
    terms = {"now": "vgpu-scheduler-2_uuid 4"}
    caught_up: list[str] = []
    fence = Fence(lambda: caught_up.append(terms["now"]), lambda: terms["now"], own=held_here)
    assert not fence.leads()
    terms["now"] = ""
    assert not fence.leads()
    terms["now"] = "vgpu-scheduler-1_uuid 5"
    assert fence.leads()
    assert fence.leads()
    assert caught_up == ["vgpu-scheduler-1_uuid 5"]


def test_who_cannot_read_who_leads_moves_nothing_and_says_so_once(
    world: World, scheduler: Scheduler, run: Callable[..., Moves], caplog: pytest.LogCaptureFixture
) -> None:
    bound(world, scheduler, "moves", 6000, card=0)
    ask(world, scheduler, "moves", card=1)
    tried: list[None] = []

    def away() -> bool:
        tried.append(None)
        if len(tried) < 4:
            raise Unreachable("no answer")
        return True

    run(away)
    wait_for("moved", lambda: card_of(world, "moves") == (CARDS[1],), SECONDS)
    said = [one.message for one in caplog.records if one.name == moves.__name__ and one.levelname == "WARNING"]
    assert said == ["cannot move the records of waiting pods: no answer"]


def one_pod(version: str, *cards: str) -> Pod:
    text = allocation.encode(Allocation({"main": tuple(GpuSlice(uuid, 1000) for uuid in cards)}))
    meta = PodMeta("p", "default", "u", version, PodMarks(text))
    return Pod(meta, PodSpec(nodeName="n1", containers=[Container(name="main")]))


def test_a_list_that_was_asked_for_before_a_pod_was_confirmed_does_not_drop_it(scheduler: Scheduler) -> None:
    holding = holding_of(one_pod("1000", CARDS[0]))
    assert holding is not None
    scheduler.feed._pods_asked()
    scheduler.state.hold("u", holding)  # as a bind does that later learns how it ended
    scheduler.feed._pods_listed([])
    assert scheduler.state.holding("u") == holding
    scheduler.feed._pods_asked()
    scheduler.feed._pods_listed([])
    assert scheduler.state.holding("u") == holding, "the list is from a cache that lags behind"
    scheduler.feed._pods.listed = "2000"
    scheduler.feed._pods_listed([])
    assert scheduler.state.holding("u") is None


def test_what_is_older_than_what_is_known_changes_nothing(scheduler: Scheduler) -> None:
    scheduler.feed._pods_listed([seen_pod(one_pod("1000", CARDS[1]))])
    scheduler.feed._pod_changed("set", seen_pod(one_pod("999", CARDS[0])))
    holding = scheduler.state.holding("u")
    assert holding is not None
    assert list(holding.held) == [CARDS[1]]
    scheduler.feed._pod_changed("set", seen_pod(one_pod("1001", CARDS[0])))
    holding = scheduler.state.holding("u")
    assert holding is not None
    assert list(holding.held) == [CARDS[0]]
