"""An agent next to containers that an agent of another version has started."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_world import MIB, A, B, MakeWorld, World, until, worlds

from device_plugin import library, other_version, starts
from device_plugin.foreign import TURNS, Observed, Process
from device_plugin.overhead import Identity
from device_plugin.pods import Pods
from device_plugin.refusal import Refusal
from device_plugin.sandbox import Sandboxes, limits_for, slices_of
from device_plugin.selinux import Labels
from vgpu import names
from vgpu.allocation import Held
from vgpu.devices import GpuSlice
from vgpu.native import Region
from vgpu.native.region import REGION_ABI

#: A region of version 2, as its own library wrote it (tests/data/README.md)
SECOND = Path(__file__).parents[1] / "data" / "regions" / "2"
SECOND_HAS = (GpuSlice(A, 10000, cores=30), GpuSlice(B, 4000, cores=10, phys=2000))
UID = "0a1b2c3d-0000-4000-8000-00000000000a"
ABI_AT = 8  # bytes into both files, after the magic number


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.2)
    with worlds() as made:
        yield made


def age(directory: Path, version: int = REGION_ABI + 1) -> None:
    """Makes the region look like that of another version; of a later version, this agent cannot even
    read the limits.
    """
    for name in ("limits", "usage"):
        with (directory / name).open("r+b") as file:
            file.seek(ABI_AT)
            file.write(struct.pack("=I", version))
    with pytest.raises(OSError, match="not a region of this version"):
        Region.open(directory)


def started(world: World, name: str, key: str, slices: list[GpuSlice]) -> str:
    uid = world.pod(name, {"main": slices})
    until(lambda: world.pods.get(uid))
    world.allocate(uid, "main", [key])
    world.starts.start([key])
    return uid


def upgrade(world: World) -> None:
    world.agent()
    until(lambda: world.pods.synced)


def test_the_version_is_where_the_library_puts_it(tmp_path: Path) -> None:
    Region.create(tmp_path, limits_for([GpuSlice(A, 1)])).close()
    assert other_version.abi_of(tmp_path) == REGION_ABI
    assert not other_version.is_one(tmp_path)
    age(tmp_path)
    assert other_version.is_one(tmp_path)
    with (tmp_path / "limits").open("r+b") as file:  # from the previous boot: no process uses it
        file.seek(16)
        file.write(b"x")
    assert other_version.abi_of(tmp_path) is None
    (tmp_path / "limits").write_bytes(b"cut short")
    assert other_version.abi_of(tmp_path) is None


@pytest.mark.parametrize(("version", "read"), [(2, True), (REGION_ABI + 1, False)])
def test_what_another_version_has_granted_is_not_granted_again(make: MakeWorld, version: int, read: bool) -> None:
    world = make()
    uid = started(world, "old", f"{A}::0", [GpuSlice(A, 10000)])
    age(world.sandboxes.directory(uid, "main"), version)
    upgrade(world)
    assert (uid in world.sandboxes.granted()) == read
    assert world.sandboxes.strangers() == {uid}
    assert world.holdings.granted()[A].mem == 10000
    assert world.holdings.held()[A].mem == 10000
    with pytest.raises(Refusal, match="10000 held by other pods"):
        started(world, "new", f"{A}::1", [GpuSlice(A, 6000)])
    assert figures(world, "old") == {"limit_bytes", "guarantee_bytes", "host_memory_limit_bytes", "core_limit_ratio"}
    assert len(figures(world, "new")) > 10, "it has used nothing yet"
    world.starts.start([f"{A}::0"])  # the container starts again, with a region of this version
    assert world.sandboxes.strangers() == set()
    assert world.holdings.granted()[A].mem == 10000
    assert figures(world, "old") == figures(world, "new")


def figures(world: World, pod: str) -> set[str]:
    """Names of the metrics that a pod's container has."""
    world.sweep.once(clean=False)
    return {
        family.name.removeprefix("vgpu_container_").removeprefix("memory_")
        for family in world.exporter.collect()
        if any(sample.labels.get("pod") == pod for sample in family.samples)
    }


