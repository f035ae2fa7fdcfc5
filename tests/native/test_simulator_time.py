"""Time on simulated cards: duration and order of kernels, by events and by the simulator's own count."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from simulated import Machine, eventually, heard, tell

from vgpu.native import simulator

CLIENT = "from simulator_client import *\n"
MS = 1_000_000
LIBVGPU = Path(__file__).resolve().parents[2] / "libvgpu"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x2")


@pytest.mark.parametrize(
    ("name", "blocks", "nanoseconds"),
    [
        ("spin_2ms", 1, 2 * MS),
        ("spin_2ms", 100, 2 * MS),
        ("k_100us", 1, 100_000),
        ("busy_50ms_and_more", 1, 50 * MS),
        ("wide_perblock_200ns", 1000, 200_000),
        ("_Z9step_30usPfi", 1, 30_000),
        ("short_900ns", 1, 900),
        ("plain", 1, 10_000),
        ("volume_3million", 1, 10_000),
        ("tile_128x64", 1, 10_000),
    ],
)
def test_a_kernel_takes_what_its_name_says(machine: Machine, name: str, blocks: int, nanoseconds: int) -> None:
    milliseconds = machine.run(
        f"{CLIENT}context()\nf = kernel('{name}')\n"
        f"report(elapsed(lambda: [launch(f, blocks={blocks}) for _ in range(10)]))"
    )
    truth = machine.card().busy_ns
    assert truth == 10 * nanoseconds
    assert milliseconds * 1e6 >= truth - 500  # what cuda.h says of the resolution


def test_truth_counts_what_has_run_by_process(machine: Machine) -> None:
    process = machine.start(
        f"{CLIENT}context()\nf = kernel('spin_200ms')\n[launch(f) for _ in range(10)]\nreport(1)\nwait()"
    )
    heard(process)
    first = machine.process(process.pid)
    assert first.launches == (10, 0)
    assert first.busy_ns[0] < 2000 * MS
    eventually("the third kernel", lambda: machine.process(process.pid).busy_ns[0] >= 600 * MS)
    assert machine.process(process.pid).busy_ns[0] <= machine.card().busy_ns < 2000 * MS
    assert machine.card().switches == 0
    process.kill()
    process.wait()


def test_streams_run_in_the_order_of_launches_and_waits_mean_completion(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
f, g = kernel("long_40ms"), kernel("short_1ms")
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
marks = [ok(cu.cuEventCreate(0)) for _ in range(4)]
ok(cu.cuEventRecord(marks[0], a))
launch(f, a)
ok(cu.cuEventRecord(marks[1], a))
launch(g, b)
ok(cu.cuEventRecord(marks[2], b))
codes = [code(cu.cuStreamQuery(a)), code(cu.cuEventQuery(marks[1])), code(cu.cuEventElapsedTime(marks[0], marks[1]))]
ok(cu.cuStreamSynchronize(b))
codes += [code(cu.cuStreamQuery(a)), code(cu.cuEventQuery(marks[2])), code(cu.cuEventElapsedTime(marks[0], marks[3]))]
report([codes, ok(cu.cuEventElapsedTime(marks[0], marks[1])), ok(cu.cuEventElapsedTime(marks[1], marks[2]))])
"""
    )
    codes, first, second = found
    assert codes == [600, 600, 600, 0, 0, 400]
    assert first >= 39.99
    assert second == pytest.approx(1, rel=0.01)


def test_the_legacy_stream_waits_for_blocking_streams_only(machine: Machine) -> None:
    codes = machine.run(
        CLIENT
        + """
context()
f = kernel("long_100ms")
blocking, other = ok(cu.cuStreamCreate(0)), ok(cu.cuStreamCreate(1))
launch(f, other)
codes = [code(cu.cuStreamQuery(0))]
launch(f, blocking)
codes.append(code(cu.cuStreamQuery(0)))
ok(cu.cuStreamSynchronize(0))
codes.append(code(cu.cuStreamQuery(blocking)))
report(codes)
"""
    )
    assert codes == [0, 600, 0]


def test_a_wait_for_an_event_orders_two_cards(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context(0)
f = kernel("long_60ms")
done = ok(cu.cuEventCreate(0))
launch(f)
ok(cu.cuEventRecord(done, 0))
context(1)
g = kernel("short_1ms")
stream = ok(cu.cuStreamCreate(1))
ok(cu.cuStreamWaitEvent(stream, done, 0))
launch(g, stream)
ok(cu.cuStreamSynchronize(stream))
report(code(cu.cuEventQuery(done)))
"""
    )
    assert found == 0


def test_host_functions_run_in_stream_order(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
import ctypes
context()
lib = ctypes.CDLL("libcuda.so.1")
order = []
call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(order.append)
f = kernel("k_20ms")
stream = ok(cu.cuStreamCreate(1))
launch(f, stream)
assert lib.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), call, ctypes.c_void_p(1)) == 0
before = [len(order), code(cu.cuStreamQuery(stream))]
assert lib.cuLaunchHostFunc(ctypes.c_void_p(int(stream)), call, ctypes.c_void_p(2)) == 0
ok(cu.cuStreamSynchronize(stream))
report([before, order])
"""
    )
    assert found == [[0, 600], [1, 2]]


