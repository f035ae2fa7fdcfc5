"""Host memory behind several cards: what is held behind one card is not promised behind another."""

import pytest
from agent_world import MIB, A, B, MakeWorld, World

from device_plugin.cards import Cards
from device_plugin.refusal import Refusal
from vgpu import tier
from vgpu.devices import GpuSlice, Inventory

CARD = 15360  #: MiB


def start(world: World, name: str, piece: GpuSlice, number: int = 0) -> str:
    """A pod whose container has started; its UID."""
    uid = world.pod(name, {"main": [piece]})
    world.allocate(uid, "main", [f"{piece.uuid}::{number}"])
    world.starts.start([f"{piece.uuid}::{number}"])
    return uid


@pytest.mark.usefixtures("impatient")
def test_a_card_that_answers_late_finds_what_the_others_have_left(make: MakeWorld) -> None:
    world = make(plugin="deviceMemoryScaling: 3, hostMemory: 16000")
    both = world.cards.inventory
    world.cards = Cards(Inventory(devices=both.devices[:1], silent=(1,)), tier.wanted(world.config))
    world.cards.back(True)
    world.agent()
    first = start(world, "first", GpuSlice(A, 31000, phys=CARD))
    world.cards.found(both)
    with pytest.raises(Refusal, match=r"card 1 .* has 15720 MiB of memory"):
        start(world, "second", GpuSlice(B, 20000, phys=CARD))
    third = start(world, "third", GpuSlice(B, 15720, phys=CARD), number=1)
    world.starts.start([f"{A}::0"])  # the container keeps what it was given
    assert [world.limits(uid).host_memory for uid in (first, third)] == [(31000 - CARD) * MIB, 360 * MIB]
