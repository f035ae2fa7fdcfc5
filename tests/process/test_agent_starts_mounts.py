"""Starts where cards and library reach a container by mounts that follow its ids."""

import pytest
from agent_world import MIB, A, B, MakeWorld, until

from device_plugin import ids
from device_plugin.refusal import Refusal
from vgpu import names
from vgpu.devices import GpuSlice
from vgpu.native import Region

ID_A, ID_B = f"{A}::0", f"{B}::0"


def test_a_harmed_library_is_put_back_before_the_start(make: MakeWorld) -> None:
    world = make()
    world.allocate(world.pod("p", {"main": [GpuSlice(A, mem=100)]}), "main", [ID_A])
    library = world.granting.rollout.library
    library.unlink()
    library.mkdir()
    world.granting.rollout.preload.write_text("")
    world.starts.start([ID_A])
    assert library.read_bytes() == b"the library"
    assert world.granting.rollout.preload.read_text() == "/usr/local/vgpu/libvgpu.so\n"


@pytest.mark.usefixtures("impatient")
def test_an_old_library_that_a_cached_answer_names_must_be_there(make: MakeWorld) -> None:
    world = make("envvar")
    world.allocate(world.pod("p", {"main": [GpuSlice(A, mem=100)]}), "main", [ID_A])
    old = world.granting.rollout.library
    (world.root / "built" / "libvgpu.so").write_bytes(b"a newer library")
    world.agent()
    assert world.granting.rollout.library != old
    world.starts.start([ID_A])
    old.unlink()
    with pytest.raises(Refusal, match="would run without limits"):
        world.starts.start([ID_A])


def test_with_mounts_a_link_by_ids_leads_to_the_container_that_starts(make: MakeWorld) -> None:
    world = make("envvar")
    answer = world.starts.answer([ID_A])
    assert answer.cdi_names == ()
    place = world.sandboxes.by_ids / ids.key([ID_A])
    assert {m.container: m.host for m in answer.mounts}["/run/vgpu/limits"] == place / "limits"
    for name in ("one", "two"):
        uid = world.pod(name, {"main": [GpuSlice(A, mem=100)]})
        world._entries.clear()
        world.allocate(uid, "main", [ID_A])
        world.starts.start([ID_A])
        assert (place / "limits").resolve() == world.sandboxes.directory(uid, "main").resolve() / "limits"
        world.delete_pod(name)


def test_with_mounts_and_shared_ids_the_larger_slice_is_held(make: MakeWorld) -> None:
    world = make("envvar")
    uid = world.pod("p", {"first": [GpuSlice(A, 900)], "main": [GpuSlice(A, 800, cores=20)]}, init=["first"])
    world.allocate(uid, "first", [ID_A])
    world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    place = world.sandboxes.by_ids / ids.key([ID_A])
    with Region.open(place.resolve()) as region:
        assert region.limits().cards[0].memory == 900 * MIB


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("slices", "device_ids", "annotations", "text"),
    [
        ([GpuSlice(A, 1)], [ID_B], {names.NOUSE_GPU_UUID: B}, "does not accept"),
        ([GpuSlice(A, 1)], [ID_B], {names.USE_GPU_TYPE: "A100"}, "does not accept"),
        ([GpuSlice(A, 1), GpuSlice(B, 1)], [ID_A, f"{A}::1"], {}, "several ids of one card"),
    ],
)
def test_ids_that_no_record_could_follow_are_refused_and_told(
    make: MakeWorld, slices: list[GpuSlice], device_ids: list[str], annotations: dict[str, str], text: str
) -> None:
    world = make("envvar")
    world.allocate(world.pod("p", {"main": slices}, annotations=annotations), "main", device_ids)
    with pytest.raises(Refusal, match=text):
        world.starts.start(device_ids)
    assert text in until(world.events)[0]["message"]
