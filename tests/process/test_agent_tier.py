"""More memory than cards have: what containers get of it, and from which containers it is taken back."""

import os

import msgspec
import pytest
from agent_world import MIB, A, B, MakeWorld, World, until

from device_plugin import lending, sweep
from device_plugin.foreign import TURNS, Observed
from device_plugin.refusal import Refusal
from device_plugin.sandbox import Entry
from vgpu import names, tier
from vgpu.allocation import Held
from vgpu.devices import GpuSlice
from vgpu.native import CardUsage, Region, Usage
from vgpu.native.region import REGION_ABI
from vgpu.tier import GRAIN

CARD = 15360  #: MiB
RESERVE = CARD // 64
SCALED = "deviceMemoryScaling: 2, hostMemory: 40960"
MOVABLE = {names.MEMORY_MODE: "movable"}


def start(
    world: World, name: str, *slices: GpuSlice, number: int = 0, annotations: dict[str, str] | None = None
) -> str:
    """A pod whose container has started; its UID."""
    uid = world.pod(name, {"main": slices}, annotations=annotations)
    device_ids = [f"{piece.uuid}::{number}" for piece in slices]
    world.allocate(uid, "main", device_ids)
    world.starts.start(device_ids)
    return uid


def usage(world: World, uid: str) -> tuple[CardUsage, ...]:
    with Region.open(world.sandboxes.directory(uid, "main")) as region:
        return region.usage().cards


def use(world: World, uid: str, amount: int, card: int = 0) -> Region:
    """A container with this much (MiB) of a card charged, as long as the region stays open."""
    region = Region.open(world.sandboxes.directory(uid, "main"), writable=True)
    region.charge_overhead(card, amount * MIB)
    return region


def whole(mib: int) -> int:
    """Bytes that can be lent of so many MiB."""
    return mib * MIB // GRAIN * GRAIN


