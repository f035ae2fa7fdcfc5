"""Two replicas: a replica that begins to lead knows what the other one has bound, even if its watches are late."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from kube_world import World
from scheduler_world import LEASE, SECONDS, Scheduler, add_node, gpu_pod, record

from scheduler.wire import ExtenderBindingArgs
from vgpu.allocation import Allocation
from vgpu.kube.client import MERGE_PATCH, KubeClient, Watch
from vgpu.resources import PodRequest
from vgpu.standin.services import wait_for

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


class LateClient(KubeClient):
    """A client whose watches deliver nothing until `told` is set."""

    told = threading.Event()

    def stream(self, path: str, params: Mapping[str, str], **more: Any) -> Watch:
        watch = super().stream(path, params, **more)
        if "watch" in params:
            self.told.wait(SECONDS)
        return watch


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    found.send("POST", LEASES, {"metadata": {"name": LEASE}, "spec": {"holderIdentity": "a", "leaseTransitions": 1}})
    add_node(found, "n1", cards=1)
    yield found
    found.close()


@pytest.fixture
def replicas(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scheduler, Scheduler]]:
    """The leader, and one whose watches are late."""
    monkeypatch.setattr("scheduler.feed.CATCH_UP_SECONDS", 0.1)
    LateClient.told.clear()
    pair = Scheduler(world, tmp_path, idle_seconds=0), Scheduler(world, tmp_path, holder="b", idle_seconds=0)
    pair[1].client.__class__ = LateClient
    for replica in pair:
        replica.start()
    yield pair
    LateClient.told.set()
    for replica in pair:
        replica.close()


def lead(world: World, holder: str, term: int) -> None:
    body = {"spec": {"holderIdentity": holder, "leaseTransitions": term}}
    world.send("PATCH", f"{LEASES}/{LEASE}", body, content_type=MERGE_PATCH)


def test_the_new_leader_gives_no_slice_twice(world: World, replicas: tuple[Scheduler, Scheduler]) -> None:
    first, second = replicas
    one, two = (world.create(gpu_pod(name, memory=6000)) for name in ("one", "two"))
    assert first.filter(one, "n1")["NodeNames"] == ["n1"]
    assert first.bind(one, "n1") == ""
    lead(world, "b", 2)
    assert second.filter(two, "n1")["NodeNames"] == []
    assert "no room" in second.bind(two, "n1")
    world.client.request("DELETE", "/api/v1/namespaces/default/pods/one", body={"gracePeriodSeconds": 0})
    assert second.filter(two, "n1")["NodeNames"] == [], "the same leader still: watches tell it, not a list"
    LateClient.told.set()
    wait_for("the watches tell", lambda: second.filter(two, "n1")["NodeNames"] == ["n1"], SECONDS)


def test_who_does_not_lead_places_nothing(world: World, replicas: tuple[Scheduler, Scheduler]) -> None:
    """A replica that was frozen goes on with a call from the time when it led."""
    first, second = replicas
    item = world.create(gpu_pod("one"))
    args = {"Pod": item, "NodeNames": ["n1"]}
    assert first.filter(item, "n1")["NodeNames"] == ["n1"]
    for _ in range(2):
        lead(world, "b", 2)
        assert first.filter(item, "n1")["Error"] == "another replica leads"
        assert first.post("/prioritize", args) == (503, "another replica leads\n")
        assert first.bind(item, "n1") == "another replica leads"
        lead(world, "a", 1)
        assert second.bind(item, "n1") == "another replica leads"
    lead(world, "a", 3)
    assert first.bind(item, "n1") == ""


@pytest.mark.parametrize("back", [False, True])
def test_a_bind_that_was_held_up_looks_again_who_leads(
    world: World, replicas: tuple[Scheduler, Scheduler], monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """Between the choice of the cards and the Binding, another replica has led and bound, and may still lead."""
    first, second = replicas
    one, two = (world.create(gpu_pod(name, memory=6000)) for name in ("one", "two"))
    choose = first.binder._choose

    def held_up(args: ExtenderBindingArgs, request: PodRequest) -> Allocation:
        found = choose(args, request)
        monkeypatch.setattr(first.binder, "_choose", choose)
        lead(world, "b", 2)
        assert second.bind(two, "n1") == ""
        if back:
            lead(world, "a", 3)
        return found

    monkeypatch.setattr(first.binder, "_choose", held_up)
    told = first.bind(one, "n1")
    assert ("has no room left" if back else "another replica leads") in told
    assert record(world, "one") is None
    assert record(world, "two") is not None
    assert first.state.holding(one["metadata"]["uid"]) is None


def test_nothing_is_placed_while_the_lease_cannot_be_read(world: World, replicas: tuple[Scheduler, Scheduler]) -> None:
    first, _ = replicas
    item = world.create(gpu_pod("one"))
    world.server.stop()
    args = {"Pod": item, "NodeNames": ["n1"]}
    assert "cannot read the changes of other replicas" in first.filter(item, "n1")["Error"]
    assert first.post("/prioritize", args)[0] == 503
    assert "cannot read the changes of other replicas" in first.bind(item, "n1")
    world.restart()
    wait_for("an answer", lambda: first.filter(item, "n1")["Error"] == "", SECONDS)
