"""`vgpu run --oversubscribe`: more memory than the card has."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from run_machine import Machine, end, eventually

from vgpu.native import Limits, Region, simulator

MIB = 1 << 20
T4 = 14912  #: MiB that programs can have of its 15360


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4x2")
    yield found
    found.stop()


def machine_cards(machine: Machine) -> list[str]:
    machine.run("--gpumem", "1", command=("true",))  # makes the simulated cards
    return [card.uuid for card in simulator.cards(machine.simulator)]


def limits_of(machine: Machine) -> list[tuple[Limits, tuple[int, ...]]]:
    """Limits and loans of all slices, those with most memory first."""
    found = []
    for path in (machine.state / "slices").iterdir():
        with suppress(FileNotFoundError), Region.open(path) as region:  # one that has ended is swept meanwhile
            found.append((region.limits(), tuple(card.lent for card in region.usage().cards)))
    return sorted(found, key=lambda one: -(one[0].cards[0].memory or 0))


def test_memory_that_does_not_fit_on_the_card_may_lie_in_host_memory(machine: Machine) -> None:
    held = machine.hold("--gpumem", "20000", "--oversubscribe", "--host-memory", "6000")
    ((limits, _),) = limits_of(machine)
    assert (limits.oversubscribe, limits.movable, limits.host_memory) == (True, False, 6000 * MIB)
    assert (limits.cards[0].memory, limits.cards[0].guarantee) == (20000 * MIB, T4 * MIB)
    (shown,) = machine.ps()
    assert (shown["slices"][0]["memory_limit_bytes"], shown["slices"][0]["host_memory_bytes"]) == (20000 * MIB, 0)
    end(held)
    done = machine.run("--gpumem", "20000", "--oversubscribe", command=("sh", "-c", "echo $CUDA_OVERSUBSCRIBE"))
    assert done.stdout == "true\n", done.stderr
    for said, options in {
        "5088 MiB of host memory needed, and 5087 MiB may be used": ("--oversubscribe", "--host-memory", "5087"),
        "no effect without --oversubscribe": ("--host-memory", "5087"),
        "write static or movable": ("--oversubscribe=managed",),
    }.items():
        refused = machine.run("--gpumem", "20000", *options, command=("true",))
        assert refused.returncode, said
        assert said in refused.stderr


def test_room_that_nobody_is_sure_to_need_is_lent_to_blocks_that_can_move(machine: Machine) -> None:
    others = [machine.hold("--gpumem", "9000", "--use-gpuuuid", uuid) for uuid in machine_cards(machine)]
    big = machine.hold("--gpumem", "12000", "--oversubscribe=movable")
    (limits, lent), *_ = limits_of(machine)
    assert (limits.movable, limits.cards[0].guarantee, lent) == (True, (T4 - 9000) * MIB, (0,))
    for other in others:
        end(other)
    wanted = (12000 - (T4 - 9000)) * MIB
    eventually("the room is lent", lambda: limits_of(machine)[0][1] == (wanted,))
    (card,) = (one["slices"][0]["uuid"] for one in machine.ps())
    small = machine.hold("--gpumem", "5000", "--use-gpuuuid", card)
    reserve = T4 * MIB // 64
    taken_back = (T4 - 5000 - (T4 - 9000)) * MIB - reserve
    assert limits_of(machine)[0][1] == (taken_back // (2 * MIB) * 2 * MIB,), "before the other one began"
    end(small)
    end(big)
