"""Managed memory that comes to a simulated card when it is used, and goes when others need the room."""

from pathlib import Path

import pytest
from simulated import MIB, Machine, heard, tell

CLIENT = "from simulator_client import *\nfrom simulator_blocks import *\n"
KERNEL = 10_000
BUS = 2 * MIB * 1000 // 12_500  #: one group on the bus of a T4, in nanoseconds
FAULT = 30_000
TIMES = "bus=profile,managed=migrate"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4")


def test_it_comes_once_and_is_counted_where_it_is(machine: Machine) -> None:
    client = machine.start(
        CLIENT
        + """
context()
k, half = touching("k"), touching("k_part_50")
p = int(ok(cu.cuMemAllocManaged(8 * MIB, 1)))
calls = (lambda: go(half, p, 0, 0), lambda: go(k, 0, p + 5, 0), lambda: go(k, p, p, p), lambda: ok(cu.cuMemFree(p)))
for call in calls:
    report(1)
    wait()
    call()
    ok(cu.cuCtxSynchronize())
report(1)
wait()
""",
        VGPU_SIM_TIME=TIMES,
    )
    heard(client)
    fixed = machine.card().used
    seen = []
    for _ in range(4):
        seen.append((machine.card().used - fixed, machine.card().host, machine.card().busy_ns))
        tell(client)
        heard(client)
    half = KERNEL + 2 * (FAULT + BUS)
    whole = half + half
    assert seen == [
        (0, 8 * MIB, 0),
        (4 * MIB, 4 * MIB, half),
        (8 * MIB, 0, whole),
        (8 * MIB, 0, whole + KERNEL),
    ]
    assert (machine.card().used, machine.card().host) == (fixed, 0)
    tell(client)
    assert client.wait() == 0


def test_it_may_exceed_the_card_and_the_oldest_goes_first(machine: Machine) -> None:
    """Room for eight groups, three times four: those that were touched longest ago go."""
    report = machine.run(
        CLIENT
        + """
context()
k = touching("k")
ok(cu.cuMemAlloc(free() - 16 * MIB))
a, b, c = (int(ok(cu.cuMemAllocManaged(8 * MIB, 1))) for _ in "abc")
big = code(cu.cuMemAllocManaged(20 * 1024 * MIB, 1))
for p in (a, b, a, c, a, b):
    go(k, p, 0, 0)
ok(cu.cuCtxSynchronize())
report([big, free()])
""",
        VGPU_SIM_TIME=TIMES,
    )
    assert report == [0, 0]
    come, go = 4 * (FAULT + BUS), 4 * BUS
    assert machine.card().busy_ns == 6 * KERNEL + come + come + 0 + (come + go) + 0 + (come + go)


def test_other_memory_of_the_process_makes_it_go(machine: Machine) -> None:
    """The next launch that touches managed memory pays for that."""
    report = machine.run(
        CLIENT
        + """
context()
k = touching("k")
ok(cu.cuMemAlloc(free() - 16 * MIB))
p = int(ok(cu.cuMemAllocManaged(16 * MIB, 1)))
go(k, p, 0, 0)
codes = [code(cu.cuMemAlloc(5 * MIB)), free()]
go(touching("k_part_25"), p + 8 * MIB, 0, 0)
ok(cu.cuCtxSynchronize())
report([*codes, code(cu.cuMemAlloc(20 * MIB))])
""",
        VGPU_SIM_TIME=TIMES,
    )
    assert report == [0, MIB, 2]
    # for 5 MiB three groups went, one more for the module of the second kernel: none that its launch touches
    assert machine.card().busy_ns == 2 * KERNEL + 8 * (FAULT + BUS) + 4 * BUS


def test_a_prefetch_moves_it_without_faults(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
k, p, s = touching("k"), int(ok(cu.cuMemAllocManaged(64 * MIB, 1))), ok(cu.cuStreamCreate(1))
where = cu.CUmemLocation()
where.type, where.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
rest = free()
took = elapsed(lambda: ok(cu.cuMemPrefetchAsync(p, 64 * MIB, where, 0, s)), s)
go(k, p, 0, 0, stream=s)
ok(cu.cuCtxSynchronize())
there = rest - free()
where.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
ok(cu.cuMemPrefetchAsync(p, 32 * MIB, where, 0, s))
report([took, there, rest - free()])
""",
        VGPU_SIM_TIME=f"{TIMES},fault=1s",
    )
    assert 32 * BUS - 500 <= found[0] * 1_000_000 < 32 * 1_000_000_000
    assert found[1:] == [64 * MIB, 32 * MIB]
    assert machine.card().busy_ns == KERNEL


def test_as_a_rule_it_stays_on_the_card(machine: Machine) -> None:
    found = machine.run(
        f"{CLIENT}context()\nk = touching('k')\nrest = free()\np = int(ok(cu.cuMemAllocManaged(8 * MIB, 1)))\n"
        "go(k, p, 0, 0)\nok(cu.cuCtxSynchronize())\n"
        "report([rest - free(), code(cu.cuMemAllocManaged(20 * 1024 * MIB, 1))])",
        VGPU_SIM_TIME="bus=profile",
    )
    assert found == [8 * MIB, 2]
    assert machine.card().busy_ns == KERNEL
