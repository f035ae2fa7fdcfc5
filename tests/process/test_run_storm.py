"""kill -9 of runners, waiters, commands and their children: no slice is given twice, no slice stays behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from run_machine import PROBE, Machine, eventually

from vgpu.native import simulator

MEMORY = 4800  #: MiB: three fit on a T4
CARD = 14912
RUNNERS = 24


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4")
    yield found
    found.stop()
    for pid in carriers(found):
        os.kill(pid, signal.SIGKILL)


def carriers(machine: Machine) -> dict[int, str]:
    """Living processes in slices, from /proc alone: pid → directory of the slice."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            environ = dict(pair.split("=", 1) for pair in (entry / "environ").read_text().split("\0") if "=" in pair)
        except (OSError, UnicodeDecodeError):
            continue
        directory = environ.get("VGPU_DIR", "")
        if entry.name.isdecimal() and directory.startswith(str(machine.state)):
            found[int(entry.name)] = directory
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_given_twice_and_nothing_stays(machine: Machine) -> None:
    chance = random.Random(20)
    # A shell with a child that holds the memory: a kill of one leaves the other.
    probe = " ".join([*PROBE, "--fill", "--hold", "1.5"])
    command = ("sh", "-c", f"{probe} & {probe.replace('--fill', '')} & wait")
    started = 0
    while started < RUNNERS or any(process.poll() is None for process in machine.started):
        if started < RUNNERS and sum(process.poll() is None for process in machine.started) < 6:
            machine.start("--gpumem", str(MEMORY), "--wait", command=command)
            started += 1
        living = carriers(machine)
        assert len(set(living.values())) * MEMORY <= CARD, living
        victims = [process.pid for process in machine.started if process.poll() is None] + list(living)
        if victims and chance.random() < 0.25:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(victims), signal.SIGKILL)
        time.sleep(0.05)  # the pace of the storm; nothing is waited for
    reports = [line for process in machine.started for line in process.communicate()[0].splitlines()]
    fills = [line.split('"fill": ')[1].split(",")[0].rstrip("}]") for line in reports if '"fill"' in line]
    assert fills
    assert set(fills) == {'"CUDA_SUCCESS"'}
    eventually("the end of all processes in slices", lambda: not carriers(machine))
    (card,) = simulator.cards(machine.simulator)
    assert card.peak <= card.memory
    assert card.used == 0
    assert machine.ps() == []
    assert list((machine.state / "slices").iterdir()) == []


def test_a_child_that_outlives_runner_and_command_keeps_the_slice(machine: Machine) -> None:
    script = (
        "import subprocess, sys\n"
        f"command = {[*PROBE, '--fill', '--hold', '600']!r}\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid, child.stdout.readline().decode(), flush=True); input()"
    )
    process = machine.start("--gpumem", "10000", command=(sys.executable, "-c", script))
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[0])
    process.kill()
    process.wait()
    (run,) = machine.ps()
    assert run["slices"][0]["memory_used_bytes"] > 9000 << 20
    assert machine.run("--gpumem", "10000", command=("true",)).returncode == os.EX_TEMPFAIL
    os.kill(child, signal.SIGKILL)
    eventually("the child's end", lambda: not carriers(machine))
    assert machine.run("--gpumem", "10000", command=("true",)).returncode == 0


def test_a_runner_that_is_killed_before_its_command_starts_leaves_nothing(machine: Machine) -> None:
    chance = random.Random(7)
    for _ in range(8):
        process = machine.start("--gpumem", "10000", command=("true",))
        with suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.1, 0.6))
        process.kill()
        process.communicate()
    assert machine.run("--gpumem", "10000", command=("true",)).returncode == 0


def test_a_child_that_overwrote_its_environment_is_known_by_its_place_in_the_region(machine: Machine) -> None:
    """Workers of common servers do this (setproctitle)."""
    child = (
        "import ctypes, sys\n"
        "cuda, context, pointer = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(), ctypes.c_uint64()\n"
        "assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "assert cuda.cuCtxSetCurrent(context) == cuda.cuMemAlloc_v2(ctypes.byref(pointer), 1 << 30) == 0\n"
        "strings, at = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), 'environ'), 0\n"
        "while strings[at]:\n"
        "    ctypes.memset(strings[at], 120, len(ctypes.string_at(strings[at])))\n"
        "    at += 1\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    # The child inherits the runner's stdin; when the pipe ends, the child ends.
    script = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "print(child.pid, child.stdout.readline().decode(), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    process = machine.start("--gpumem", "10000", command=(sys.executable, "-c", script))
    assert process.stdout is not None
    pid, word = process.stdout.readline().split()
    assert word == "ready"
    process.wait()
    assert not carriers(machine)
    (run,) = machine.ps()
    assert run["pid"] == int(pid)
    assert run["slices"][0]["memory_used_bytes"] >= 1 << 30
    os.kill(int(pid), signal.SIGKILL)
    eventually("the child's end", lambda: machine.ps() == [])
