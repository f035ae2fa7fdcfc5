"""How processes share the time of a simulated card: slices, switches, deaths, concurrent kernels, NVML's figures."""

import random
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from simulated import Machine, eventually, heard, tell

from vgpu.native import simulator

CLIENT = "from simulator_client import *\n"
MS = 1_000_000
LIBVGPU = Path(__file__).resolve().parents[2] / "libvgpu"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards")


def compiled(folder: Path, text: str) -> Path:
    """A C program that uses the common code of the two simulated libraries."""
    source, program = folder / "program.c", folder / "program"
    source.write_text(text)
    include = ["-I", str(LIBVGPU / "include"), "-I", str(LIBVGPU / "simulator")]
    common = map(str, sorted((LIBVGPU / "simulator" / "common").glob("*.c")))
    subprocess.run(["cc", "-std=gnu11", "-O1", *include, "-o", program, source, *common, "-lpthread"], check=True)
    return program


@pytest.mark.parametrize(("times", "change"), [("", 0.01), ("slice=1ms,switch=400us", 0.4)])
def test_a_long_kernel_is_interrupted_for_the_short_ones_of_a_neighbour(
    machine: Machine, times: str, change: float
) -> None:
    long = machine.start(
        CLIENT
        + """
context()
f = kernel("long_2000ms")
begin, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
report(wait())
ok(cu.cuEventRecord(begin, 0)), launch(f), ok(cu.cuEventRecord(end, 0))
report(1)
report([wait(), code(cu.cuEventQuery(end))][1])
ok(cu.cuEventSynchronize(end))
report(ok(cu.cuEventElapsedTime(begin, end)))
""",
        VGPU_SIM_TIME=times,
    )
    short = machine.start(
        CLIENT
        + """
context()
f = kernel("short_100us")
report(wait())
for _ in range(20):
    launch(f)
    ok(cu.cuCtxSynchronize())
report(1)
wait()
"""
    )
    tell(long)
    heard(long)
    heard(long)
    tell(short)
    heard(short)
    heard(short)
    seen = machine.process(short.pid)
    tell(long)
    assert heard(long) == 600  # the neighbour was through before the long kernel ended
    elapsed = heard(long)
    tell(short)
    for process in (long, short):
        process.wait()
    card = machine.card()
    assert seen.busy_ns[0] == 2 * MS
    assert seen.waited_ns[0] > 0
    assert machine.process(long.pid).busy_ns[0] == 2000 * MS
    assert card.busy_ns == 2002 * MS
    assert card.switches >= 20
    contained = 2000 + 2 + (card.switches - 1) * change  # one change at most lies outside
    assert contained - 0.001 <= elapsed < contained + 500


def test_two_that_always_have_work_get_equal_time_whatever_their_kernels_take(machine: Machine) -> None:
    script = CLIENT + "context()\nf = kernel('{}')\nreport(wait())\n[launch(f) for _ in range({})]\nreport(1)\nwait()"
    both = [
        machine.start(script.format(name, count), VGPU_SIM_TIME="slice=3ms")
        for name, count in (("k_50ms", 60), ("k_3ms", 1000))
    ]
    for process in both:
        tell(process)
        heard(process)
        heard(process)

    def busy() -> list[int]:
        found = {p.pid: p.busy_ns[0] for p in simulator.processes(machine.folder)}
        return [found[process.pid] for process in both]

    eventually("both at work", lambda: min(busy()) > 0)
    before = busy()
    eventually("a second of work", lambda: sum(busy()) > sum(before) + 1000 * MS)
    after = busy()
    gained = [b - a for a, b in zip(before, after, strict=True)]
    assert abs(gained[0] - gained[1]) <= 2 * 3 * MS
    for process in both:
        process.kill()
        process.wait()
    stopped = busy()
    assert machine.run(f"{CLIENT}context()\nlaunch(kernel('k_1ms'))\nreport(code(cu.cuCtxSynchronize()))") == 0
    assert busy()[0] - stopped[0] <= 2 * MS  # nobody looked when it died
    assert sum(p.busy_ns[0] for p in simulator.processes(machine.folder)) == machine.card().busy_ns


