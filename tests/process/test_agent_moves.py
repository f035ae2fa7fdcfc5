"""Where mounts give cards, records follow the ids that the kubelet gave; no card is ever recorded beyond its size."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from agent_world import A, B, MakeWorld, World, until

from device_plugin.refusal import Refusal
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.devices import GpuSlice
from vgpu.kube import writes

ID_A, ID_B = f"{A}::0", f"{B}::0"


def recorded(world: World, name: str) -> Allocation:
    return allocation.decode((world.read_pod(name) or {})["metadata"]["annotations"][names.ALLOCATION])


def test_two_pods_that_swapped_cards_are_recorded_where_they_are(make: MakeWorld) -> None:
    world = make("envvar")
    world.scheduler()
    one = world.pod("one", {"main": [GpuSlice(A, mem=10000, cores=60)]})
    two = world.pod("two", {"main": [GpuSlice(B, mem=9000, cores=50)]})
    world.allocate(one, "main", [ID_B])
    world.allocate(two, "main", [ID_A])
    with ThreadPoolExecutor(2) as kubelet:
        list(kubelet.map(world.starts.start, ([ID_B], [ID_A])))
    for name, uid, card, mem in (("one", one, B, 10000), ("two", two, A, 9000)):
        record = recorded(world, name)
        assert [(piece.uuid, piece.mem) for piece in record.containers["main"]] == [(card, mem)]
        assert not record.moving
        assert world.limits(uid).cards[0].uuid == card


def test_an_init_container_moves_with_the_container_that_inherits_its_ids(make: MakeWorld) -> None:
    world = make("envvar")
    world.scheduler()
    slices = {"first": [GpuSlice(A, mem=9000)], "main": [GpuSlice(A, mem=10000)]}
    one = world.pod("one", slices, init=["first"])
    two = world.pod("two", {"main": [GpuSlice(B, mem=9000)]})
    world.allocate(one, "first", [ID_B])
    world.allocate(one, "main", [ID_B])
    world.allocate(two, "main", [ID_A])
    with ThreadPoolExecutor(2) as kubelet:
        list(kubelet.map(world.starts.start, ([ID_B], [ID_A])))
    moved = {"first": (GpuSlice(B, mem=9000),), "main": (GpuSlice(B, mem=10000),)}
    assert recorded(world, "one") == Allocation(moved)
    assert recorded(world, "two") == Allocation({"main": (GpuSlice(A, mem=9000),)})


@pytest.mark.usefixtures("impatient")
def test_a_move_to_what_a_pod_holds_that_has_not_started_waits(make: MakeWorld) -> None:
    world = make("envvar")
    world.scheduler()
    world.pod("there", {"main": [GpuSlice(B, mem=10000)]})
    moved = world.pod("moved", {"main": [GpuSlice(A, mem=6000)]})
    world.allocate(moved, "main", [f"{B}::1"])
    with pytest.raises(Refusal, match="card 1; the scheduler has not found room there yet") as caught:
        world.starts.start([f"{B}::1"])
    assert caught.value.transient
    record = recorded(world, "moved")
    assert record.containers["main"] == (GpuSlice(A, mem=6000),)
    assert record.moving["main"] == (GpuSlice(B, mem=6000),)
    assert not world.sandboxes.directory(moved, "main").exists()
    world.delete_pod("there")
    until(lambda: not recorded(world, "moved").moving)
    world.starts.start([f"{B}::1"])
    assert world.limits(moved).cards[0].uuid == B


@pytest.mark.usefixtures("impatient")
def test_a_move_that_is_not_needed_any_more_is_taken_back(make: MakeWorld) -> None:
    world = make("envvar")
    moved = world.pod("moved", {"main": [GpuSlice(A, mem=6000)]})
    world.allocate(moved, "main", [ID_B])
    with pytest.raises(Refusal, match="has not found room"):
        world.starts.start([ID_B])
    world.forget(moved)
    world.allocate(moved, "main", [ID_A])
    world.starts.start([ID_A])
    assert recorded(world, "moved") == Allocation({"main": (GpuSlice(A, mem=6000),)})


@pytest.mark.usefixtures("impatient")
def test_a_pod_that_has_made_room_for_others_waits_for_its_own(make: MakeWorld) -> None:
    world = make("envvar")
    world.allocate(world.pod("there", {"main": [GpuSlice(B, mem=10000)]}), "main", [ID_B])
    world.starts.start([ID_B])
    uid = world.pod("aside", {"main": [GpuSlice(A, mem=6000)]})
    leaving = Allocation({"main": (GpuSlice(A, mem=6000),)}, {"main": (GpuSlice(B, mem=6000),)}).leaving()
    text = {"annotations": {names.ALLOCATION: allocation.encode(leaving)}}
    writes.patch_pod(world.client, "default", "aside", text)
    world.allocate(uid, "main", [f"{B}::1"])
    with pytest.raises(Refusal) as caught:
        world.starts.start([f"{B}::1"])
    assert caught.value.transient
    assert world.holdings.held()[B].mem == 16000
    world.delete_pod("there")
    with pytest.raises(Refusal, match="has not found room"):
        world.starts.start([f"{B}::1"])
    assert recorded(world, "aside") == leaving


@pytest.mark.usefixtures("impatient")
def test_a_move_that_does_not_fit_is_refused_and_not_recorded(make: MakeWorld) -> None:
    world = make("envvar")
    world.allocate(world.pod("there", {"main": [GpuSlice(B, mem=10000)]}), "main", [ID_B])
    world.starts.start([ID_B])
    world.allocate(world.pod("moved", {"main": [GpuSlice(A, mem=6000)]}), "main", [f"{B}::1"])
    with pytest.raises(Refusal, match="do not fit"):
        world.starts.start([f"{B}::1"])
    assert A in (world.read_pod("moved") or {})["metadata"]["annotations"][names.ALLOCATION]
