"""The extender over HTTP against a real API: from a pending pod to its allocation, and back when it ends."""

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_world import World
from scheduler_world import SECONDS, Scheduler, add_node, gpu_pod, post, record

from scheduler.metrics import DRIFT
from vgpu import names
from vgpu.devices import decode_inventory
from vgpu.kube import writes
from vgpu.kube.client import MERGE_PATCH, ApiError, Unreachable
from vgpu.standin.services import wait_for


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def scheduler(world: World, tmp_path: Path) -> Iterator[Scheduler]:
    scheduler = Scheduler(world, tmp_path)
    yield scheduler
    scheduler.close()


def wait_slices(scheduler: Scheduler, count: int) -> None:
    wait_for(f"{count} slices", lambda: scheduler.state.slices() == count, SECONDS)


def settled(scheduler: Scheduler, uid: str) -> bool:
    """Has the watch confirmed what the pod holds?"""
    holding = scheduler.state.holding(uid)
    return holding is not None and holding.confirmed


def test_nothing_is_answered_before_the_cluster_is_known(scheduler: Scheduler) -> None:
    body = {"Pod": {"metadata": {"name": "p"}}, "NodeNames": ["a"]}
    assert scheduler.post("/filter", body)[1]["Error"] == "the scheduler has not read the cluster yet"
    assert scheduler.post("/prioritize", body)[0] == 503
    args = {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "a"}
    assert scheduler.post("/bind", args)[1]["Error"] == "the scheduler has not read the cluster yet"