def test_random_times_have_their_mean_and_repeat_by_seed(machine: Machine) -> None:
    script = (
        CLIENT
        + """
import statistics
context()
f, marks = kernel("k_1ms_sigma20"), [ok(cu.cuEventCreate(0)) for _ in range(401)]
for i, mark in enumerate(marks):
    ok(cu.cuEventRecord(mark, 0))
    if i < 400:
        launch(f)
ok(cu.cuCtxSynchronize())
times = [ok(cu.cuEventElapsedTime(a, b)) for a, b in zip(marks[50:], marks[51:])]
report([statistics.mean(times), statistics.stdev(times), min(times), os.getpid()])
"""
    )
    mean, deviation, least, first = machine.run(script)
    second, other = machine.run(script)[3], machine.run(script, VGPU_SIM_SEED="7")[3]
    assert mean == pytest.approx(1, rel=0.05)
    assert deviation == pytest.approx(0.2, rel=0.25)
    assert least < 0.75
    a, b, c = (machine.process(pid).busy_ns[0] for pid in (first, second, other))
    assert a == b != c


def test_kernels_take_turns_or_what_their_parameter_says(machine: Machine) -> None:
    machine.run(
        CLIENT
        + """
import ctypes
context()
f, g = kernel("k_10us_3ms"), kernel("k_arg_us")
[launch(f) for _ in range(10)]
value = ctypes.c_uint64(700)
first = (ctypes.c_void_p * 1)(ctypes.addressof(value))
stream = ok(cu.cuStreamCreate(1))
ok(cu.cuLaunchKernel(g, 1, 1, 1, 32, 1, 1, 0, stream, ctypes.addressof(first), 0))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(cu.cuLaunchKernel(g, 1, 1, 1, 32, 1, 1, 0, stream, ctypes.addressof(first), 0))
execution = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
value.value = 5
ok(cu.cuGraphLaunch(execution, stream)), ok(cu.cuGraphLaunch(execution, stream))
launch(g)
ok(cu.cuCtxSynchronize())
"""
    )
    assert machine.card().busy_ns == 5 * 3_010_000 + 3 * 700_000 + 10_000


def test_times_of_events_have_the_documented_resolution(machine: Machine) -> None:
    times = machine.run(
        f"{CLIENT}context()\nf = kernel('k_1234ns')\nreport([elapsed(lambda: launch(f)) for _ in range(20)])"
    )
    assert all(abs(t * 2000 - round(t * 2000)) < 0.01 for t in times)


@pytest.mark.parametrize(("blocks", "together"), [(1, 100), (40 * 16, 400), (20 * 16, 200)])
def test_kernels_of_several_streams_run_side_by_side_when_told_so(machine: Machine, blocks: int, together: int) -> None:
    times = machine.run(
        CLIENT
        + f"""
context()
f = kernel("k_100ms")
streams = [ok(cu.cuStreamCreate(1)) for _ in range(4)]
def all_of(streams):
    begin = ok(cu.cuEventCreate(0))
    ends = [ok(cu.cuEventCreate(0)) for _ in streams]
    ok(cu.cuEventRecord(begin, streams[0]))
    for stream, end in zip(streams, ends):
        launch(f, stream, {blocks}), ok(cu.cuEventRecord(end, stream))
    ok(cu.cuCtxSynchronize())
    return max(ok(cu.cuEventElapsedTime(begin, end)) for end in ends)
report([all_of(streams), all_of([streams[1]] * 2)])
""",
        VGPU_SIM_TIME="kernels=4",
    )
    # they begin one after another, as they are launched
    assert (together + 200) * MS <= machine.card().busy_ns < (together + 290) * MS
    assert times[0] >= together - 0.001
    assert times[1] >= 200 - 0.001


