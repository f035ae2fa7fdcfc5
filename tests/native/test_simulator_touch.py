"""Kernels that touch memory: what they store and read in each kind of memory, and what happens where there is none."""

import subprocess
from pathlib import Path

import pytest
from preloaded import compiled
from simulated import Machine

from vgpu.native import simulator

CLIENT = "from simulator_client import *\nfrom simulator_blocks import *\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "A100-40")


PLACES = {
    "device": "ok(cu.cuMemAlloc(SIZE))",
    "mapped": "mapped(SIZE)",
    "on a node": "mapped(SIZE, node=0)",
    "pinned": "pinned(SIZE)",
    "managed": "ok(cu.cuMemAllocManaged(SIZE, 1))",
}


@pytest.mark.parametrize("place", PLACES)
def test_kernels_do_what_their_names_say(machine: Machine, place: str) -> None:
    found = machine.run(
        f"{CLIENT}context()\nSIZE = 4 * MIB\np = int({PLACES[place]})"
        + """
room = int(ok(cu.cuMemAlloc(4096)))
filled(p, 1000, 7)
go(touching("touch_add_2us"), p + 8 * 10, 100, 5)
sums = [total(p, 1000, room), total(p + 8 * 500, 1000, room)]
ok(cu.cuMemsetD32(p, 0, 2))
go(touching("touch_copy"), room, p, 20)
report([*sums, total(room, 20, room + 2048)])
"""
    )
    assert found == [7500, 3500, 19 * 7 + 10 * 5]
    assert machine.card().busy_ns == (5 * 10 + 2) * 1000


def test_a_block_keeps_its_words_when_it_moves(machine: Machine) -> None:
    """The pointer stays: out of the card, changed there, back again."""
    found = machine.run(
        CLIENT
        + """
context()
size = 4 * MIB
words = size // 8
p, room = mapped(size), int(ok(cu.cuMemAlloc(8)))
filled(p, words, 3)
away, spare = mapped(size), size // 2
sums = []
for node in (0, None, 0):
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemcpyDtoD(away, p, size))
    unmap(p, size)
    remap(p, size, node)
    ok(cu.cuMemcpyDtoD(p, away, size))
    go(touching("touch_add"), p + spare, words // 2, 1)
    sums.append(total(p, words, room))
report([sums, words])
"""
    )
    sums, words = found
    assert sums == [3 * words + words // 2 * turn for turn in (1, 2, 3)]
    assert machine.card().host == 0  # the client has ended


def test_a_graph_touches_what_is_mapped_when_it_runs(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
p, room = mapped(2 * MIB), int(ok(cu.cuMemAlloc(8)))
filled(p, 100, 1)
add = touching("touch_add")
stream = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
go(add, p, 100, 10, stream=stream)
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
sums = [total(p, 100, room)]
ok(cu.cuGraphLaunch(graph, stream))
ok(cu.cuStreamSynchronize(stream))
sums.append(total(p, 100, room))
unmap(p, 2 * MIB)
remap(p, 2 * MIB, 0)
ok(cu.cuGraphLaunch(graph, stream))
ok(cu.cuStreamSynchronize(stream))
report([*sums, total(p, 100, room)])
"""
    )
    assert found == [100, 1100, 1000]


FAULTS = {
    "nothing there": "go(touching('touch_fill'), reserved, 10, 1)",
    "freed": "p = int(ok(cu.cuMemAlloc(4096))); ok(cu.cuMemFree(p)); go(touching('touch_fill'), p, 10, 1)",
    "more than there is": "go(touching('touch_fill'), block, 2 * MIB // 8 + 1, 1)",
    "more than is pinned": "go(touching('touch_fill'), pinned(4096), 513, 1)",
    "of the program alone": "own = ctypes.c_uint64(); go(touching('touch_fill'), ctypes.addressof(own), 1, 1)",
    "no address": "go(touching('touch_fill'), 4096, 1, 1)",
    "unmapped under a kernel": "go(touching('spin_200ms'), 5, block, 0); unmap(block, 2 * MIB)",
    "unmapped under the last of several": (
        "f, other, e = touching('spin_1ms'), touching('spin_300ms'), ok(cu.cuEventCreate(0))\n"
        "go(f, block, 0, 0); ok(cu.cuEventRecord(e, 0)); go(other, 0, 0, block)\n"
        "ok(cu.cuEventSynchronize(e)); unmap(block, 2 * MIB)"
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_memory_that_is_not_there_is_an_error_for_good(machine: Machine, fault: str) -> None:
    found = machine.run(
        f"{CLIENT}import ctypes\ncontext()\nblock = mapped(2 * MIB)\n"
        f"reserved = int(ok(cu.cuMemAddressReserve(2 * MIB, 0, 0, 0)))\n{FAULTS[fault]}\n"
        "report([os.getpid(), code(cu.cuStreamSynchronize(0)), code(cu.cuMemAlloc(1)), code(cu.cuMemUnmap(1, 1))])"
    )
    pid, *codes = found
    assert codes == [700, 700, 1]
    assert machine.process(pid).faults[0] == 1


WELL = {
    "ended": "go(f, block, 0, 0); ok(cu.cuCtxSynchronize()); unmap(block, 2 * MIB)",
    "ended, beside one that has not": (
        "s, t = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))\n"
        "go(touching('spin_500ms'), second, 0, 0, stream=s); go(f, block, 0, 0, stream=t)\n"
        "ok(cu.cuStreamSynchronize(t)); unmap(block, 2 * MIB)"
    ),
    "another block": "go(f, block, 0, 0); unmap(second, 2 * MIB)",
    "a number": "go(f, block & 0xffffffff, 12345678901, 0); unmap(block, 2 * MIB)",
}


@pytest.mark.parametrize("case", WELL)
def test_memory_that_no_kernel_uses_can_go(machine: Machine, case: str) -> None:
    found = machine.run(
        f"{CLIENT}context()\nblock, second, f = mapped(2 * MIB), mapped(2 * MIB), touching('spin_20ms')\n{WELL[case]}\n"
        "report([os.getpid(), code(cu.cuCtxSynchronize())])",
        VGPU_SIM_TIME="kernels=4",
    )
    assert found[1] == 0
    assert machine.process(found[0]).faults[0] == 0


def test_threads_lose_no_word_while_everything_moves(machine: Machine) -> None:
    """Blocks change places between launches, copies take time, and managed memory comes and goes."""
    done = subprocess.run(
        [compiled("bus_storm.c", driver=True), "200"],
        env=machine.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert (machine.card().used, machine.card().host) == (0, 0)
    assert simulator.processes(machine.folder)[0].faults == (0,)