def test_a_pod_gets_its_cards_in_the_transaction_that_binds_it(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a")
    item = world.create(gpu_pod("p"))
    scheduler.start()
    reply = scheduler.filter(item, "node-a", "node-b")
    assert reply["NodeNames"] == ["node-a"]
    assert reply["FailedAndUnresolvableNodes"] == {"node-b": "the node has no cards"}
    _, scores = scheduler.post("/prioritize", {"Pod": item, "NodeNames": ["node-a"]})
    assert scores == [{"Host": "node-a", "Score": 10}]
    assert scheduler.bind(item, "node-a") == ""
    bound = world.pod("p")
    assert bound["spec"]["nodeName"] == "node-a"
    assert record(world, "p") == {"v": 1, "containers": {"main": [{"uuid": "GPU-node-a-0", "mem": 3000}]}}
    wait_for("the watch confirms it", lambda: settled(scheduler, item["metadata"]["uid"]), SECONDS)
    assert scheduler.state.slices() == 1
    assert scheduler.bind(item, "node-a") == "", "asked again, the same answer"
    assert "already bound to node node-a" in scheduler.bind(item, "node-b")


def test_on_a_scaled_card_limits_may_sum_up_to_more_than_it_has_and_guarantees_may_not(
    world: World, scheduler: Scheduler
) -> None:
    add_node(world, "node-a", cards=1, memory=16000, physical=8000)
    scheduler.start()

    def bind(name: str, memory: int, **notes: str) -> str:
        item = world.create(gpu_pod(name, memory, metadata={"annotations": notes}))
        return scheduler.bind(item, "node-a")

    def has(name: str) -> Any:
        return record(world, name)["containers"]["main"]

    assert bind("half", 6000) == ""
    assert has("half") == [{"uuid": "GPU-node-a-0", "mem": 6000, "phys": 3000}]
    assert bind("whole", 3000, **{names.OVERSUBSCRIBE: "false"}) == ""
    assert has("whole") == [{"uuid": "GPU-node-a-0", "mem": 3000}]
    assert "physical memory free that a slice of 2001 MiB" in bind("too-much", 2001, **{names.OVERSUBSCRIBE: "false"})
    assert bind("rest", 4000) == ""
    assert "physical memory free" in bind("more", 1000), "of the limit 3000 MiB are left, to guarantee nothing"


def test_a_bind_without_a_filter_before_it_reads_the_pod(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a")
    item = world.create(gpu_pod("p"))
    scheduler.start()
    other = {**item, "metadata": {**item["metadata"], "uid": "another"}}
    assert scheduler.bind(other, "node-a") == "another pod of the same name has replaced this pod"
    unseen = world.create(gpu_pod("unseen", metadata={"labels": {}}))
    assert "has not processed this pod" in scheduler.bind(unseen, "node-a")
    assert scheduler.bind(item, "node-a") == ""
    assert record(world, "p") is not None


def test_cards_of_finished_pods_are_free_at_once_those_of_terminating_pods_when_they_are_gone(
    world: World, scheduler: Scheduler
) -> None:
    add_node(world, "node-a", cards=1)
    scheduler.start()
    for name in ("done", "leaving"):
        item = world.create(gpu_pod(name))
        assert scheduler.bind(item, "node-a") == ""
    wait_slices(scheduler, 2)
    path = "/api/v1/namespaces/default/pods/done/status"
    world.send("PATCH", path, {"status": {"phase": "Succeeded"}}, content_type=MERGE_PATCH)
    wait_slices(scheduler, 1)
    uid = world.pod("leaving")["metadata"]["uid"]
    writes.delete_pod(world.client, "default", "leaving", uid, grace_seconds=30)
    assert world.pod("leaving")["metadata"]["deletionTimestamp"]
    # the watch reports in order: once this pod is known, the deletion is known, too
    marker = world.create(gpu_pod("marker", 1))
    assert scheduler.bind(marker, "node-a") == ""
    wait_for("the marker is confirmed", lambda: settled(scheduler, marker["metadata"]["uid"]), SECONDS)
    assert scheduler.state.slices() == 2
    writes.delete_pod(world.client, "default", "leaving", uid, grace_seconds=0)
    wait_slices(scheduler, 1)


def test_a_restarted_scheduler_knows_what_pods_hold(world: World, scheduler: Scheduler, tmp_path: Path) -> None:
    add_node(world, "node-a", cards=1)
    scheduler.start()
    item = world.create(gpu_pod("p", 5000))
    assert scheduler.bind(item, "node-a") == ""
    writes.delete_pod(world.client, "default", "p", item["metadata"]["uid"], grace_seconds=30)
    again = Scheduler(world, tmp_path)
    again.start()
    try:
        pending = world.create(gpu_pod("q", 5000))
        assert again.filter(pending, "node-a")["FailedNodes"] == {"node-a": "0 of 1 cards have 5000 MiB free, 1 needed"}
        assert "has no room left: 0 of 1 cards have 5000 MiB free" in again.bind(pending, "node-a")
    finally:
        again.close()


def test_many_binds_at_once_never_give_a_slice_twice(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a", cards=4, memory=8000)
    scheduler.start()
    items = [world.create(gpu_pod(f"p{number}", 3000)) for number in range(20)]
    answers: dict[str, str] = {}

    def bind(item: dict[str, Any]) -> None:
        answers[item["metadata"]["name"]] = scheduler.bind(item, "node-a")

    threads = [threading.Thread(target=bind, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bound = [name for name, error in answers.items() if not error]
    assert len(bound) == 8, answers
    cards = Counter(record(world, name)["containers"]["main"][0]["uuid"] for name in bound)
    assert set(cards.values()) == {2}
    wait_slices(scheduler, 8)


def test_a_cordoned_card_and_a_changed_inventory_count_at_once(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a", cards=2)
    scheduler.start()
    item = world.create(gpu_pod("p"))
    writes.patch_node(world.client, "node-a", annotations={"vgpu.io/cordon": "GPU-node-a-0, GPU-node-a-1"})
    wait_for("cordon", lambda: scheduler.filter(item, "node-a")["NodeNames"] == [], SECONDS)
    assert scheduler.filter(item, "node-a")["FailedAndUnresolvableNodes"] == {
        "node-a": "0 of 2 cards are not cordoned, 1 needed"
    }
    writes.patch_node(world.client, "node-a", annotations={"vgpu.io/cordon": None, "vgpu.io/devices": "{broken"})
    told = {"node-a": "the node has no cards"}
    wait_for(
        "unreadable inventory", lambda: scheduler.filter(item, "node-a")["FailedAndUnresolvableNodes"] == told, SECONDS
    )
    world.send("DELETE", "/api/v1/nodes/node-a")
    add_node(world, "node-a", cards=1)
    wait_for("the node is back", lambda: scheduler.filter(item, "node-a")["NodeNames"] == ["node-a"], SECONDS)


def test_a_pod_that_another_one_has_bound_is_refused(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a")
    add_node(world, "node-b")
    scheduler.start()
    item = world.create(gpu_pod("p"))
    scheduler.filter(item, "node-a")
    writes.bind(world.client, "default", "p", item["metadata"]["uid"], "node-b", {})
    assert scheduler.bind(item, "node-a") == "the pod is already bound to node node-b"
    assert scheduler.state.slices() == 0


def test_a_pod_that_is_gone_is_refused_and_holds_nothing(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a")
    scheduler.start()
    item = world.create(gpu_pod("p"))
    scheduler.filter(item, "node-a")
    writes.delete_pod(world.client, "default", "p", item["metadata"]["uid"], grace_seconds=0)
    assert "not found" in scheduler.bind(item, "node-a")
    assert scheduler.state.slices() == 0


@pytest.mark.parametrize("arrives", [True, False])
def test_a_bind_without_an_answer_is_settled_by_reading_the_pod(
    world: World, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    add_node(world, "node-a", cards=1)
    scheduler.start()
    item = world.create(gpu_pod("p", 8000))
    scheduler.filter(item, "node-a")
    real = writes.bind

    def lost(*args: Any) -> None:
        if arrives:
            real(*args)
        raise Unreachable("POST: the answer was lost")

    with monkeypatch.context() as patched:
        patched.setattr(writes, "bind", lost)
        error = scheduler.bind(item, "node-a")
    assert error == ("" if arrives else "POST: the answer was lost")
    # A bind without an answer may still arrive: another pod does not get the card, this one may try again.
    other = world.create(gpu_pod("q", 8000))
    assert "no room" in scheduler.bind(other, "node-a")
    if not arrives:
        assert scheduler.filter(item, "node-a")["NodeNames"] == ["node-a"]
    assert scheduler.bind(item, "node-a") == ""
    assert record(world, "p") is not None


def test_a_bind_while_the_api_server_is_away_is_refused_and_works_when_it_is_back(
    world: World, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.binder.SETTLE_PAUSE", 0.01)
    add_node(world, "node-a", cards=1)
    scheduler.start()
    item = world.create(gpu_pod("p"))
    scheduler.filter(item, "node-a")
    world.server.stop()
    assert "cannot find out whether the pod is bound" in scheduler.bind(item, "node-a")
    world.restart()
    assert scheduler.bind(item, "node-a") == ""
    wait_for("the watch confirms it", lambda: settled(scheduler, item["metadata"]["uid"]), SECONDS)


def test_drift_is_found_told_and_repaired(world: World, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.feed.SECOND_LOOK", 0.01)
    add_node(world, "node-a")
    scheduler.start()
    item = world.create(gpu_pod("p"))
    assert scheduler.bind(item, "node-a") == ""
    wait_for("the watch confirms it", lambda: settled(scheduler, item["metadata"]["uid"]), SECONDS)
    assert scheduler.feed.reconcile() == 0
    holding = scheduler.state.holding(item["metadata"]["uid"])
    assert holding is not None
    scheduler.state.hold("ghost", holding)
    scheduler.state.release(item["metadata"]["uid"])
    assert scheduler.feed.reconcile() == 2
    assert DRIFT._value.get() == 2
    assert scheduler.state.holding("ghost") is None
    assert scheduler.state.holding(item["metadata"]["uid"]) == holding
    assert scheduler.feed.reconcile() == 0
    assert DRIFT._value.get() == 0


def test_a_node_that_the_informer_missed_is_repaired_too(world: World, scheduler: Scheduler) -> None:
    add_node(world, "node-a")
    scheduler.start()
    scheduler.state.remove_node("node-a")
    cards = world.node("node-a")["metadata"]["annotations"]["vgpu.io/devices"]
    scheduler.state.set_node("ghost", decode_inventory(cards))
    scheduler.feed.reconcile()
    assert scheduler.state.cards_of("ghost") is None
    assert len(scheduler.state.cards_of("node-a") or ()) == 2


def test_an_event_from_before_the_bind_does_not_undo_it(
    world: World, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(world, "node-a")
    scheduler.start()
    item, marker = world.create(gpu_pod("p")), world.create(gpu_pod("marker"))
    real = writes.bind

    def slow(*args: Any) -> None:
        monkeypatch.setattr(writes, "bind", real)
        conditions = {"status": {"conditions": [{"type": "PodScheduled", "status": "False"}]}}
        world.send("PATCH", "/api/v1/namespaces/default/pods/p/status", conditions, content_type=MERGE_PATCH)
        assert scheduler.bind(marker, "node-a") == ""
        # The watch reports in order: with the marker, the change of the pod has arrived, too.
        wait_for("the marker is confirmed", lambda: settled(scheduler, marker["metadata"]["uid"]), SECONDS)
        assert scheduler.state.slices() == 2
        real(*args)

    monkeypatch.setattr(writes, "bind", slow)
    assert scheduler.bind(item, "node-a") == ""
    assert scheduler.state.slices() == 2


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/filter", b"{", 400, "the body is not JSON"),
        ("POST", "/filter", b"", 400, "the body is not JSON"),
        ("POST", "/prioritize", b'{"Pod":5}', 400, "$.Pod"),
        ("POST", "/bind", b'{"PodName":"p"}', 400, "missing required field"),
        ("GET", "/filter", b"", 405, "not allowed"),
        ("POST", "/webhook", b"{}", 404, "not found"),
        ("GET", "/healthz", b"", 404, "not found"),
    ],
)
def test_bad_requests_are_answered_and_the_service_stays_up(
    scheduler: Scheduler, method: str, path: str, body: bytes, status: int, said: str
) -> None:
    scheduler.start()
    answer, text = post(scheduler.port, path, body, method)
    assert answer == status
    assert said in text
    assert "Traceback" not in text
    assert scheduler.filter({"metadata": {"name": "p"}}, "a")["NodeNames"] == ["a"]


def test_a_body_that_is_too_large_is_not_read(scheduler: Scheduler) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", scheduler.port, timeout=SECONDS)
    connection.putrequest("POST", "/filter")
    connection.putheader("Content-Length", str(17 * 2**20))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert answer.read() == b"the body is larger than 16777216 bytes\n"
    connection.close()


def test_conflicts_and_refusals_of_the_api_server_are_the_error_of_the_bind(
    world: World, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_node(world, "node-a", cards=1)
    scheduler.start()
    item = world.create(gpu_pod("p"))

    def forbidden(*_: Any) -> None:
        raise ApiError(403, "Forbidden", "a policy says no")

    with monkeypatch.context() as patched:
        patched.setattr(writes, "bind", forbidden)
        assert "a policy says no" in scheduler.bind(item, "node-a")
    assert scheduler.state.slices() == 0