def test_launches_wait_when_the_queue_is_full(machine: Machine) -> None:
    process = machine.start(
        f"{CLIENT}context()\nf = kernel('k_50ms')\n[launch(f) for _ in range(1024)]\nreport(1)\n"
        "launch(f)\nreport(2)\nwait()"
    )
    assert heard(process) == 1
    assert machine.process(process.pid).launches[0] == 1024
    assert heard(process) == 2  # when the first has ended
    assert machine.process(process.pid).busy_ns[0] >= 50 * MS
    process.kill()
    process.wait()


def test_processes_share_the_time_of_a_card(machine: Machine) -> None:
    script = (
        CLIENT
        + """
context()
f = kernel("k_5ms")
report(0)
wait()
for _ in range(20):
    launch(f)
    ok(cu.cuCtxSynchronize())
report(1)
"""
    )
    both = [machine.start(script) for _ in range(2)]
    for process in both:
        heard(process)
    for process in both:
        tell(process)
    for process in both:
        heard(process)
        process.wait()
    assert [machine.process(p.pid).busy_ns[0] for p in both] == [100 * MS, 100 * MS]
    assert machine.card().busy_ns == 200 * MS


def test_queued_work_of_a_killed_process_vanishes(machine: Machine) -> None:
    hog = machine.start(
        f"{CLIENT}context()\nf = kernel('k_100ms')\n[launch(f) for _ in range(1000)]\nreport(1)\nwait()"
    )
    heard(hog)
    other = machine.start(
        f"{CLIENT}context()\nf = kernel('k_1ms')\nreport(0)\nlaunch(f)\nok(cu.cuCtxSynchronize())\nreport(1)"
    )
    heard(other)  # its kernel is behind 100 seconds of work
    hog.kill()
    hog.wait()
    assert heard(other) == 1
    other.wait()
    assert machine.process(hog.pid).busy_ns[0] < 50_000 * MS
    assert machine.process(other.pid).busy_ns[0] == 1 * MS


def test_a_running_kernel_ends_with_its_process(machine: Machine) -> None:
    hog = machine.start(f"{CLIENT}context()\nlaunch(kernel('k_1000000ms'))\nreport(1)\nwait()")
    heard(hog)
    hog.kill()
    hog.wait()
    assert machine.run(f"{CLIENT}context()\nlaunch(kernel('k_1ms'))\nreport(code(cu.cuCtxSynchronize()))") == 0
    assert 0 < machine.process(hog.pid).busy_ns[0] < 60_000 * MS


def test_what_a_killed_process_queued_is_not_counted_when_somebody_looks_late(machine: Machine) -> None:
    hog = machine.start(f"{CLIENT}context()\nf = kernel('k_1ms')\n[launch(f) for _ in range(1000)]\nreport(1)\nwait()")
    heard(hog)
    hog.kill()
    hog.wait()
    time.sleep(1.2)  # the whole queue would have run by now, if nobody had died
    machine.run(f"{CLIENT}context()\nlaunch(kernel('k_1ms'))\nok(cu.cuCtxSynchronize())")
    assert machine.process(hog.pid).busy_ns[0] < 500 * MS


HOLDER = """
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#include "common/state.h"
int main(int count, char **arguments)
{
    struct sim sim;
    if (count < 4 || sim_open(&sim, arguments[1]) || (atoi(arguments[3]) && sim_register(&sim)))
        return 1;
    struct sim_card *card = &sim.state->cards[0];
    sim_acquire(&sim, atoi(arguments[2]) ? &card->memory_lock : &card->time_lock);
    return kill(getpid(), SIGKILL);
}
"""


@pytest.mark.parametrize("registered", [0, 1])
@pytest.mark.parametrize("memory", [0, 1])
def test_a_lock_of_the_dead_is_taken_over(machine: Machine, tmp_path: Path, memory: int, registered: int) -> None:
    source = tmp_path / "holder.c"
    source.write_text(HOLDER)
    include = ["-I", str(LIBVGPU / "include"), "-I", str(LIBVGPU / "simulator")]
    common = map(str, sorted((LIBVGPU / "simulator" / "common").glob("*.c")))
    subprocess.run(["cc", "-std=gnu11", *include, "-o", str(tmp_path / "holder"), str(source), *common], check=True)
    work = f"{CLIENT}context()\nlaunch(kernel('k_1ms'))\nok(cu.cuCtxSynchronize())\nreport(code(cu.cuMemAlloc(MIB)))"
    simulator.create(machine.folder, machine.spec)
    holder = subprocess.run([tmp_path / "holder", machine.folder, str(memory), str(registered)], check=False)
    assert holder.returncode == -signal.SIGKILL
    assert machine.run(work) == 0
    assert machine.card().used == 0


