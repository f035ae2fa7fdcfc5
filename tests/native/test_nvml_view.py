"""What nvidia-ml-py (and so nvidia-smi and similar tools) see from inside a slice."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preloaded import MIB, environment, python

PRELUDE = "from driver_client import *\nimport pynvml as n\nn.nvmlInit()\ncard = n.nvmlDeviceGetHandleByIndex(0)\n"
LIMIT = 1000 * MIB


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "region").mkdir()
    return environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m", VGPU_DIR=str(tmp_path / "region"))


def test_memory_agrees_with_the_driver_interface(env: dict[str, str]) -> None:
    """Case 26: totals of CUDA and NVML differ, and programs that compare them run out of memory."""
    script = """
start()
alloc(300 * MIB)
one, two = n.nvmlDeviceGetMemoryInfo(card), n.nvmlDeviceGetMemoryInfo(card, version=n.nvmlMemory_v2)
print(one.total, one.free, one.used)
print(two.total, two.free, two.used, two.reserved)
print(*info(), total_mem())
"""
    lines = python(PRELUDE + script, env)
    assert lines == [
        f"{LIMIT} {700 * MIB} {300 * MIB}",
        f"{LIMIT} {700 * MIB} {300 * MIB} 0",
        f"{700 * MIB} {LIMIT} {LIMIT}",
    ]


def test_processes_are_the_containers_own(tmp_path: Path, env: dict[str, str]) -> None:
    """Case 54: nvidia-smi shows no processes, or those of other containers."""
    (tmp_path / "other").mkdir()
    holder = "from driver_client import *\nstart()\nalloc({} * MIB)\nprint('ready')\ninput()"
    others = []
    for region, size in (("region", 100), ("other", 200)):
        other = subprocess.Popen(
            [sys.executable, "-uc", holder.format(size)],
            env=env | {"VGPU_DIR": str(tmp_path / region)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert other.stdout
        assert other.stdout.readline() == "ready\n"
        others.append(other)
    script = """