def test_order_between_streams_holds_side_by_side(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
f, g = kernel("k_30ms"), kernel("k_10ms")
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
blocking, done, end = ok(cu.cuStreamCreate(0)), ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
launch(f, a)
ok(cu.cuEventRecord(done, a))
ok(cu.cuStreamWaitEvent(b, done, 0))
launch(g, b)
ok(cu.cuEventRecord(end, b))
ok(cu.cuStreamSynchronize(b))
out = [code(cu.cuStreamQuery(a)), ok(cu.cuEventElapsedTime(done, end))]
launch(f, blocking), launch(g, 0), launch(g, blocking)
ok(cu.cuStreamSynchronize(blocking))
report([*out, code(cu.cuStreamQuery(0))])
""",
        VGPU_SIM_TIME="kernels=8",
    )
    assert found == [0, pytest.approx(10, abs=0.01), 0]
    assert machine.card().busy_ns == 90 * MS


def test_nvml_samples_utilisation_six_times_a_second(machine: Machine) -> None:
    worker = machine.start(
        f"{CLIENT}context()\nf = kernel('k_50ms')\nreport(1)\nwhile True:\n    launch(f)\n    ok(cu.cuCtxSynchronize())"
    )
    heard(worker)
    stamps = machine.run(
        """
import json, time
from pynvml import *
nvmlInit()
h, last, stamps, end = nvmlDeviceGetHandleByIndex(0), 0, [], time.monotonic() + 1
while time.monotonic() < end:
    try:
        last = nvmlDeviceGetProcessUtilization(h, last)[0].timeStamp
        stamps.append(last)
    except NVMLError as error:
        assert error.value == NVML_ERROR_NOT_FOUND
print(json.dumps(stamps))
"""
    )
    worker.kill()
    worker.wait()
    assert 1 <= len(stamps) <= 8
    assert all(b - a > 160_000 for a, b in pairwise(stamps))


@pytest.mark.parametrize(
    "times",
    [
        *("slice=0", "slice=2", "nothing=1ms", "kernels=0", "kernels=33", "switch", "launch=11s"),
        *("bus=0GB/s", "bus=25", "bus=fast", "managed=maybe", "remap=1", "fault=30us,bus"),
    ],
)
def test_wrong_times_are_refused(machine: Machine, times: str) -> None:
    simulator.create(machine.folder, machine.spec)
    client = subprocess.run(
        ["python3", "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"],
        env=machine.environment(VGPU_SIM_TIME=times),
        capture_output=True,
        text=True,
        check=True,
    )
    assert client.stdout.strip() != "0"
    assert f"VGPU_SIM_TIME={times}: not a list of slice=2ms" in client.stderr


HALF = """
#include <signal.h>
#include <unistd.h>
#include "common/state.h"
int main(void)
{
    struct sim sim;
    if (sim_open_environment(&sim) || sim_register(&sim))
        return 1;
    sim_launch(&sim, 0, 1000000, 1000, 0, (struct sim_mark){0, 0}, 0);
    struct sim_card *card = &sim.state->cards[0];
    struct sim_step *step = &card->step;
    sim_acquire(&sim, &card->time_lock);
    sim_advance_locked(&sim, 0, sim_now());
    uint64_t clock = sim.self->launched[0][1].not_before + 1000000;
    step->slot = sim.slot, step->generation = sim.generation;
    step->current = (uint64_t)sim.generation << 32 | (sim.slot + 1);
    step->clock_ns = clock, step->busy_ns = step->card_busy_ns = 1000000, step->finished = 1;
    step->written = step->applied + 1;
    sim.self->cards[0].busy_ns = step->busy_ns;
    return kill(getpid(), SIGKILL);
}
"""


def test_what_the_dead_left_half_done_is_finished(machine: Machine, tmp_path: Path) -> None:
    holder = subprocess.run([compiled(tmp_path, HALF)], env=machine.environment(), check=False)
    assert holder.returncode == -signal.SIGKILL
    assert machine.card().busy_ns == 1 * MS
    assert [p.busy_ns[0] for p in simulator.processes(machine.folder)] == [1 * MS]


STORM = """
#include <stdio.h>
#include <signal.h>
#include <sys/prctl.h>
#include "common/state.h"
int main(void)
{
    struct sim sim;
    uint64_t last = 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (sim_open_environment(&sim) || sim_register(&sim))
        return 1;
    puts("ready");
    fflush(stdout);
    for (unsigned i = 0;; i++) {
        uint64_t sequence = sim_launch(&sim, 0, 1000 + i % 7 * 9000, 1000, 0, (struct sim_mark){last, 0}, 0);
        if (i % 16 == 0) {
            sim_wait(&sim, 0, sequence);
            if (!sim_finished(&sim, 0, sequence) || sim_reached_at(&sim, 0, (struct sim_mark){sequence, 0}) > sim_now())
                return 2;
        }
        last = sequence;
    }
}
"""


@pytest.mark.parametrize("kernels", [1, 3])
def test_a_card_stays_sound_when_processes_die_while_they_move_its_time(
    machine: Machine, tmp_path: Path, kernels: int
) -> None:
    program = compiled(tmp_path, STORM)
    environment = machine.environment(VGPU_SIM_TIME=f"slice=20us,switch=1us,launch=0ns,kernels={kernels}")

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen([program], env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    chance = random.Random(kernels)
    running = [start() for _ in range(3)]
    for _ in range(60):
        launches = machine.process(running[1].pid).launches[0]
        eventually(
            "launches go on", lambda n=launches: machine.process(running[1].pid).launches[0] > n + chance.randrange(50)
        )
        victim = running.pop(0)
        assert victim.poll() is None
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        running.append(start())
    for process in running:
        assert process.poll() is None
        process.kill()
        process.wait()
    assert machine.run(f"{CLIENT}context()\nlaunch(kernel('k_1ms'))\nreport(code(cu.cuCtxSynchronize()))") == 0
    assert sum(p.busy_ns[0] for p in simulator.processes(machine.folder)) == machine.card().busy_ns > 0
