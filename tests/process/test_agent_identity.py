"""Containers that share ids: the checkpoint lists them, the container runtime says which of them starts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from agent_world import MIB, A, B, World, until, worlds
from cri_world import SmallRuntime

from device_plugin import cri, starts
from device_plugin.refusal import Refusal
from vgpu.devices import GpuSlice

ID_A, ID_B = f"{A}::0", f"{B}::0"


@pytest.fixture
def world() -> Iterator[World]:
    with worlds() as make:
        yield make("envvar")


@pytest.fixture
def runtime(world: World) -> Iterator[SmallRuntime]:
    made = SmallRuntime(world.root / "host" / cri.SOCKETS[0])
    made.start()
    yield made
    made.stop()


def granted(world: World, uid: str) -> dict[str, int]:
    """MiB of each container with a region."""
    return {name: slices[0].mem for name, slices in world.sandboxes.granted().get(uid, {}).items()}


def linked(world: World) -> list[str]:
    """The containers whose folders the mounts of all ids lead to."""
    return sorted(link.readlink().name.partition("_")[2] for link in world.sandboxes.by_ids.iterdir())


def start(world: World, runtime: SmallRuntime, uid: str, name: str, device: str = ID_A) -> None:
    """Does what a kubelet does: PreStartContainer, then the container is made with its own mounts."""
    world.starts.start([device])
    assert name in linked(world)
    runtime.run(uid, name)


def test_an_init_container_that_fails_starts_again_with_its_own_limits_and_then_the_app(
    world: World, runtime: SmallRuntime
) -> None:
    uid = world.pod("p", {"first": [GpuSlice(A, 8000)], "main": [GpuSlice(A, 9000, cores=20)]}, init=["first"])
    for name in ("first", "main"):
        world.allocate(uid, name, [ID_A])
    start(world, runtime, uid, "first")
    assert granted(world, uid) == {"first": 8000}
    runtime.exit(uid, "first", 1)
    world.agent()  # killed in between: only the runtime knows how far the pod is
    start(world, runtime, uid, "first")
    assert granted(world, uid) == {"first": 8000}
    runtime.exit(uid, "first", 0)
    world.agent()
    start(world, runtime, uid, "main")
    assert granted(world, uid) == {"first": 8000, "main": 9000}
    assert world.limits(uid).cards[0].memory == 9000 * MIB
    runtime.exit(uid, "main", 1)
    runtime.remove(uid, "first")  # garbage-collected: the app container starts again, not the first one
    start(world, runtime, uid, "main")
    runtime.sandbox(uid)  # the sandbox died: all containers start again
    start(world, runtime, uid, "first")
    runtime.exit(uid, "first", 0)
    start(world, runtime, uid, "main")
    assert world.holdings.granted()[A].mem == 9000


def test_several_init_containers_a_sidecar_and_several_gpu_containers(world: World, runtime: SmallRuntime) -> None:
    uid = world.pod(
        "p",
        {
            "one": [GpuSlice(A, 100)],
            "two": [GpuSlice(A, 200)],
            "proxy": [GpuSlice(A, 300)],
            "main": [GpuSlice(B, 400)],
            "other": [GpuSlice(A, 500)],
        },
        init=["one", "two"],
        sidecars=["proxy"],
    )
    for name, device in (("one", ID_A), ("two", ID_A), ("proxy", ID_A), ("main", ID_B), ("other", f"{A}::1")):
        world.allocate(uid, name, [device])
    for name, mem in (("one", 100), ("two", 200)):
        start(world, runtime, uid, name)
        assert granted(world, uid)[name] == mem
        runtime.exit(uid, name, 0)
    start(world, runtime, uid, "proxy")
    start(world, runtime, uid, "main", ID_B)
    start(world, runtime, uid, "other", f"{A}::1")
    assert linked(world) == ["main", "other", "proxy"]
    runtime.exit(uid, "proxy", 137)
    start(world, runtime, uid, "proxy")
    assert granted(world, uid) == {"one": 100, "two": 200, "proxy": 300, "main": 400, "other": 500}


def test_two_pods_of_equal_size_start_at_once_each_with_its_own(world: World, runtime: SmallRuntime) -> None:
    uids = {}
    for number, device in enumerate((ID_A, f"{A}::1")):
        slices = {"first": [GpuSlice(A, 100 + number)], "main": [GpuSlice(A, 200 + number)]}
        uids[device] = world.pod(f"p{number}", slices, init=["first"])
        for name in slices:
            world.allocate(uids[device], name, [device])
    for name, base in (("first", 100), ("main", 200)):
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda device: world.starts.start([device]), uids))
        for number, uid in enumerate(uids.values()):
            assert granted(world, uid)[name] == base + number
            runtime.run(uid, name)
            runtime.exit(uid, name, 0)


def test_without_a_runtime_the_larger_slice_holds(world: World, caplog: pytest.LogCaptureFixture) -> None:
    uid = world.pod("p", {"first": [GpuSlice(A, 9000)], "main": [GpuSlice(A, 8000)]}, init=["first"])
    for name in ("first", "main"):
        world.allocate(uid, name, [ID_A])
    world.starts.start([ID_A])
    assert granted(world, uid) == {"first": 9000}
    assert "no container runtime to ask which one starts" in caplog.text
    old = SmallRuntime(world.root / "host" / cri.SOCKETS[1])
    old.failure = grpc.StatusCode.UNIMPLEMENTED  # only CRI v1alpha2
    old.start()
    try:
        world.starts.start([ID_A])
    finally:
        old.stop()


def test_a_runtime_that_fails_is_asked_again(
    world: World, runtime: SmallRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = world.pod("p", {"first": [GpuSlice(A, 9000)], "main": [GpuSlice(A, 8000)]}, init=["first"])
    for name in ("first", "main"):
        world.allocate(uid, name, [ID_A])
    runtime.run(uid, "first")
    runtime.exit(uid, "first", 0)
    runtime.failure = grpc.StatusCode.UNAVAILABLE
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.3)
    with pytest.raises(Refusal, match="the container runtime does not list") as caught:
        world.starts.start([ID_A])
    assert caught.value.transient
    assert granted(world, uid) == {}
    runtime.stop()
    runtime.failure = None
    runtime.start()  # restarted: its socket is another one
    world.starts.start([ID_A])
    assert granted(world, uid) == {"main": 8000}


def test_a_record_that_gives_the_same_ids_to_two_pods_is_not_believed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (world.pod(name, {"main": [GpuSlice(A, mem)]}) for name, mem in (("old", 9000), ("new", 100)))
    for uid in (old, new):
        world.allocate(uid, "main", [ID_A])
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.3)
    with pytest.raises(Refusal, match="lists the same ids for default/old, default/new") as caught:
        world.starts.start([ID_A])
    assert caught.value.transient
    world.finish_pod("old")
    until(lambda: (pod := world.pods.get(old)) and pod.finished)
    world.starts.start([ID_A])
    assert granted(world, new) == {"main": 100}