import os
start()
alloc(300 * MIB)
for query in (n.nvmlDeviceGetComputeRunningProcesses_v2, n.nvmlDeviceGetComputeRunningProcesses_v3):
    print(sorted((p.usedGpuMemory // MIB, p.pid == os.getpid() or p.pid) for p in query(card)))
print(n.nvmlDeviceGetGraphicsRunningProcesses(card), n.nvmlDeviceGetMPSComputeRunningProcesses(card))
"""
    lines = python(PRELUDE + script, env)
    expected = f"[(100, {others[0].pid}), (300, True)]"
    assert lines == [expected, expected, "[] []"]
    for other in others:
        other.communicate("\n", timeout=30)


def test_the_first_version_of_the_process_list_has_its_own_layout(env: dict[str, str]) -> None:
    script = """
import ctypes, os
start()
alloc(300 * MIB)
class V1(ctypes.Structure):
    _fields_ = [("pid", c_uint), ("used", c_ulonglong)]
lib = ctypes.CDLL("libnvidia-ml.so.1")
room, list_v1 = c_uint(0), (V1 * 4)()
print(lib.nvmlDeviceGetComputeRunningProcesses(card, byref(room), None), room.value)
room.value = 4
result, first = lib.nvmlDeviceGetComputeRunningProcesses(card, byref(room), list_v1), list_v1[0]
print(result, room.value, first.pid == os.getpid(), first.used // MIB)
"""
    assert python(PRELUDE + script, env) == ["7 1", "0 1 True 300"]


def test_utilisation_is_the_containers_own(env: dict[str, str]) -> None:
    script = """
import time
print(n.nvmlDeviceGetUtilizationRates(card).gpu)
start()
kernel = function("spin_5ms")
deadline = time.monotonic() + 30
while n.nvmlDeviceGetUtilizationRates(card).gpu < 20 and time.monotonic() < deadline:
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
mine = [s.pid == os.getpid() for s in n.nvmlDeviceGetProcessUtilization(card, 0)]
print(n.nvmlDeviceGetUtilizationRates(card).gpu >= 20, mine)
"""
    busy = (
        "from driver_client import *\nstart()\nk = function('spin_5ms')\nprint('ready')\n"
        "while True:\n    launch(k)\n    cu.cuCtxSynchronize()"
    )
    Path(env["VGPU_DIR"], "..", "other").mkdir()
    neighbour = subprocess.Popen(
        [sys.executable, "-uc", busy],
        env=env | {"VGPU_DIR": env["VGPU_DIR"] + "/../other"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert neighbour.stdout
        assert neighbour.stdout.readline() == "ready\n"
        assert python("import os\n" + PRELUDE + script, env) == ["0", "True [True]"]
    finally:
        neighbour.kill()
        neighbour.communicate()


@contextmanager
def neighbour(env: dict[str, str]) -> Iterator[int]:
    """A busy process of another container on the same card; yields its pid."""
    busy = (
        "from driver_client import *\nstart()\nalloc(200 * MIB)\nk = function('spin_5ms')\nlaunch(k)\nprint('ready')\n"
        "while True:\n    launch(k)\n    cu.cuCtxSynchronize()"
    )
    other = Path(env["VGPU_DIR"] + "-other")
    other.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-uc", busy], env=env | {"VGPU_DIR": str(other)}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


DETAILS = """
import ctypes, os, time
lib = ctypes.CDLL("libnvidia-ml.so.1")
class Listed(ctypes.Structure):
    _fields_ = n.c_nvmlProcessDetail_v1_t._fields_
class List(ctypes.Structure):
    _fields_ = [("version", c_uint), ("mode", c_uint), ("count", c_uint), ("array", ctypes.POINTER(Listed))]
def details(mode=0, room=8, version=None, device=card):
    version = version or ctypes.sizeof(List) | 1 << 24
    array = (Listed * 8)()
    asked = List(version, mode, room, array if room else None)
    code = lib.nvmlDeviceGetRunningProcessDetailList(device, byref(asked))
    return code, asked.count, [(p.pid == os.getpid(), p.usedGpuMemory // MIB) for p in array[:asked.count] if p.pid]
class Sample(ctypes.Structure):
    _fields_ = [("at", c_ulonglong)] + [(f, c_uint) for f in ("pid", "sm", "mem", "enc", "dec", "jpg", "ofa")]
class Samples(ctypes.Structure):
    _fields_ = [("version", c_uint), ("count", c_uint), ("seen", c_ulonglong), ("array", ctypes.POINTER(Sample))]
def samples(room=8, seen=0, version=None, device=card):
    version = version or ctypes.sizeof(Samples) | 1 << 24
    array = (Sample * 8)()
    asked = Samples(version, room, seen, array if room else None)
    code = lib.nvmlDeviceGetProcessesUtilizationInfo(device, byref(asked))
    return code, asked.count if code in (0, 7) else None, [p.pid == os.getpid() for p in array if p.pid]
"""


def test_the_detailed_list_is_the_containers_own(env: dict[str, str]) -> None:
    """Sizes and errors as nvml.h says: 7 with how many there are where room is short, modes without processes empty."""
    script = """
print(details(), details(room=0))
start()
alloc(300 * MIB)
print(details(), details(room=0), details(mode=3))
print(details(mode=1), details(mode=2), details(room=0, mode=1))
found = n.nvmlDeviceGetRunningProcessDetailList(card, ctypes.sizeof(List) | 1 << 24, 0)
print([(p.pid == os.getpid(), p.usedGpuMemory // MIB) for p in found])
"""
    with neighbour(env):
        assert python(PRELUDE + DETAILS + script, env) == [
            "(0, 0, []) (0, 0, [])",
            "(0, 1, [(True, 300)]) (7, 1, []) (0, 1, [(True, 300)])",
            "(0, 0, []) (0, 0, []) (0, 0, [])",
            "[(True, 300)]",
        ]


def test_newer_utilisation_is_the_containers_own(env: dict[str, str]) -> None:
    script = """
def card_samples():
    return [s.sampleValue.uiVal for s in n.nvmlDeviceGetSamples(card, n.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]]
start()
alloc(MIB)
print(samples(), samples(room=0), card_samples())
kernel = function("spin_5ms")
deadline = time.monotonic() + 60
while samples()[0] != 0 and time.monotonic() < deadline:
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
print(samples(), samples(room=0), samples(seen=1 << 62))
print([s.pid == os.getpid() for s in n.nvmlDeviceGetProcessesUtilizationInfo(card, 0)])
"""
    with neighbour(env):
        assert python(PRELUDE + DETAILS + script, env) == [
            "(6, None, []) (6, None, []) [0]",
            "(0, 1, [True]) (7, 1, []) (6, None, [])",
            "[True]",
        ]


def test_structures_of_other_versions_get_the_drivers_own_answer(tmp_path: Path, env: dict[str, str]) -> None:
    script = (
        PRELUDE
        + DETAILS
        + """
print(details(version=7), details(device=None), details(mode=4), lib.nvmlDeviceGetRunningProcessDetailList(card, None))
print(samples(version=7), samples(device=None), lib.nvmlDeviceGetProcessesUtilizationInfo(card, None))
"""
    )
    assert python(script, env) == python(script, environment(tmp_path, preload=False))


def test_cards_and_names_are_untouched(tmp_path: Path, env: dict[str, str]) -> None:
    script = (
        "print(n.nvmlDeviceGetCount(), n.nvmlDeviceGetName(card), n.nvmlDeviceGetUUID(card))\n"
        "print(n.nvmlSystemGetDriverVersion())"
    )
    assert python(PRELUDE + script, env) == python(PRELUDE + script, environment(tmp_path, preload=False))


def test_arguments_that_make_no_sense_get_the_drivers_own_answer(tmp_path: Path, env: dict[str, str]) -> None:
    script = (
        PRELUDE
        + """
import ctypes
lib = ctypes.CDLL("libnvidia-ml.so.1")
print(lib.nvmlDeviceGetMemoryInfo(card, None), lib.nvmlDeviceGetMemoryInfo(None, byref((c_ulonglong * 3)())))
print(lib.nvmlDeviceGetMemoryInfo_v2(card, None), lib.nvmlDeviceGetMemoryInfo_v2(card, byref((c_ulonglong * 5)())))
print(lib.nvmlDeviceGetComputeRunningProcesses_v3(card, None, None))
print(lib.nvmlDeviceGetComputeRunningProcesses_v3(None, byref(c_uint(0)), None))
print(lib.nvmlDeviceGetUtilizationRates(card, None), lib.nvmlDeviceGetUtilizationRates(None, None))
n.nvmlShutdown()
print(lib.nvmlDeviceGetMemoryInfo(card, byref((c_ulonglong * 3)())))
print(lib.nvmlDeviceGetComputeRunningProcesses(card, byref(c_uint(0)), None))
"""
    )
    assert python(script, env) == python(script, environment(tmp_path, preload=False))


@pytest.mark.parametrize("visible", ["1", "1,0", "0"])
def test_cards_keep_their_accounts_however_they_are_numbered(tmp_path: Path, visible: str) -> None:
    (tmp_path / "region").mkdir()
    env = environment(tmp_path, cards="T4x2", VGPU_DIR=str(tmp_path / "region"), CUDA_VISIBLE_DEVICES=visible)
    env |= {"CUDA_DEVICE_MEMORY_LIMIT_0": "1000m", "CUDA_DEVICE_MEMORY_LIMIT_1": "500m"}
    script = (
        PRELUDE
        + """
start()
first = alloc(100 * MIB)[0]
cards = [n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(i)) for i in range(2)]
print(first, info()[1] // MIB, used() // MIB, [(c.total // MIB, c.used // MIB) for c in cards])
"""
    )
    first = int(visible[0])
    expected = [(1000, 100 if first == 0 else 0), (500, 100 if first == 1 else 0)]
    assert python(script, env) == [f"0 {1000 if first == 0 else 500} 100 {expected}"]


def test_nvml_comes_first_and_the_driver_interface_never(env: dict[str, str]) -> None:
    script = "import pynvml as n\nn.nvmlInit()\nprint(n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total)"
    assert python(script, env | {"VGPU_DIR": ""}) == [str(LIMIT)]
    assert not os.path.exists(Path(env["VGPU_DIR"]) / "limits")
