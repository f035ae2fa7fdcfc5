"""Managed memory that comes to a simulated card on use, and leaves when other memory needs the room."""

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
    """Room for eight groups, three times four: the groups that were touched longest ago leave."""
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
    """The next launch that touches managed memory pays for it."""
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


def test_what_another_process_touched_longest_ago_goes_first(machine: Machine) -> None:
    """Room for eight groups: the first process has six of them, the second brings four; then both do so again."""
    script = (
        CLIENT
        + """
context()
k = touching("k")
{room}p = int(ok(cu.cuMemAllocManaged({size} * MIB, 1)))
report(1)
while True:
    wait()
    go(k, p, 0, 0)
    ok(cu.cuCtxSynchronize())
    report(1)
"""
    )
    second = machine.start(script.format(room="", size=8), VGPU_SIM_TIME=TIMES)
    heard(second)
    first = machine.start(script.format(room="ok(cu.cuMemAlloc(free() - 16 * MIB))\n", size=12), VGPU_SIM_TIME=TIMES)
    heard(first)
    both = (first, second)
    fixed = [machine.process(client.pid).used[0] for client in both]
    seen, before = [], [0, 0]
    for client in (first, second, first, second, second):
        tell(client)
        heard(client)
        now = [machine.process(one.pid) for one in both]
        here = tuple((process.used[0] - own) // MIB for process, own in zip(now, fixed, strict=True))
        busy = [process.busy_ns[0] for process in now]
        seen.append((here, sum(busy) - sum(before) - KERNEL))
        before = busy
        assert [process.host[0] // MIB for process in now] == [12 - here[0], 8 - here[1]]
    come = FAULT + BUS
    assert seen == [
        ((12, 0), 6 * come),
        ((8, 8), 4 * come + 2 * BUS),
        ((12, 4), 6 * come + 6 * BUS),  # its own others are the oldest, and go before it comes to them
        ((8, 8), 4 * come + 4 * BUS),
        ((8, 8), 0),
    ]
    for client in both:
        client.kill()
        client.wait()
    assert (machine.card().used, machine.card().host) == (0, 0)


def test_no_byte_is_counted_twice_while_processes_take_from_each_other(machine: Machine) -> None:
    """Three processes want 40 MiB of 60, and one is killed."""
    script = (
        CLIENT
        + """
import random
context()
k = touching("k_1us_part_50")
report(1)
wait()
p = int(ok(cu.cuMemAllocManaged(40 * MIB, 1)))
for turn in range(200):
    go(k, p + random.randrange(40 * MIB), 0, 0)
    if turn == 100:
        report(1)
ok(cu.cuCtxSynchronize())
report(1)
wait()
ok(cu.cuMemFree(p))
report(1)
wait()
"""
    )
    clients = [machine.start(script, VGPU_SIM_TIME="managed=migrate,fault=1us,bus=1000GB/s") for _ in range(3)]
    for client in clients:
        heard(client)
    fixed = machine.process(clients[0].pid).used[0]
    holder = machine.start(f"{CLIENT}context()\nok(cu.cuMemAlloc(free() - 60 * MIB))\nreport(1)\nwait()")
    heard(holder)
    for client in clients:
        tell(client)
    for client in clients:
        heard(client)
    dead, *living = clients
    dead.kill()
    dead.wait()
    for client in living:
        heard(client)
    for process in (machine.process(client.pid) for client in living):
        assert process.used[0] - fixed + process.host[0] == 40 * MIB
    for client in living:
        tell(client)
        heard(client)
        assert (machine.process(client.pid).used[0], machine.process(client.pid).host[0]) == (fixed, 0)
    for client in (*living, holder):
        tell(client)
        assert client.wait() == 0
    assert (machine.card().used, machine.card().host) == (0, 0)


def test_plain_memory_of_another_process_makes_it_go(machine: Machine) -> None:
    client = machine.start(
        f"{CLIENT}context()\nk = touching('k')\nok(cu.cuMemAlloc(free() - 160 * MIB))\n"
        "p = int(ok(cu.cuMemAllocManaged(160 * MIB, 1)))\ngo(k, p, 0, 0)\nok(cu.cuCtxSynchronize())\n"
        "report(1)\nwait()\nok(cu.cuMemFree(p))\nreport(free())\nwait()",
        VGPU_SIM_TIME=TIMES,
    )
    heard(client)
    assert machine.card().used == machine.card().memory
    found = machine.run(f"{CLIENT}context()\nreport([code(cu.cuMemAlloc(21 * MIB)), code(cu.cuMemAlloc(160 * MIB))])")
    assert found == [0, 2]
    process = machine.process(client.pid)
    assert process.used[0] < machine.card().memory - machine.card().context_bytes - 21 * MIB + MIB
    tell(client)
    assert heard(client) == 160 * MIB
    assert machine.process(client.pid).host == (0,)
    tell(client)
    assert client.wait() == 0


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
