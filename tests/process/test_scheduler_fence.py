"""Two replicas: the one that begins to lead knows what the other one has bound, however late its watches are."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from kube_world import World
from scheduler_world import LEASE, SECONDS, Scheduler, add_node, gpu_pod

from vgpu.kube.client import MERGE_PATCH, KubeClient, Watch
from vgpu.local.services import wait_for

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


class LateClient(KubeClient):
    """Its watches tell nothing until `told` is set."""

    told = threading.Event()

    def stream(self, path: str, params: Mapping[str, str]) -> Watch:
        watch = super().stream(path, params)
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
def replicas(world: World, tmp_path: Path) -> Iterator[tuple[Scheduler, Scheduler]]:
    """The leader, and one whose watches are late."""
    LateClient.told.clear()
    pair = Scheduler(world, tmp_path, idle_seconds=0), Scheduler(world, tmp_path, idle_seconds=0)
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
    assert second.filter(two, "n1")["NodeNames"] == ["n1"]
    assert first.bind(one, "n1") == ""
    lead(world, "b", 2)
    assert second.filter(two, "n1")["NodeNames"] == []
    assert "no room" in second.bind(two, "n1")
    world.client.request("DELETE", "/api/v1/namespaces/default/pods/one", body={"gracePeriodSeconds": 0})
    assert second.filter(two, "n1")["NodeNames"] == [], "the same leader still: watches tell it, not a list"
    LateClient.told.set()
    wait_for("the watches tell", lambda: second.filter(two, "n1")["NodeNames"] == ["n1"], SECONDS)


def test_nothing_is_placed_while_the_lease_cannot_be_read(world: World, replicas: tuple[Scheduler, Scheduler]) -> None:
    first, _ = replicas
    item = world.create(gpu_pod("one"))
    world.server.stop()
    args = {"Pod": item, "NodeNames": ["n1"]}
    assert "what other replicas did cannot be read" in first.filter(item, "n1")["Error"]
    assert first.post("/prioritize", args)[0] == 503
    assert "what other replicas did cannot be read" in first.bind(item, "n1")
    world.restart()
    wait_for("an answer", lambda: first.filter(item, "n1")["Error"] == "", SECONDS)
