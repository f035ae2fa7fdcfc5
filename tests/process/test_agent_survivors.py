"""Pods that the API server does not know any more and whose processes still run: no other pod gets what they hold."""

from collections.abc import Iterator

import pytest
from agent_world import A, MakeWorld, World, until, worlds

from device_plugin import starts
from device_plugin.refusal import Refusal
from vgpu.devices import GpuSlice

OLD, NEW = f"{A}::0", f"{A}::1"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.2)
    with worlds() as made:
        yield made


def start(world: World, name: str, device_id: str, *slices: GpuSlice) -> str:
    """A pod whose container may start; it has made no driver call yet."""
    uid = world.pod(name, {"main": slices})
    until(lambda: world.pods.get(uid))
    world.allocate(uid, "main", [device_id])
    world.starts.start([device_id])
    return uid


def delete(world: World, name: str, uid: str) -> None:
    """Deletes a pod by force: the kubelet has not ended it yet."""
    world.delete_pod(name)
    until(lambda: world.pods.get(uid) is None)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_pod_deleted_by_force_keeps_its_slice_until_its_processes_have_ended(
    make: MakeWorld, restarted: bool
) -> None:
    world = make()
    old = start(world, "old", OLD, GpuSlice(A, 10000))
    world.process(old, 42)
    delete(world, "old", old)
    if restarted:
        world.agent()
        until(lambda: world.pods.synced)
    for _ in range(2):
        world.sweep.once(clean=True)
    assert world.sandboxes.directory(old, "main").exists()
    assert list(world.places.cdi.iterdir())
    assert world.holdings.granted()[A].mem == world.holdings.held()[A].mem == 10000
    with pytest.raises(Refusal, match="10000 held by other pods") as refused:
        start(world, "new", NEW, GpuSlice(A, 6000))
    assert refused.value.transient
    world.end_process(42)
    assert A not in world.holdings.granted()
    world.starts.start([NEW])
    world.sweep.once(clean=False)
    assert not world.sandboxes.directory(old, "main").exists()
    assert world.holdings.granted()[A].mem == 6000


def test_a_pod_that_has_finished_holds_nothing_while_its_sandbox_goes(make: MakeWorld) -> None:
    world = make()
    old = start(world, "old", OLD, GpuSlice(A, 10000))
    world.process(old, 42)  # for example its pause process
    world.finish_pod("old")
    until(lambda: (pod := world.holdings.pod(old)) and pod.finished)
    start(world, "new", NEW, GpuSlice(A, 6000))
    assert world.holdings.granted()[A].mem == 6000
