"""Containers that have borrowed room of a card, and containers that wait for it."""

from typing import cast

import msgspec
import pytest
from agent_world import A, B, MakeWorld, World, until
from test_agent_tier import CARD, MOVABLE, SCALED, start, use

from device_plugin import backstop, lending, overdue_loans, starts
from device_plugin.foreign import Observed, Process
from device_plugin.overhead import Identity
from device_plugin.refusal import Refusal
from vgpu import names, tier
from vgpu.devices import GpuSlice
from vgpu.native import ProcessUsage, Region
from vgpu.tier import MIB


@pytest.mark.usefixtures("impatient")
def test_a_container_that_may_have_host_memory_waits_for_its_guarantee_and_then_for_what_it_needs_at_once(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    first = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    uses = use(world, first, 13000)
    with pytest.raises(Refusal, match="other containers still have 640 MiB of card 0"):
        start(world, "second", GpuSlice(A, 6000, phys=3000), number=1)
    monkeypatch.setattr(lending, "WHOLE_SECONDS", 0.0)
    world.starts.start([f"{A}::1"])
    late = CARD - 8000 - 3000 - tier.at_first(3000 * MIB, 0) // MIB
    with pytest.raises(Refusal, match=f"other containers still have {5000 - late} MiB of card 0"):
        start(world, "third", GpuSlice(A, 6000, phys=3000), number=2)
    uses.charge_overhead(0, (8000 + late) * MIB)
    world.starts.start([f"{A}::2"])
    uses.close()


def test_what_a_container_needs_at_once_is_for_contexts_and_what_comes_with_them() -> None:
    assert tier.at_first(400 * MIB, 0) == 400 * MIB
    assert tier.at_first(4000 * MIB, 0) == tier.at_first(4000 * MIB, 100 * MIB) == 512 * MIB
    assert tier.at_first(4000 * MIB, 500 * MIB) == 1000 * MIB
    assert tier.at_first(600 * MIB, 500 * MIB) == 600 * MIB


def quiet(world: World) -> None:
    """Waits until all messages have been sent."""
    world.consequences._worker.submit(int).result(60)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("evict", [False, True])
def test_who_gives_nothing_back_is_told_and_evicted_where_that_is_wanted_and_who_waits_is_not(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch, evict: bool
) -> None:
    world = make(plugin=f"{SCALED}, backstop: {'evict' if evict else 'warn'}")
    world.cards.back(True)
    uids = {}
    for number, (name, piece) in enumerate(
        {"lender": GpuSlice(A, 16000, phys=8000), "other": GpuSlice(B, 100)}.items()
    ):
        uids[name] = world.pod(name, {"main": [piece]}, owner="ReplicaSet", annotations=MOVABLE)
        world.allocate(uids[name], "main", [f"{piece.uuid}::{number}"])
        world.starts.start([f"{piece.uuid}::{number}"])
    uses = use(world, uids["lender"], 13000)
    world.lending.settle()
    waits = world.pod("waits", {"main": [GpuSlice(A, 5000)]}, owner="Job")
    world.allocate(waits, "main", [f"{A}::5"])
    monkeypatch.setattr(starts, "END_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(Refusal, match="other containers still have 2640 MiB"):
            world.starts.start([f"{A}::5"])
    quiet(world)
    assert not [one for one in world.events() if one["reason"] in (names.EVENT_KEPT, names.EVENT_MISMATCH)]
    monkeypatch.setattr(overdue_loans, "OVERDUE_SECONDS", 0.0)
    world.sweep.once(clean=False)
    quiet(world)
    (told,) = (one for one in world.events() if one["reason"] == names.EVENT_KEPT)
    assert told["involvedObject"]["name"] == "lender"
    assert "Container main must give back 2880 MiB of card 0 (Tesla T4, " in told["message"]
    world.sweep.once(clean=False)
    (owed,) = (family for family in world.exporter.collect() if family.name == "vgpu_container_memory_owed_bytes")
    assert [one.value for one in owed.samples if one.value] == [2880 * MIB]
    here = {name: world.read_pod(name) for name in ("lender", "other", "waits")}
    ending = {name for name, pod in here.items() if pod is None or "deletionTimestamp" in pod["metadata"]}
    assert ending == ({"lender"} if evict else set())
    uses.close()


@pytest.mark.usefixtures("impatient")
def test_a_container_that_says_it_has_more_than_it_has_keeps_nobody_from_the_card(make: MakeWorld) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    liar = start(world, "liar", GpuSlice(A, 12000, phys=4000), annotations=MOVABLE)
    says = use(world, liar, 10**6)  # the container claims this in its own usage file
    room = CARD - 12000
    start(world, "small", GpuSlice(A, room), number=1)
    with pytest.raises(Refusal, match="other containers still have 500 MiB"):
        start(world, "plain", GpuSlice(A, 500), number=2)  # the borrower could have as much as its limit
    world.observed = [Observed(A, 77, 4300 * MIB)]
    world.who = lambda _: Process("liar", Identity(1, 2, 3), liar)
    for _ in range(backstop.TURNS - 1):
        world.sweep.once(clean=False)
    with pytest.raises(Refusal, match="other containers still have"):
        world.starts.start([f"{A}::2"])
    world.sweep.once(clean=False)
    world.starts.start([f"{A}::2"])
    until(lambda: world.pods.synced)
    says.charge_overhead(0, 4300 * MIB)
    world.sweep.once(clean=False)
    assert world.watch.absent(world.sandboxes.entries()[0], A) == 0
    says.close()


def test_init_containers_that_have_ended_have_no_part_of_what_is_shared(make: MakeWorld) -> None:
    behind, host = CARD // 2, CARD // 2 * 2 * 5 // 4
    world = make(plugin=f"deviceMemoryScaling: 1.5, hostMemory: {host}")
    world.cards.back(True)
    uids = []
    for card in (A, B):
        slices = {name: [GpuSlice(card, CARD + behind, phys=CARD)] for name in ("prepare", "main")}
        uids.append(world.pod(f"on-{card[4]}", slices, init=["prepare"], annotations=MOVABLE))
        until(lambda: world.pods.get(uids[-1]))
        for name in slices:
            world.allocate(uids[-1], name, [f"{card}::{name}"])
            world.starts.start([f"{card}::{name}"])
    assert [world.limits(uid).host_memory for uid in uids] == [host // 2 * MIB] * 2
    world.starts.start([f"{A}::prepare"])  # in a new sandbox
    world.lending.settle()
    part = behind + (host - 3 * behind) // 3
    assert world.limits(uids[0], "prepare").host_memory == world.limits(uids[1]).host_memory == max(behind, part) * MIB
    world.starts.start([f"{A}::main"])
    assert [world.limits(uid).host_memory for uid in uids] == [host // 2 * MIB] * 2


@pytest.mark.parametrize(("restart", "budget"), [("Always", 20480), ("Never", 40960)])
def test_a_container_that_has_ended_has_a_part_of_what_is_shared_where_it_is_restarted(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch, restart: str, budget: int
) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    slices = {name: [GpuSlice(A, 10000, phys=5000)] for name in ("ends", "stays")}
    uid = world.pod("pod", slices, annotations=MOVABLE, restart=restart)
    until(lambda: world.pods.get(uid))
    for name in slices:
        world.allocate(uid, name, [f"{A}::{name}"])
        world.starts.start([f"{A}::{name}"])
    assert world.limits(uid, "stays").host_memory == 20480 * MIB
    states = [{"name": "ends", "containerID": "process://1", "state": {"terminated": {"exitCode": 0}}}]
    world.client.request(
        "PATCH",
        "/api/v1/namespaces/default/pods/pod/status",
        body={"status": {"containerStatuses": states}},
        content_type="application/merge-patch+json",
    )
    until(lambda: (pod := world.pods.get(uid)) and pod.status.containerStatuses)
    world.lending.settle()
    assert world.limits(uid, "stays").host_memory == budget * MIB
    with Region.open(world.sandboxes.directory(uid, "ends")) as region:
        assert (region.usage().cards[0].lent > 0) is (restart == "Always")
    usage_of = Region.usage
    some = (cast(ProcessUsage, None),)
    monkeypatch.setattr(Region, "usage", lambda region: msgspec.structs.replace(usage_of(region), processes=some))
    world.lending.settle()
    assert world.limits(uid, "stays").host_memory == 20480 * MIB, "whatever its status says"
