"""`vgpu run --oversubscribe`: more memory than the card has."""

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from run_machine import PROBE, Machine, end, eventually

from vgpu.errors import UserError
from vgpu.native import Limits, Region, paths, simulator
from vgpu.workstation import host_memory, run
from vgpu.workstation.slices import Claim, SliceStore

MIB = 1 << 20
T4 = 14912  #: MiB that programs can have of the card's 15360


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
        with suppress(FileNotFoundError), Region.open(path) as region:  # a slice that has ended is removed meanwhile
            found.append((region.limits(), tuple(card.lent for card in region.usage().cards)))
    return sorted(found, key=lambda one: -(one[0].cards[0].memory or 0))


def on_card(machine: Machine) -> int:
    """Bytes of cards that all commands together have."""
    found = 0
    for path in (machine.state / "slices").iterdir():
        with suppress(FileNotFoundError), Region.open(path) as region:
            found += sum(card.resident for card in region.usage().cards)
    return found


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
        "the command needs 5088 MiB of host memory and may use 5087 MiB": ("--oversubscribe", "--host-memory", "5087"),
        "--host-memory has no effect without --oversubscribe": ("--host-memory", "5087"),
        "--guarantee has no effect without --oversubscribe": ("--guarantee", "5087"),
        "--guarantee is 4999 MiB; allowed: from 5000 MiB": ("--oversubscribe", "--guarantee", "4999"),
        "with --oversubscribe, memory that does not fit on the card goes to host memory": (),
        "write static or movable": ("--oversubscribe=managed",),
    }.items():
        refused = machine.run("--gpumem", "20000", *options, command=("true",))
        assert refused.returncode, said
        assert said in refused.stderr


def test_no_command_is_promised_host_memory_that_is_not_there(machine: Machine) -> None:
    most = host_memory.read().most
    held = machine.hold("--gpumem", "3000", "--oversubscribe", "--guarantee", "1000", "--host-memory", str(most - 2500))
    ((limits, _),) = limits_of(machine)
    assert (limits.cards[0].guarantee, limits.host_memory) == (1000 * MIB, (most - 2500) * MIB)
    for code, amount, said in (
        (75, 2501, f"of which {most - 2500} MiB are promised to running commands"),
        (1, most + 1, f"this can never fit here: --host-memory asks for {most + 1} MiB"),
    ):
        refused = machine.run("--gpumem", "3000", "--oversubscribe", "--host-memory", str(amount), command=("true",))
        assert (refused.returncode, said in refused.stderr) == (code, True), refused.stderr
    beside = machine.run("--gpumem", "3000", "--oversubscribe", "--host-memory", "2500", command=("true",))
    assert beside.returncode == 0, beside.stderr
    end(held)


def test_room_that_nobody_is_sure_to_need_is_lent_to_blocks_that_can_move(machine: Machine) -> None:
    others = [machine.hold("--gpumem", "9000", "--use-gpuuuid", uuid) for uuid in machine_cards(machine)]
    host = ("--host-memory", "6100")
    still = machine.hold("--gpumem", "12001", "--oversubscribe", *host)
    big = machine.hold("--gpumem", "12000", "--oversubscribe=movable", *host)
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


def test_what_was_lent_is_back_before_a_command_starts_that_can_have_nothing_else(machine: Machine) -> None:
    card = machine_cards(machine)[0]
    other = machine.hold("--gpumem", "9000", "--use-gpuuuid", card)
    fills = f"echo running; read line; exec {shlex.join(PROBE)} --blocks 100 --hold 60"
    options = ("--gpumem", "7500", "--oversubscribe=movable", "--use-gpuuuid", card)
    big = machine.start(*options, command=("sh", "-c", fills))
    assert big.stdout is not None
    assert big.stdin is not None
    big.stdout.readline()
    end(other)
    eventually("the room is lent", lambda: limits_of(machine)[0][1] == ((7500 - (T4 - 9000)) * MIB,))
    big.stdin.write("\n")
    big.stdin.flush()
    assert '"right"' in big.stdout.readline()
    assert on_card(machine) > 7300 * MIB
    machine.hold("--gpumem", "8900", "--use-gpuuuid", card)
    assert on_card(machine) <= (T4 - 9000 + T4 // 64) * MIB, "but for the reserve"


def test_a_command_does_not_start_while_others_keep_what_was_lent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "BACK_SECONDS", 0.2)
    card = machine_cards(machine)[0]
    plain = machine.hold("--gpumem", "9000", "--use-gpuuuid", card)
    big = machine.hold("--gpumem", "11000", "--oversubscribe=movable", "--use-gpuuuid", card)
    store = SliceStore(machine.state)
    with store.locked():
        first, second = store.sweep()
    claim = Claim(first, store.directory(first), -1)
    run.await_room(store, claim)
    with Region.open(store.directory(second), writable=True) as region:
        region.charge_overhead(0, (T4 - 9000 + T4 // 64 + 500) * MIB)
        with pytest.raises(UserError, match=rf"other commands still have 500 MiB of card 0 .*{card}.* lent them"):
            run.await_room(store, claim)
        monkeypatch.setattr(run, "WHOLE_SECONDS", 0.0)
        least = 512  # of the guarantee of 9000
        region.charge_overhead(0, (T4 - 9000 + 9000 - least) * MIB)
        run.await_room(store, claim, tiered=True)
        region.charge_overhead(0, (T4 - 9000 + 9000 - least + 1) * MIB)
        with pytest.raises(UserError, match="other commands still have 1 MiB of card 0"):
            run.await_room(store, claim, tiered=True)
        region.charge_overhead(0, (T4 - 9000) * MIB)
        run.await_room(store, claim)
    for one in (plain, big):
        end(one)


def test_what_others_have_of_a_card_and_what_is_kept_back_of_it_is_not_lent(machine: Machine, tmp_path: Path) -> None:
    machine_cards(machine)
    half = tmp_path / "half.yaml"
    half.write_text("devicePlugin: {deviceMemoryScaling: 0.5}")
    big = machine.hold("--gpumem", "10000", "--oversubscribe=movable", "--host-memory", "9000", VGPU_CONFIG=str(half))
    assert limits_of(machine)[0][1] == (0,)
    end(big)
    environ = {**machine.environ, "LD_LIBRARY_PATH": str(paths.simulator()), "VGPU_SIM_DIR": str(machine.simulator)}
    nobodys = subprocess.Popen(
        (*PROBE, "--allocate", "3000", "--hold", "60"), env=environ, stdout=subprocess.PIPE, text=True
    )
    machine.started.append(nobodys)
    assert nobodys.stdout is not None
    nobodys.stdout.readline()
    first = simulator.cards(machine.simulator)[0]
    still = machine.hold("--gpumem", "8000", "--use-gpuuuid", first.uuid)
    machine.hold("--gpumem", "15000", "--oversubscribe=movable", "--host-memory", "9000", "--use-gpuuuid", first.uuid)
    end(still)
    free = (8000 - T4 // 64) * MIB - first.used
    eventually("the rest is lent", lambda: limits_of(machine)[0][1] == (free // (2 * MIB) * 2 * MIB,))