def second(directory: Path) -> None:
    """Replaces the region with one of version 2 that was made since this boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    for name in ("limits", "usage"):
        content = (SECOND / name).read_bytes()
        header = content[:16] + boot.ljust(40, b"\0") + content[56:64]
        (directory / name).write_bytes(header + content[64:])
    (size,) = struct.unpack_from("=I", content, 12)
    with (directory / "usage").open("r+b") as file:
        file.truncate(size)


def test_limits_of_version_2_are_read(tmp_path: Path) -> None:
    second(tmp_path)
    with pytest.raises(OSError, match="not a region of this version"):
        Region.open(tmp_path)
    found = other_version.limits_of(tmp_path)
    assert found is not None
    assert slices_of(found) == SECOND_HAS
    assert (found.core_policy, found.priority, found.oversubscribe) == ("elastic", 1, True)
    assert found.cards[0].context_bytes == 105 * MIB
    with (tmp_path / "limits").open("r+b") as file:  # the copy before
        file.seek(64)
        file.write(struct.pack("=Q", 2))
    before = other_version.limits_of(tmp_path)
    assert before is not None
    assert slices_of(before) == (GpuSlice(A, 9000),)
    content = (tmp_path / "limits").read_bytes()
    for broken in (content[:1000], content[:128] + struct.pack("=I", 17) + content[132:]):
        (tmp_path / "limits").write_bytes(broken)
        assert other_version.limits_of(tmp_path) is None


def test_regions_of_this_version_are_no_strangers(tmp_path: Path) -> None:
    Region.create(tmp_path, limits_for(SECOND_HAS)).close()
    assert other_version.limits_of(tmp_path) is None


def test_of_a_later_version_the_record_holds_that_the_pod_had(make: MakeWorld) -> None:
    world = make()
    uid = started(world, "old", f"{A}::0", [GpuSlice(A, 10000)])
    age(world.sandboxes.directory(uid, "main"))
    world.process(uid, 42)
    upgrade(world)
    world.sweep.once(clean=False)
    world.delete_pod("old")
    until(lambda: world.pods.get(uid) is None)
    assert world.holdings.granted() == world.holdings.held() == {A: Held(1, 10000, 10000)}
    world.end_process(42)
    assert not world.holdings.granted()


@pytest.mark.parametrize("again", [False, True])
def test_a_container_of_version_2_keeps_what_it_has_also_without_its_pod(make: MakeWorld, again: bool) -> None:
    world = make()
    keys = [f"{A}::0", f"{B}::0"]
    uid = world.pod("old", {"main": SECOND_HAS})
    until(lambda: world.pods.get(uid))
    world.allocate(uid, "main", keys)
    world.sandboxes.directory(uid, "main").mkdir()
    second(world.sandboxes.directory(uid, "main"))
    world.process(uid, 42)
    upgrade(world)
    assert world.sandboxes.granted() == {uid: {"main": SECOND_HAS}}
    assert world.sandboxes.strangers() == {uid}
    if again:  # the container starts once more, with a region of this version
        world.starts.start(keys)
        assert world.sandboxes.strangers() == set()
        assert world.limits(uid).cards[0].memory == 10000 * MIB
    world.delete_pod("old")
    until(lambda: world.pods.get(uid) is None)
    world.sweep.once(clean=True)
    held = world.holdings.held()
    assert (held[A].mem, held[A].cores, held[B].mem, held[B].phys) == (10000, 30, 4000, 2000)
    with pytest.raises(Refusal, match="10000 held by other pods"):
        started(world, "new", f"{A}::1", [GpuSlice(A, 6000)])
    world.end_process(42)
    world.sweep.once(clean=False)
    assert not world.sandboxes.directory(uid, "main").exists()
    world.starts.start([f"{A}::1"])


def test_a_folder_stays_while_its_pod_has_processes(tmp_path: Path) -> None:
    sandboxes = Sandboxes(tmp_path / "run", Labels(tmp_path), proc=tmp_path / "proc")
    directory = sandboxes.prepare(UID, "main", limits_for([GpuSlice(A, 1)]))
    process = tmp_path / "proc" / "42"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(f"0::/kubepods/burstable/pod{UID}/0123abc\n")
    here = {(UID, "main")}
    assert sandboxes.survivors(here) == here
    assert not sandboxes.lives(UID, "main")  # where the API server still knows the pod, the region itself decides
    age(directory)
    assert sandboxes.survivors(here) == here
    assert sandboxes.lives(UID, "main")
    (process / "cgroup").write_text("0::/user.slice\n")
    assert not sandboxes.lives(UID, "main")
    assert not sandboxes.survivors(here)


def test_a_replayed_answer_with_a_library_of_another_version_starts_nothing(make: MakeWorld) -> None:
    world = make("envvar")
    uid = started(world, "p", f"{A}::0", [GpuSlice(A, 1)])
    old = world.granting.rollout.library
    world.places.built_library.write_bytes(b"another library")
    upgrade(world)
    world.starts.start([f"{A}::0"])  # another build, and the same kind of region
    old.with_suffix(".abi").unlink()  # agents before wrote none
    with pytest.raises(Refusal, match=f"{old.name}, which does not work .* recreate the pod") as refused:
        world.starts.start([f"{A}::0"])
    assert not refused.value.transient
    assert library.prune(world.places.library, {old}) == [old]
    assert uid in world.sandboxes.granted()


def test_what_another_version_s_containers_have_above_their_guarantee_is_lent_to_nobody(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory was scaled without host memory behind it: all of it is on the card."""
    world = make(plugin="deviceMemoryScaling: 2, hostMemory: 40960")
    world.cards.back(True)
    old = started(world, "old", f"{A}::0", [GpuSlice(A, 10000, phys=5000)])
    age(world.sandboxes.directory(old, "main"))
    world.observed = [Observed(A, 77, 10000 * MIB)]
    world.who = lambda _: Process("python3", Identity(1, 2, 3), old)
    with monkeypatch.context() as quiet:
        quiet.setattr(Pods, "start", lambda _: None)
        world.agent()
    watch = world.watch
    for _ in range(TURNS):  # the pods of the node are not known yet
        world.sweep.once(clean=False)
    assert not watch.foreign(A)
    assert not world.cards.inventory.devices[0].foreign
    world.pods.start()
    until(lambda: world.pods.synced)
    world.sweep.once(clean=False)
    assert (watch.foreign(A), watch.beyond(A), watch.beyond(B)) == ((), 5000 * MIB, 0)
    uid = world.pod("new", {"main": [GpuSlice(A, 12000, phys=4000)]}, annotations={names.MEMORY_MODE: "movable"})
    world.allocate(uid, "main", [f"{A}::1"])
    world.starts.start([f"{A}::1"])
    with Region.open(world.sandboxes.directory(uid, "main")) as region:
        assert region.usage().cards[0].lent == (15360 - 15360 // 64 - 5000 - 5000 - 4000) // 2 * 2 * MIB
    world.process(old, 42)
    world.delete_pod("old")
    until(lambda: world.pods.get(old) is None)
    for _ in range(TURNS):
        world.sweep.once(clean=False)
    assert (watch.foreign(A), watch.beyond(A)) == ((), 5000 * MIB), "it goes on, and is counted as before"
    world.end_process(42)
    for _ in range(1 + TURNS):
        world.sweep.once(clean=False)
    assert (watch.foreign(A), watch.beyond(A)) == ((10000 * MIB,), 0), "nobody knows it any more"
