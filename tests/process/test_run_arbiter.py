"""`vgpu run` and the time of idle neighbours: the arbiter in the background, its end, and the limits without it."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_machine import Machine, eventually

from vgpu.native import simulator

#: Launches kernels of 2 ms without end
FLOOD = """
import ctypes
from vgpu.probe import Cuda, Kernel
cuda, context = Cuda(), ctypes.c_void_p()
cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), cuda.devices()[0])
cuda.call("cuCtxSetCurrent", context)
kernel = Kernel(cuda, "2ms")
print("ready", flush=True)
while True:
    kernel.run(5.0)
"""
WINDOW_S = 0.5


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4")
    yield found
    found.stop()


def flood(machine: Machine, *options: str) -> None:
    process = machine.start("--gpumem", "1000", *options, command=(sys.executable, "-c", FLOOD))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def share(machine: Machine) -> float:
    """% of a moment in which the card was busy."""
    before, begun = simulator.cards(machine.simulator)[0].busy_ns, time.monotonic()
    time.sleep(WINDOW_S)
    return (simulator.cards(machine.simulator)[0].busy_ns - before) / (time.monotonic() - begun) / 1e7


def arbiters(machine: Machine) -> list[int]:
    wanted = ["vgpu.workstation.arbiter", str(machine.state)]
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):  # no process, ended, or another user's
            continue
        if entry.name.isdecimal() and words[-3:-1] == wanted:
            found.append(int(entry.name))
    return found


def test_idle_time_is_used_while_the_arbiter_lives(machine: Machine) -> None:
    flood(machine, "--gpucores", "20", "--core-policy", "elastic")
    eventually("the idle time of the card", lambda: share(machine) > 50)
    assert len(arbiters(machine)) == 1
    os.kill(arbiters(machine)[0], signal.SIGKILL)
    eventually("back to the fixed share", lambda: share(machine) < 35)
    machine.run("--gpumem", "1000", command=("true",))  # next to a neighbour with a share
    eventually("another arbiter", lambda: share(machine) > 50)
    machine.stop()
    eventually("its end with the last slice", lambda: not arbiters(machine))


def test_a_ceiling_holds(machine: Machine) -> None:
    flood(machine, "--gpucores", "20", "--core-policy", "elastic", "--cores-limit", "60")
    eventually("more than its own", lambda: share(machine) > 40)
    assert share(machine) < 80


def test_who_is_alone_and_keeps_to_his_share_needs_none(machine: Machine) -> None:
    machine.run("--gpumem", "1000", "--gpucores", "30", command=("true",))
    machine.run("--gpumem", "1000", command=("true",))
    assert not arbiters(machine)
    assert not (machine.state / "arbiter.lock").exists()