def test_deaths_at_any_moment_stop_nobody(machine: Machine) -> None:
    loop = (
        CLIENT
        + """
context()
f = kernel("k_20us")
report(0)
while True:
    for _ in range(20):
        launch(f)
        ok(cu.cuMemFree(ok(cu.cuMemAlloc(4096))))
    ok(cu.cuCtxSynchronize())
"""
    )
    steady = machine.start(
        f"{CLIENT}context()\nf = kernel('k_20us')\nwhile wait():\n    report(elapsed(lambda: launch(f)))"
    )
    for _ in range(8):
        victims = [machine.start(loop) for _ in range(2)]
        for victim in victims:
            heard(victim)
        tell(steady)
        heard(steady)
        for victim in victims:
            victim.kill()
        tell(steady)
        assert heard(steady) >= 0.0195
        for victim in victims:
            victim.wait()
    steady.kill()
    steady.wait()
    assert machine.card().used == 0
    assert sum(p.busy_ns[0] for p in simulator.processes(machine.folder)) == machine.card().busy_ns


def test_captured_launches_run_when_the_graph_is_launched(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
f = kernel("k_2ms")
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
fork, join = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
p = ok(cu.cuMemAlloc(100))
ok(cu.cuStreamBeginCapture(a, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
launch(f, a)
ok(cu.cuEventRecord(fork, a))
ok(cu.cuStreamWaitEvent(b, fork, 0))
launch(f, b)
ok(cu.cuMemsetD8Async(p, 7, 100, b))
q = ok(cu.cuMemAllocAsync(3 * MIB, b))
ok(cu.cuMemFreeAsync(q, b))
ok(cu.cuEventRecord(join, b))
ok(cu.cuStreamWaitEvent(a, join, 0))
status = [int(ok(cu.cuStreamIsCapturing(s))) for s in (a, b)]
graph = ok(cu.cuStreamEndCapture(a))
launched = ok(cu.cuStreamQuery(a))
execution = ok(cu.cuGraphInstantiate(graph, 0))
rest = free()
time_of = [elapsed(lambda: ok(cu.cuGraphLaunch(execution, a)), a) for _ in range(3)]
back = bytearray(100)
ok(cu.cuMemcpyDtoH(back, p, 100))
ok(cu.cuGraphExecDestroy(execution)), ok(cu.cuGraphDestroy(graph)), ok(cu.cuDeviceGraphMemTrim(0))
report([status, time_of, set(back) == {7}, rest == free(), code(cu.cuGraphLaunch(execution, a))])
"""
    )
    status, times, filled, same, destroyed = found
    assert status == [1, 1]
    assert min(times) >= 3.99
    assert (filled, same, destroyed) == (True, True, 1)
    assert machine.card().busy_ns == 3 * 2 * 2 * MS


@pytest.mark.parametrize(
    "call", ["cu.cuMemAlloc(1)", "cu.cuCtxSynchronize()", "cu.cuEventQuery(e)", "cu.cuMemcpyHtoD(p, b'x', 1)"]
)
def test_an_unsafe_call_breaks_a_capture_unless_the_thread_allows_it(machine: Machine, call: str) -> None:
    found = machine.run(
        CLIENT
        + f"""
context()
M = cu.CUstreamCaptureMode
p, e, s = ok(cu.cuMemAlloc(1)), ok(cu.cuEventCreate(0)), ok(cu.cuStreamCreate(1))
out = []
for mode in (M.CU_STREAM_CAPTURE_MODE_GLOBAL, M.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    M.CU_STREAM_CAPTURE_MODE_RELAXED):
    ok(cu.cuStreamBeginCapture(s, mode))
    answer = code({call})
    out.append([answer, code(cu.cuStreamEndCapture(s))])
ok(cu.cuStreamBeginCapture(s, M.CU_STREAM_CAPTURE_MODE_GLOBAL))
before = ok(cu.cuThreadExchangeStreamCaptureMode(M.CU_STREAM_CAPTURE_MODE_RELAXED))
answer = code({call})
ok(cu.cuThreadExchangeStreamCaptureMode(before))
out.append([answer, code(cu.cuStreamEndCapture(s))])
report(out)
"""
    )
    assert found == [[900, 901], [900, 901], [0, 0], [0, 0]]


@pytest.mark.parametrize(("mode", "answers"), [("GLOBAL", [900, 901]), ("THREAD_LOCAL", [0, 0]), ("RELAXED", [0, 0])])
def test_only_a_global_capture_forbids_unsafe_calls_of_other_threads(
    machine: Machine, mode: str, answers: list[int]
) -> None:
    found = machine.run(
        CLIENT
        + f"""
import threading
made = context()
s = ok(cu.cuStreamCreate(1))
answer = []
def other():
    ok(cu.cuCtxSetCurrent(made))
    answer.append(code(cu.cuMemAlloc(1)))
ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_{mode}))
thread = threading.Thread(target=other)
thread.start()
thread.join()
report([*answer, code(cu.cuStreamEndCapture(s))])
"""
    )
    assert found == answers
