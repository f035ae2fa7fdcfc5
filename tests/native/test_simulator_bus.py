"""The bus of simulated cards: times of launches, copies and remapping with VGPU_SIM_TIME=bus."""

import time
from pathlib import Path

import pytest
from simulated import MIB, Machine, heard, tell

CLIENT = "from simulator_client import *\nfrom simulator_blocks import *\n"
US = 1000
MS = 1_000_000


def across(size: int, gigabytes: float = 12.5) -> int:
    """Nanoseconds on the bus of a T4."""
    return int(size * 1000 // (gigabytes * 1000))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4")


TOUCHED = {
    "device": ("p = int(ok(cu.cuMemAlloc(8 * MIB)))", "k", "p, 1, 2", 0),
    "mapped on the card": ("p = mapped(8 * MIB)", "k", "p, 1, 2", 0),
    "host, as a whole": ("p = mapped(8 * MIB, 0)", "k", "p, 1, 2", 8 * MIB),
    "host, by a pointer into it": ("p = mapped(8 * MIB, 0)", "k", "5, 0, p + 7 * MIB + 5", 8 * MIB),
    "host, by two pointers": ("p = mapped(8 * MIB, 0)", "k", "p, p + MIB, 2", 8 * MIB),
    "two blocks": ("p, q = mapped(8 * MIB, 0), mapped(2 * MIB, 0)", "k", "q, p, 2", 10 * MIB),
    "a share": ("p = mapped(8 * MIB, 0)", "k_part_25", "p, 1, 2", 2 * MIB),
    "pinned": ("p = pinned(3 * MIB)", "k", "p, 1, 2", 3 * MIB),
    "managed": ("p = int(ok(cu.cuMemAllocManaged(MIB, 1)))", "k", "p, 1, 2", 0),
    "what is reserved alone": ("p = int(ok(cu.cuMemAddressReserve(8 * MIB, 0, 0, 0)))", "k", "p, 1, 2", 0),
}


def test_a_launch_takes_the_time_of_its_bytes_behind_the_bus(machine: Machine) -> None:
    steps = "".join(
        f"{make}\nf = touching('{name}')\n[go(f, {parameters}) for _ in range(5)]\n"
        "ok(cu.cuCtxSynchronize())\nreport(1)\nwait()\n"
        for make, name, parameters, _ in TOUCHED.values()
    )
    client = machine.start(f"{CLIENT}context()\n{steps}", VGPU_SIM_TIME="bus=profile")
    took, before = {}, 0
    for place in TOUCHED:
        heard(client)
        busy = machine.card().busy_ns
        took[place], before = busy - before, busy
        tell(client)
    assert client.wait() == 0
    assert took == {place: 5 * (10 * US + across(touched)) for place, (*_, touched) in TOUCHED.items()}


@pytest.mark.parametrize("bus", ["", "bus=off", "remap=1us"])
def test_without_a_bus_everything_is_as_fast(machine: Machine, bus: str) -> None:
    script = f"{CLIENT}context()\np = mapped(8 * MIB, 0)\ngo(touching('k'), p, 1, 2)\nok(cu.cuCtxSynchronize())"
    machine.run(script, VGPU_SIM_TIME=bus)
    assert machine.card().busy_ns == 10 * US


@pytest.mark.parametrize(
    ("spec", "bus", "gigabytes"),
    [
        ("A100-40", "profile", 25),
        ("H100", "profile", 55),
        ("T4", "4GB/s", 4),
        ("T4", "500MB/s", 0.5),
        ("T4@11.8", "profile", 12.5),
    ],
)
def test_the_speed_is_the_profiles_or_what_was_said(tmp_path: Path, spec: str, bus: str, gigabytes: float) -> None:
    machine = Machine(tmp_path / "cards", spec)
    script = f"{CLIENT}context()\np = pinned(8 * MIB)\ngo(touching('k'), p, 1, 2)\nok(cu.cuCtxSynchronize())"
    machine.run(script, VGPU_SIM_TIME=f"bus={bus}")
    assert machine.card().busy_ns == 10 * US + across(8 * MIB, gigabytes)


def test_a_card_that_shares_the_machines_memory_has_no_bus(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cards", "GB10")
    machine.run(
        f"{CLIENT}context()\np, q = pinned(8 * MIB), int(ok(cu.cuMemAllocManaged(8 * MIB, 1)))\n"
        "go(touching('k'), p, q, 2)\nok(cu.cuMemsetD8(p, 1, 8 * MIB))\n"
        "ok(cu.cuMemcpyHtoD(int(ok(cu.cuMemAlloc(MIB))), p, MIB))\nok(cu.cuCtxSynchronize())",
        VGPU_SIM_TIME="bus=profile,managed=migrate,fault=5us,fills=engine",
    )
    assert machine.card().busy_ns == 10 * US + 4 * 5 * US


def test_a_graph_pays_for_where_its_memory_is_now(machine: Machine) -> None:
    machine.run(
        CLIENT
        + """
context()
p, stream, k = mapped(4 * MIB), ok(cu.cuStreamCreate(1)), touching("k")
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
go(k, 0, p, 0, stream=stream)
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
for node in (0, None):
    ok(cu.cuGraphLaunch(graph, stream))
    ok(cu.cuStreamSynchronize(stream))
    unmap(p, 4 * MIB)
    remap(p, 4 * MIB, node)
    ok(cu.cuGraphLaunch(graph, stream))
    ok(cu.cuStreamSynchronize(stream))
""",
        VGPU_SIM_TIME="bus=profile",
    )
    assert machine.card().busy_ns == 4 * 10 * US + 2 * across(4 * MIB)


#: on a bus of 500 MB/s; those within a card are shorter than making them takes here
COPIES = {
    "to the card": ("cu.cuMemcpyHtoDAsync(a, host, 16 * MIB, s)", across(16 * MIB, 0.5)),
    "from the card": ("cu.cuMemcpyDtoHAsync(host, a, 16 * MIB, s)", across(16 * MIB, 0.5)),
    "between card and node": ("cu.cuMemcpyDtoDAsync(a, node, 16 * MIB, s)", across(16 * MIB, 0.5)),
    "within the card": ("cu.cuMemcpyDtoDAsync(a, b, 16 * MIB, s)", 0),
    "a fill": ("cu.cuMemsetD8Async(a, 0, 16 * MIB, s)", 0),
    "a fill of a node": ("cu.cuMemsetD8Async(node, 0, 16 * MIB, s)", across(16 * MIB, 0.5)),
    "on the host": ("cu.cuMemcpyAsync(host, host + 8 * MIB, 8 * MIB, s)", 0),
    "synchronous": ("cu.cuMemcpyDtoH(host, a, 16 * MIB)", across(16 * MIB, 0.5)),
    "pitched": ("cu.cuMemcpy2DAsync(pitched(host, a), s)", across(16 * MIB, 0.5)),
}
ROOMS = """
context()
a, b = int(ok(cu.cuMemAlloc(64 * MIB))), int(ok(cu.cuMemAlloc(64 * MIB)))
node, host = mapped(64 * MIB, 0), pinned(64 * MIB)
def pitched(to, source):
    c = cu.CUDA_MEMCPY2D()
    c.dstMemoryType, c.dstHost = cu.CUmemorytype.CU_MEMORYTYPE_HOST, to
    c.srcMemoryType, c.srcDevice = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE, source
    c.WidthInBytes, c.Height, c.srcPitch, c.dstPitch = MIB, 16, MIB, MIB
    return c
"""


def test_a_copy_takes_its_bytes(machine: Machine) -> None:
    """Two copies of each kind, in one stream, by a pair of events."""
    steps = "".join(f"took.append(elapsed(lambda: [ok({call}) for _ in range(2)], s))\n" for call, _ in COPIES.values())
    milliseconds = machine.run(
        f"{CLIENT}{ROOMS}s, took = ok(cu.cuStreamCreate(0)), []\n{steps}report(took)",
        VGPU_SIM_TIME="bus=500MB/s,fills=engine",
    )
    for copy, took in zip(COPIES, milliseconds, strict=True):
        assert took * MS >= 2 * COPIES[copy][1] - 500, copy
    assert machine.card().busy_ns == 0


ORDERS = {
    "copy, kernel": ("copy(s), launch(long, s)", 80),
    "kernel, copy": ("launch(long, s), copy(s)", 80),
    "in turns": ("[(copy(s), launch(short, s)) for _ in range(4)]", 4 * 60),
    "two streams by an event": ("copy(s), wait_for(s, t), launch(long, t)", 80),
    "a kernel, by an event": ("launch(long, s), wait_for(s, t), copy(t)", 80),
    "the legacy stream behind all": ("copy(u), launch(long, 0)", 80),
    "all behind the legacy stream": ("copy(0), launch(long, u)", 80),
    "one engine": ("copy(s), copy(t)", 80),
    "one engine for all": ("[copy(x) for x in (s, t, u)]", 120),
}


def test_what_crosses_no_bus_does_not_wait_for_it(machine: Machine) -> None:
    """On a bus that would take eight seconds for each copy."""
    calls = (
        "cu.cuMemcpyDtoDAsync(a, b, 8 * MIB, s)",
        "cu.cuMemsetD8Async(a, 0, 8 * MIB, s)",
        "cu.cuMemcpyAsync(host, host + 32 * MIB, 8 * MIB, s)",
        "cu.cuMemcpyAtoA(arrays[0], 0, arrays[1], 0, 8 * MIB)",
        "cu.cuMemcpyDtoA(arrays[0], 0, a, 8 * MIB)",
    )
    steps = "".join(f"took.append(elapsed(lambda: ok({call}), s))\n" for call in calls)
    milliseconds = machine.run(
        f"{CLIENT}{ROOMS}s, took = ok(cu.cuStreamCreate(0)), []\n"
        "d = cu.CUDA_ARRAY_DESCRIPTOR()\n"
        "d.Width, d.Height, d.NumChannels, d.Format = 8 * MIB, 0, 1, cu.CUarray_format.CU_AD_FORMAT_UNSIGNED_INT8\n"
        f"arrays = [ok(cu.cuArrayCreate(d)) for _ in range(2)]\n{steps}report(took)",
        VGPU_SIM_TIME="bus=1MB/s",
    )
    assert all(took < 8000 for took in milliseconds), milliseconds


def test_copies_and_kernels_keep_the_order_of_streams(machine: Machine) -> None:
    """Copies take 40 ms here, long kernels 40 and short ones 20. By events, so that a slow machine is no slow card."""
    steps = "".join(f"took.append(measured(lambda: ({calls},)))\n" for calls, _ in ORDERS.values())
    milliseconds = machine.run(
        CLIENT
        + f"""
context()
size = 40 * MIB
a, host, e = int(ok(cu.cuMemAlloc(size))), pinned(size), ok(cu.cuEventCreate(0))
long, short = kernel("long_40ms"), kernel("short_20ms")
s, t, u = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(0))
copy = lambda stream: ok(cu.cuMemcpyHtoDAsync(a, host, size, stream))
marks, took = [ok(cu.cuEventCreate(0)) for _ in range(5)], []
def wait_for(other, own):
    ok(cu.cuEventRecord(e, other))
    ok(cu.cuStreamWaitEvent(own, e, 0))
def measured(calls):
    ok(cu.cuEventRecord(marks[4], s))
    calls()
    [ok(cu.cuEventRecord(mark, stream)) for mark, stream in zip(marks, (s, t, u, 0))]
    ok(cu.cuCtxSynchronize())
    return max(ok(cu.cuEventElapsedTime(marks[4], mark)) for mark in marks[:4])
{steps}report(took)
""",
        VGPU_SIM_TIME="bus=1048MB/s",
    )
    for order, took in zip(ORDERS, milliseconds, strict=True):
        assert took >= ORDERS[order][1], order


def test_a_copy_waits_for_a_kernel_that_a_neighbour_holds_up(machine: Machine) -> None:
    """The kernel runs when the neighbour's slice is over, and the copy of 10 ms comes after it."""
    times = {"VGPU_SIM_TIME": "bus=1048MB/s,slice=300ms"}
    neighbour = machine.start(f"{CLIENT}context()\nlaunch(kernel('spin_2000ms'))\nreport(1)\nwait()", **times)
    heard(neighbour)
    milliseconds = machine.run(
        f"{CLIENT}{ROOMS}"
        + """
f, marks = kernel("spin_10ms"), [ok(cu.cuEventCreate(0)) for _ in range(2)]
launch(f)
ok(cu.cuEventRecord(marks[0], 0))
ok(cu.cuMemcpyHtoDAsync(a, host, 10 * MIB, 0))
ok(cu.cuEventRecord(marks[1], 0))
ok(cu.cuEventSynchronize(marks[1]))
report(ok(cu.cuEventElapsedTime(*marks)))
""",
        **times,
    )
    neighbour.kill()
    neighbour.wait()
    assert milliseconds >= 9


def test_a_host_function_is_called_after_the_copies_before_it(machine: Machine) -> None:
    seconds = machine.run(
        f"{CLIENT}{ROOMS}"
        + """
import ctypes
called = []
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: called.append(time.monotonic()))
begin = time.monotonic()
ok(cu.cuMemcpyHtoDAsync(a, host, 10 * MIB, 0))
ok(cu.cuLaunchHostFunc(0, cu.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value), 0))
ok(cu.cuCtxSynchronize())
report(called[0] - begin)
""",
        VGPU_SIM_TIME="bus=200MB/s",
    )
    assert seconds >= across(10 * MIB, 0.2) / 1e9


def test_a_copy_runs_beside_kernels_of_another_stream(machine: Machine) -> None:
    """The kernel, launched after the copy of 670 ms, ends before it; a copy in the other direction does, too."""
    found = machine.run(
        f"{CLIENT}{ROOMS}"
        + """
s, t, u = (ok(cu.cuStreamCreate(1)) for _ in range(3))
marks = [ok(cu.cuEventCreate(0)) for _ in range(3)]
f = kernel("spin_1ms")
ok(cu.cuMemcpyHtoDAsync(a, host, 64 * MIB, s))
launch(f, t)
ok(cu.cuMemcpyDtoHAsync(host, a, MIB, u))
[ok(cu.cuEventRecord(mark, stream)) for mark, stream in zip(marks, (s, t, u))]
ok(cu.cuEventSynchronize(marks[1]))
ok(cu.cuEventSynchronize(marks[2]))
running = code(cu.cuEventQuery(marks[0]))
ok(cu.cuCtxSynchronize())
later = [ok(cu.cuEventElapsedTime(mark, marks[0])) > 0 for mark in marks[1:]]
report([running, code(cu.cuEventQuery(marks[0])), *later])
""",
        VGPU_SIM_TIME="bus=100MB/s,fills=engine",
    )
    assert found == [600, 0, True, True]


def test_processes_share_the_engine_and_the_dead_leave_it(machine: Machine) -> None:
    script = f"{CLIENT}{ROOMS}report(1)\nwait()\n"
    times = {"VGPU_SIM_TIME": "bus=100MB/s"}
    first, second, third = (
        machine.start(
            f"{script}begin = time.monotonic()\nok(cu.cuMemcpyHtoDAsync(a, host, {size} * MIB, 0))\nreport(begin)\n"
            "ok(cu.cuCtxSynchronize())\nreport(time.monotonic())\nwait()",
            **times,
        )
        for size in (30, 1, 1)
    )
    for client in (first, second, third):
        heard(client)
    tell(first)
    begin = heard(first)
    tell(second)
    heard(second)
    assert heard(second) >= begin + across(31 * MIB, 0.1) / 1e9
    for client in (first, second):
        tell(client)
        assert client.wait() == 0
    stuck = machine.start(
        f"{script}ok(cu.cuMemcpyHtoDAsync(a, host, 64 * MIB, 0))\nreport(1)\nwait()", VGPU_SIM_TIME="bus=4MB/s"
    )
    heard(stuck)
    tell(stuck)
    heard(stuck)
    stuck.kill()
    stuck.wait()
    now = time.monotonic()
    tell(third)
    heard(third)
    assert heard(third) < now + 8  # the dead one's copy would have taken 16 s
    tell(third)
    assert third.wait() == 0


def test_unmapping_under_a_copy_is_an_error(machine: Machine) -> None:
    codes = machine.run(
        f"{CLIENT}{ROOMS}p = mapped(8 * MIB)\nok(cu.cuMemcpyHtoDAsync(p, host, 8 * MIB, 0))\n"
        "ok(cu.cuCtxSynchronize())\nok(cu.cuMemcpyHtoDAsync(p, host, 8 * MIB, 0))\n"
        "unmap(p, 8 * MIB)\nreport([code(cu.cuCtxSynchronize()), code(cu.cuMemAlloc(1))])",
        VGPU_SIM_TIME="bus=20MB/s",
    )
    assert codes == [700, 700]


def test_remapping_takes_its_time_in_the_calling_thread(machine: Machine) -> None:
    seconds = machine.run(
        f"{CLIENT}context()\np = mapped(2 * MIB)\nbegin = time.monotonic()\nunmap(p, 2 * MIB)\nremap(p, 2 * MIB, 0)\n"
        "report(time.monotonic() - begin)",
        VGPU_SIM_TIME="remap=30ms",
    )
    assert seconds >= 0.03
