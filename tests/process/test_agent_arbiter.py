"""The time of a card under the real agent: lent while its owner rests, given back, fixed without the agent; metrics."""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_machine import Machine
from agent_world import until

from vgpu.devices import GpuSlice
from vgpu.native import simulator

#: Launches kernels of 2 ms; if it gets the name of a file next to its log, only as long as that file exists
FLOOD = """
import ctypes, pathlib, time
cuda = ctypes.CDLL("libcuda.so.1")
context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
ptx = b".version 8.0\\n.visible .entry spin_2ms() {{ ret; }}"
assert cuda.cuModuleLoadData(ctypes.byref(module), ptx) == 0
assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_2ms") == 0
print(f"program={{os.getpid()}}", flush=True)
file, left = pathlib.Path({file!r}), {launches}
while left:
    if not file.exists():
        time.sleep(0.01)
        continue
    assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
    assert cuda.cuCtxSynchronize() == 0
    left -= 1
print("done=1", flush=True)
signal.pause()
"""
WINDOW_S = 0.5


@pytest.fixture
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="vgpu", dir="/tmp"))
    made = Machine(root, "cdi")
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)


def flood(machine: Machine, name: str, piece: GpuSlice, file: Path, launches: int = -1) -> int:
    """Starts a pod; returns its program's pid."""
    machine.run(name, {"main": [piece]}, FLOOD.format(file=str(file), launches=launches))
    return int(until(lambda: machine.environment(name).get("program"), 40))


def shares(machine: Machine, card: str, *pids: int) -> list[float]:
    """Percent of a short time in which these programs had the card."""
    state = machine.root / "run" / "simulator"
    index = [each.uuid for each in simulator.cards(state)].index(card)

    def busy() -> list[int]:
        by_pid = {process.pid: process.busy_ns[index] for process in simulator.processes(state)}
        return [by_pid[pid] for pid in pids]

    before, begun = busy(), time.monotonic()
    time.sleep(WINDOW_S)
    return [(now - then) / (time.monotonic() - begun) / 1e7 for now, then in zip(busy(), before, strict=True)]


def test_idle_time_is_lent_and_given_back_and_not_without_the_agent(machine: Machine) -> None:
    with (machine.root / "config.yaml").open("a") as config:
        config.write("corePolicy: elastic\n")
    machine.start_agent()
    card = machine.ready()[0]
    always, sometimes = machine.root, machine.root / "go"
    a = flood(machine, "a", GpuSlice(card, 1000, cores=30), always)
    b = flood(machine, "b", GpuSlice(card, 1000, cores=70), sometimes)
    until(lambda: shares(machine, card, a)[0] > 60, 60)
    sometimes.touch()
    until(lambda: (found := shares(machine, card, a, b))[0] < 45 and found[1] > 50, 60)
    sometimes.unlink()
    until(lambda: shares(machine, card, a)[0] > 60, 60)
    machine.stop_agent(signal.SIGKILL)
    until(lambda: shares(machine, card, a)[0] < 45, 60)
    machine.start_agent()
    until(lambda: shares(machine, card, a)[0] > 60, 60)


def test_time_and_launches_are_exported_with_a_limit_and_without(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    flood(machine, "limited", GpuSlice(cards[0], 1000, cores=5), machine.root, 40)
    flood(machine, "free", GpuSlice(cards[1], 1000), machine.root, 40)

    def sample(what: str, pod: str, card: str) -> float:
        return machine.sample(f"vgpu_container_{what}_total", pod, "main", card) or 0

    for pod, card in zip(("limited", "free"), cards, strict=True):
        until(lambda pod=pod, card=card: sample("launches", pod, card) == 40, 60)
        until(lambda pod=pod, card=card: 0.06 < sample("gpu_seconds", pod, card) < 0.3, 60)
    until(lambda: sample("throttled_seconds", "limited", cards[0]) > 0.3, 60)
    assert sample("throttled_seconds", "free", cards[1]) == 0
    assert machine.sample("vgpu_container_core_limit_ratio", "limited", "main", cards[0]) == 0.05
