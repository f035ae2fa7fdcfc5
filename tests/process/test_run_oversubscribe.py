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
    probed = machine.probe("--gpumem", "20000", "--oversubscribe", probe=("--blocks", "512", "--over"))
    (card,) = probed["cards"]
    assert (card["cuda_total"], card["nvml_total"]) == (20000 * MIB, 20000 * MIB)
    assert (card["fill"], card["data"], card["over"]) == ("CUDA_SUCCESS", "right", "CUDA_ERROR_OUT_OF_MEMORY")
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
    still = machine.hold("--gpumem", "12001", "--oversubscribe")
    big = machine.hold("--gpumem", "12000", "--oversubscribe=movable")
    assert [(limits.movable, limits.cards[0].guarantee, lent) for limits, lent in limits_of(machine)[:2]] == [
        (False, (T4 - 9000) * MIB, (0,)),
        (True, (T4 - 9000) * MIB, (0,)),
    ]
    for other in others:
        end(other)
    wanted = (12000 - (T4 - 9000)) * MIB
    eventually("the room is lent", lambda: [lent for _, lent in limits_of(machine)] == [(0,), (wanted,)])
    card = next(
        one["slices"][0]["uuid"] for one in machine.ps() if one["slices"][0]["memory_limit_bytes"] == 12000 * MIB
    )
    small = machine.hold("--gpumem", "5000", "--use-gpuuuid", card)
    left = (T4 - 5000 - (T4 - 9000)) * MIB - T4 * MIB // 64
    assert limits_of(machine)[1][1] == (left // (2 * MIB) * 2 * MIB,), "before the other one began"
    for one in (small, still, big):
        end(one)
