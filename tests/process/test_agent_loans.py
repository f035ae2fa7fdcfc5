"""Who has been lent room of a card, and who waits for it."""

import pytest
from agent_world import A, MakeWorld
from test_agent_tier import CARD, MOVABLE, SCALED, start, use

from device_plugin import lending
from device_plugin.refusal import Refusal
from vgpu import tier
from vgpu.devices import GpuSlice
from vgpu.tier import MIB


@pytest.mark.usefixtures("impatient")
def test_a_container_that_may_have_host_memory_waits_for_its_guarantee_and_then_for_what_it_needs_at_once(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(plugin=SCALED)
    world.cards.back(True)
    first = start(world, "first", GpuSlice(A, 16000, phys=8000), annotations=MOVABLE)
    uses = use(world, first, 13000)
    with pytest.raises(Refusal, match="others still have 640 MiB of card 0"):
        start(world, "second", GpuSlice(A, 6000, phys=3000), number=1)
    monkeypatch.setattr(lending, "WHOLE_SECONDS", 0.0)
    world.starts.start([f"{A}::1"])
    late = CARD - 8000 - 3000 - tier.at_first(3000 * MIB, 0) // MIB
    with pytest.raises(Refusal, match=f"others still have {5000 - late} MiB of card 0"):
        start(world, "third", GpuSlice(A, 6000, phys=3000), number=2)
    uses.charge_overhead(0, (8000 + late) * MIB)
    world.starts.start([f"{A}::2"])
    uses.close()


def test_what_a_container_needs_at_once_is_for_contexts_and_what_comes_with_them() -> None:
    assert tier.at_first(400 * MIB, 0) == 400 * MIB
    assert tier.at_first(4000 * MIB, 0) == tier.at_first(4000 * MIB, 100 * MIB) == 512 * MIB
    assert tier.at_first(4000 * MIB, 500 * MIB) == 1000 * MIB
    assert tier.at_first(600 * MIB, 500 * MIB) == 600 * MIB