def test_a_slice_of_a_scaled_card_has_host_memory_behind_it(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    assert [gpu.memory for gpu in world.cards.inventory.devices] == [2 * CARD, 2 * CARD]
    first = start(world, "first", GpuSlice(A, 10000, phys=5000))
    limits = world.limits(first)
    assert (limits.oversubscribe, limits.movable) == (True, False)
    assert (limits.cards[0].memory, limits.cards[0].guarantee) == (10000 * MIB, 5000 * MIB)
    assert limits.host_memory == whole(40960), "all of it, as long as nobody else is there"
    second = start(world, "second", GpuSlice(A, 20000, phys=10000), GpuSlice(B, 20000, phys=10000), number=1)
    left = (40960 - 5000 - 2 * 10000) // 3
    assert world.limits(first).host_memory == 5000 * MIB + whole(left)
    assert world.limits(second).host_memory == 10000 * MIB + whole(left), "nobody has any of its guarantee"
    plain = start(world, "plain", GpuSlice(B, 5000), number=2)
    assert (world.limits(plain).oversubscribe, world.limits(plain).host_memory) == (False, 0)
    world.delete_pod("second")
    world.forget(second)
    world.pods.refresh()
    world.sweep.once(clean=False)
    world.sweep.once(clean=False)
    assert world.limits(first).host_memory == whole(40960)


def test_the_mode_is_that_of_the_pod_else_of_the_node(make: MakeWorld) -> None:
    world = make(plugin=f"{SCALED}, memoryMode: movable")
    world.cards.back(True)
    assert world.limits(start(world, "node", GpuSlice(A, 100, phys=50))).movable
    static = start(world, "pod", GpuSlice(A, 100, phys=50), number=1, annotations={names.MEMORY_MODE: "static"})
    assert not world.limits(static).movable
    assert not world.limits(start(world, "whole", GpuSlice(A, 100), number=2)).movable, "nothing of it ever moves"


def test_room_is_lent_to_what_can_move_and_taken_back_before_somebody_starts(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    first = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    assert usage(world, first)[0].lent == whole(CARD - RESERVE - 8000) > 0, "from the beginning"
    still = start(world, "still", GpuSlice(A, 4000, phys=2000), number=1)
    free = CARD - RESERVE - 8000 - 2000
    assert [card.lent for card in (*usage(world, first), *usage(world, still))] == [whole(free), 0]
    second = start(world, "second", GpuSlice(A, 6000, phys=3000), number=2, annotations=MOVABLE)
    assert usage(world, first)[0].lent == usage(world, second)[0].lent == whole((free - 3000) // 2)
    uses = use(world, first, 12000)
    world.lending.settle()
    assert (usage(world, first)[0].lent, usage(world, second)[0].lent) == (whole(free - 3000), 0), "who needs it has it"
    uses.close()
    start(world, "plain", GpuSlice(A, CARD - 8000 - 2000 - 3000), number=3)
    assert usage(world, first)[0].lent == 0, "before the other one began"


@pytest.mark.usefixtures("impatient")
def test_a_container_without_host_memory_waits_for_what_was_lent(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "WHOLE_SECONDS", 0.0)
    world = make(plugin=SCALED)
    world.cards.back(True)
    first = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    uses = use(world, first, 13000)
    world.lending.settle()
    start(world, "fits", GpuSlice(A, CARD - 13000), number=1)
    with pytest.raises(Refusal, match=r"other containers still have 2000 MiB of card 0 .* that vgpu lent them"):
        start(world, "plain", GpuSlice(A, 2000), number=2)
    world.sweep.once(clean=False)
    rest = CARD - 8000 - (CARD - 13000) - 2000
    assert usage(world, first)[0].lent == whole(rest - RESERVE), "kept for it until the kubelet tries again"
    uses.charge_overhead(0, (8000 + RESERVE) * MIB)
    world.starts.start([f"{A}::2"])
    start(world, "moves", GpuSlice(A, 2000, phys=1000), number=3)
    uses.charge_overhead(0, 13000 * MIB)
    with pytest.raises(Refusal, match="other containers still have"):
        start(world, "late", GpuSlice(A, 1500), number=4)
    monkeypatch.setattr(lending, "COMING_SECONDS", 0.0)
    with pytest.raises(Refusal, match="other containers still have"):
        world.starts.start([f"{A}::4"])
    world.lending.settle()
    assert usage(world, first)[0].lent == whole(CARD - RESERVE - 8000 - (CARD - 13000) - 2000 - 1000)
    uses.close()


def test_what_a_neighbour_still_has_of_the_card_may_lie_in_host_memory_until_it_is_back(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "WHOLE_SECONDS", 0.0)
    world = make(plugin=f"deviceMemoryScaling: 1.5, hostMemory: {CARD}")  # for both cards, and all of it is needed
    world.cards.back(True)
    half, behind = CARD // 2, CARD // 4
    first = start(world, "first", GpuSlice(A, half + behind, phys=half), annotations=MOVABLE)
    uses = use(world, first, half + 1000)
    second = start(world, "second", GpuSlice(A, half + behind, phys=half), number=1, annotations=MOVABLE)
    other = start(world, "other", GpuSlice(B, 2 * half + 2 * behind, phys=2 * half), number=2)
    assert usage(world, first)[0].lent == 0
    assert world.limits(second).host_memory == (behind + 1000) * MIB
    assert world.limits(other).host_memory == 2 * behind * MIB, "nobody has any of its guarantee"
    taken = use(world, second, half - 300)
    world.lending.settle()
    assert world.limits(first).host_memory == behind * MIB
    assert world.limits(second).host_memory == (behind + 300) * MIB, "what it lacks of its guarantee"
    for one in (uses, taken):
        one.close()


def test_nothing_is_lent_before_it_is_known_who_uses_the_cards(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    uid = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    before, little = usage(world, uid)[0].lent, 1000 * MIB
    world.watch._looks = 0  # as after a restart
    with Region.open(world.sandboxes.directory(uid, "main"), writable=True) as region:
        region.lend(0, before + 1000 * MIB)
        world.lending.settle()
        assert usage(world, uid)[0].lent == before, "taken back at once"
        region.lend(0, little)
        for _ in range(TURNS):
            world.lending.settle()
            assert usage(world, uid)[0].lent == little
            world.sweep.once(clean=False)
        assert usage(world, uid)[0].lent == before
        region.lend(0, little)
        world.pods._informer.synced.clear()
        world.sweep.once(clean=False)
        assert usage(world, uid)[0].lent == little


def test_what_is_kept_back_of_a_card_is_not_lent(make: MakeWorld) -> None:
    world = make(plugin="deviceMemoryScaling: 2, hostMemory: 40960")
    world.cards.back(True)
    uid = start(world, "first", GpuSlice(A, 16000, phys=4000), annotations=MOVABLE)
    world.cards.scaling = tier.Scaling(0.5, host_memory=40960)
    world.lending.settle()
    assert usage(world, uid)[0].lent == whole(CARD // 2 - CARD // 2 // 64 - 4000)


def test_a_start_that_hangs_in_the_driver_stops_nothing_else(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    uid = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    before = usage(world, uid)[0].lent
    with world.lending.making_room("another", "main", {A: Held(1, 3000, 3000)}, ()):
        world.sweep.once(clean=False)
        assert usage(world, uid)[0].lent == before - 3000 * MIB
    world.sweep.once(clean=False)
    assert usage(world, uid)[0].lent == before


def test_what_others_have_of_a_card_is_not_lent(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    uid = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    world.observed = [Observed(A, 77, 500 * MIB)]
    world.who = lambda _: None
    for _ in range(TURNS):
        world.sweep.once(clean=False)
    assert usage(world, uid)[0].lent == whole(CARD - RESERVE - 8000 - 500)


@pytest.mark.usefixtures("impatient")
def test_a_slice_that_needs_host_memory_does_not_start_without(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    uid = world.pod("early", {"main": [GpuSlice(A, 10000, phys=5000)]})
    world.allocate(uid, "main", [f"{A}::0"])
    with pytest.raises(Refusal, match="has not reported"):
        world.starts.start([f"{A}::0"])
    world.cards.back(True)
    world.starts.start([f"{A}::0"])
    world.cards.back(False)
    assert [gpu.memory for gpu in world.cards.inventory.devices] == [CARD, CARD]
    with pytest.raises(Refusal, match="does not reserve the host memory"):  # even where all of it had room on the card
        start(world, "small", GpuSlice(A, 5000, phys=2500), number=1)
    assert world.holdings.granted()[A] == Held(1, 10000, 5000), "what runs keeps its own, as the scheduler has it"
    world.starts.start([f"{A}::0"])
    limits = world.limits(uid)
    assert (limits.oversubscribe, limits.host_memory) == (True, 5000 * MIB)


def test_a_container_that_has_started_starts_again_when_scaling_is_lower(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    first = start(world, "first", GpuSlice(A, 15000, phys=7500))
    second = start(world, "second", GpuSlice(A, 15000, phys=7500), number=1)
    world.cards.scaling = tier.UNSCALED
    world.starts.start([f"{A}::0"])
    world.starts.start([f"{A}::1"])
    assert [world.limits(uid).host_memory for uid in (first, second)] == [7500 * MIB, 7500 * MIB]


def test_what_another_version_started_starts_again_without_host_memory(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    uids = [start(world, name, GpuSlice(A, 15000, phys=7500), number=at) for at, name in enumerate(("first", "second"))]
    for uid in uids:
        for name in ("limits", "usage"):
            with (world.sandboxes.directory(uid, "main") / name).open("r+b") as file:
                file.seek(8)
                file.write((REGION_ABI + 1).to_bytes(4, "little"))  # limits that cannot be read
    world.cards.scaling = tier.Scaling(2.0)
    world.agent()
    until(lambda: world.pods.synced)
    assert world.sandboxes.granted() == {}
    for at, uid in enumerate(uids):
        world.starts.start([f"{A}::{at}"])
        assert (world.limits(uid).oversubscribe, world.limits(uid).host_memory) == (True, 7500 * MIB)


def test_a_region_is_made_anew_where_its_memory_is_of_another_kind(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    uid = start(world, "p", GpuSlice(A, 100, phys=50))
    path = world.sandboxes.directory(uid, "main") / "limits"
    with path.open() as before:
        world.starts.start([f"{A}::0"])
        assert path.stat().st_ino == os.fstat(before.fileno()).st_ino
        assert world.limits(uid).host_memory == whole(40960), "what it has itself is not another one's"
        limits = msgspec.structs.replace(world.limits(uid), movable=True)
        world.sandboxes.prepare(uid, "main", limits)
        assert world.limits(uid).movable
        assert path.stat().st_ino != os.fstat(before.fileno()).st_ino


def test_the_picture_of_the_metrics_has_loans_and_budgets(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    start(world, "p", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    for _ in range(2):
        world.sweep.once(clean=False)
    found = {
        family.name: [sample.value for sample in family.samples]
        for family in world.exporter.collect()
        if "host_memory" in family.name or "lent" in family.name or family.name.startswith("vgpu_card_memory")
    }
    assert found["vgpu_node_host_memory_bytes"] == [40960 * MIB]
    assert found["vgpu_container_host_memory_limit_bytes"] == [whole(40960)]
    assert found["vgpu_container_memory_lent_bytes"] == [whole(CARD - RESERVE - 8000)]
    assert found["vgpu_card_memory_scaled_bytes"] == [2 * CARD * MIB] * 2
    assert found["vgpu_card_memory_guaranteed_bytes"] == [8000 * MIB, 0]


def test_what_lies_in_host_memory_behind_a_card_that_is_not_scaled_is_not_on_it(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    start(world, "p", GpuSlice(A, 16000, phys=8000), GpuSlice(B, 1000))
    start(world, "q", GpuSlice(A, 100), number=1)

    def read(entry: Entry) -> tuple[tuple[GpuSlice, ...], Usage]:
        slices = world.sandboxes.granted()[entry.pod_uid][entry.container]
        return slices, Usage((CardUsage(used=10, host_used=4, resident=6 if len(slices) > 1 else 0),) * len(slices), ())

    monkeypatch.setattr(sweep, "_read", read)
    world.sweep.once(clean=False)
    (family,) = (one for one in world.exporter.collect() if one.name == "vgpu_container_memory_resident_bytes")
    found = {(sample.labels["pod"], sample.labels["uuid"]): sample.value for sample in family.samples}
    assert found == {("p", A): 6, ("p", B): 6, ("q", A): 10}


def test_a_finished_pod_has_no_part_of_what_is_shared(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    for number, name in enumerate(("ends", "stays")):
        uid = start(world, name, GpuSlice(A, 10000, phys=5000), number=number, annotations=MOVABLE)
    for _ in range(2):
        world.sweep.once(clean=False)
    assert world.limits(uid).host_memory == 20480 * MIB
    world.finish_pod("ends")
    until(lambda: any(pod.finished for pod in world.pods.all()))
    world.lending.settle()
    assert world.limits(uid).host_memory == 40960 * MIB
    assert usage(world, uid)[0].lent == 5000 * MIB
