"""Errors on demand: the n-th call of an entry point returns what a test sets."""

import re
from pathlib import Path

import pytest
from simulated import MIB, Machine, heard, tell

from vgpu.native import simulator

SOURCES = Path(__file__).resolve().parents[2] / "libvgpu/simulator/cuda"
CLIENT = "from simulator_client import *\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    simulator.create(tmp_path / "cards", "T4")
    return Machine(tmp_path / "cards")


def entries() -> list[str]:
    """Every exported entry point, without the functions that name errors, and without cuInit, which fails only before
    success.
    """
    text = "".join((SOURCES / name).read_text() for name in ("entries.def", "unsupported.def"))
    found = re.findall(r"^[A-Z_]+\(\w+, (\w+), \d+(?:, (\w+), \d+)?\)$", text, re.M)
    names = [name for pair in found for name in pair if name]
    return [n for n in names if n not in {"cuInit", "cuGetErrorName", "cuGetErrorString"}]


def test_every_entry_point_can_be_made_to_fail(machine: Machine) -> None:
    found = machine.run(
        f"""
import ctypes, json
from pathlib import Path
from vgpu.native import simulator
lib = ctypes.CDLL("libcuda.so.1")
lib.cuInit(0)
wrong = []
for name in {entries()!r}:
    simulator.inject_error(Path({str(machine.folder)!r}), name, 777)
    first = getattr(lib, name)(*[ctypes.c_uint64(0)] * 12)
    if first != 777:
        wrong.append([name, first])
        simulator.clear_errors(Path({str(machine.folder)!r}), name)
print(json.dumps(wrong))
"""
    )
    assert found == []


def test_the_nth_call_fails_once(machine: Machine) -> None:
    simulator.inject_error(machine.folder, "cuMemAlloc_v2", 2, nth=3)
    found = machine.run(CLIENT + "context()\nreport([code(cu.cuMemAlloc(10)) for _ in range(5)] + [free()])")
    card = machine.card()
    assert found == [0, 0, 2, 0, 0, card.memory - card.context_bytes - 40]


def test_calls_of_all_processes_count(machine: Machine) -> None:
    script = CLIENT + "context()\nreport(0)\nwhile wait() == 'go':\n    report(code(cu.cuMemAlloc(MIB)))"
    first, second = machine.start(script), machine.start(script)
    for process in (first, second):
        heard(process)
    simulator.inject_error(machine.folder, "cuMemAlloc_v2", 719, nth=2)
    answers = []
    for process in (first, second, first):
        tell(process)
        answers.append(heard(process))
    for process in (first, second):
        tell(process, "end")
        process.wait(10)
    assert answers == [0, 719, 0]


def test_start_and_nvml_fail_too(machine: Machine) -> None:
    simulator.inject_error(machine.folder, "cuInit", 802)
    simulator.inject_error(machine.folder, "nvmlInitWithFlags", 9)
    simulator.inject_error(machine.folder, "nvmlDeviceGetMemoryInfo", 15)
    found = machine.run(
        """
import ctypes, json
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
card, memory = ctypes.c_void_p(), (ctypes.c_uint64 * 3)()
codes = [cuda.cuInit(0), cuda.cuInit(0), nvml.nvmlInit_v2(), nvml.nvmlInit_v2()]
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card))
print(json.dumps(codes + [nvml.nvmlDeviceGetMemoryInfo(card, memory) for _ in range(2)]))
"""
    )
    assert found == [802, 0, 9, 0, 15, 0]


def test_errors_are_replaced_and_taken_back(machine: Machine) -> None:
    simulator.inject_error(machine.folder, "cuMemAlloc_v2", 719)
    simulator.inject_error(machine.folder, "cuMemAlloc_v2", 2)
    simulator.inject_error(machine.folder, "cuMemFree_v2", 700)
    script = (
        CLIENT
        + "context()\np = cu.cuMemAlloc(MIB)\nq = ok(cu.cuMemAlloc(MIB))\nreport([code(p), code(cu.cuMemFree(q))])"
    )
    simulator.clear_errors(machine.folder, "cuMemFree_v2")
    assert machine.run(script) == [2, 0]
    simulator.inject_error(machine.folder, "cuMemAlloc_v2", 719)
    simulator.inject_error(machine.folder, "cuMemFree_v2", 700)
    simulator.clear_errors(machine.folder)
    assert machine.run(script) == [0, 0]
    for number in range(32):
        simulator.inject_error(machine.folder, f"cuEntry{number}", 1)
    with pytest.raises(OSError, match=r"No space"):
        simulator.inject_error(machine.folder, "cuOneMore", 1)
    for arguments in (("cuMemAlloc_v2", 0, 1), ("cuMemAlloc_v2", 1, 0), ("c" * 56, 1, 1)):
        with pytest.raises(ValueError, match=arguments[0]):
            simulator.inject_error(machine.folder, *arguments)
    assert machine.card().used < MIB
