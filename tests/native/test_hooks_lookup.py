"""cuGetProcAddress: every version and stream meaning leads to the hook of the same interface; the rest is untouched."""

import os
import subprocess
from pathlib import Path

import pytest
from preloaded import MIB, environment, python, run

from vgpu.native import Region

LIBVGPU = Path(__file__).resolve().parents[2] / "libvgpu"
PRELUDE = """
from driver_client import *
import ctypes

def lookup(name, version, flags=0, entry="cuGetProcAddress_v2"):
    found, status = c_void_p(), c_int(-1)
    if entry == "cuGetProcAddress":
        result = cu.cuGetProcAddress(name.encode(), byref(found), version, c_uint64(flags))
    else:
        result = cu.cuGetProcAddress_v2(name.encode(), byref(found), version, c_uint64(flags), byref(status))
    return result, status.value, found.value

class Info(Structure):
    _fields_ = [("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p)]

def where(address):
    info = Info()
    if not address or not ctypes.CDLL(None).dladdr(c_void_p(address), byref(info)):
        return "-"
    return info.file.decode().split("/")[-1] + ":" + (info.symbol or b"?").decode()
"""

VERSIONS = [
    ("cuMemAlloc", 12000, 0, "cuMemAlloc_v2"),
    ("cuMemFree", 12000, 0, "cuMemFree_v2"),
    ("cuCtxCreate", 11000, 0, "cuCtxCreate_v2"),
    ("cuCtxCreate", 12000, 0, "cuCtxCreate_v3"),
    ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
    ("cuLaunchKernel", 12000, 0, "cuLaunchKernel"),
    ("cuLaunchKernel", 12000, 1, "cuLaunchKernel"),
    ("cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz"),
    ("cuMemAllocAsync", 12000, 2, "cuMemAllocAsync_ptsz"),
    ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
    ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
    ("cuDevicePrimaryCtxRelease", 12000, 0, "cuDevicePrimaryCtxRelease_v2"),
]


@pytest.mark.parametrize(("name", "version", "flags", "symbol"), VERSIONS)
def test_the_hook_of_the_drivers_answer(name: str, version: int, flags: int, symbol: str, tmp_path: Path) -> None:
    """Case 68: cuGetProcAddress_v2 and stream-ordered allocation are not covered."""
    script = (
        PRELUDE + f"result, status, found = lookup({name!r}, {version}, {flags})\nprint(result, status, where(found))"
    )
    assert python(script, environment(tmp_path)) == [f"0 0 libvgpu.so:{symbol}"]
    assert python(script, environment(tmp_path, preload=False)) == [f"0 0 libcuda.so.1:{symbol}"]


def test_what_is_not_hooked_is_passed_through_with_its_status(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
for name, version in (("cuDeviceGet", 12000), ("cuMemAdvise", 11000), ("cuNoSuchThing", 12000), ("cuMemAlloc", 1000),
                      ("cuMemAllocAsync", 9000), ("", 12000), ("cudnnCreate", 12000)):
    result, status, found = lookup(name, version)
    print(name, result, status, where(found))
print(cu.cuGetProcAddress_v2(None, None, 12000, c_uint64(0), None))
print(cu.cuGetProcAddress_v2(b"cuInit", None, 12000, c_uint64(0), None))
print(cu.cuGetProcAddress(b"cuInit", None, 12000, c_uint64(0)), cu.cuGetExportTable(byref(c_void_p()), bytes(16)))
"""
    )
    assert python(script, environment(tmp_path)) == python(script, environment(tmp_path, preload=False))


def test_no_answer_of_the_driver_is_a_hole(tmp_path: Path) -> None:
    (tmp_path / "region").mkdir()
    script = (
        PRELUDE
        + """
cu.cuInit(0)
for version in (11000, 12000, 12050, 13000, 13050):
    for name in ("cuMemAlloc", "cuCtxCreate", "cuLaunchKernelEx", "cuGraphLaunch", "cuStreamBeginCapture",
                 "cuMemAllocFromPoolAsync"):
        for flags in (0, 1, 2):
            lookup(name, version, flags)
start()
"""
    )
    python(script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1g", VGPU_DIR=str(tmp_path / "region")))
    with Region.open(tmp_path / "region") as region:
        assert region.usage().unhooked == 0


def test_a_program_that_has_only_cuGetProcAddress_is_limited(tmp_path: Path) -> None:
    """Case 63: a runtime that gets every function from the driver bypasses the limit."""
    script = (
        PRELUDE
        + """
start()
allocate = ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)(lookup("cuMemAlloc", 13000)[2])
p = c_uint64()
print(allocate(ctypes.addressof(p), 501 * MIB), allocate(ctypes.addressof(p), 500 * MIB))
"""
    )
    assert python(script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m")) == ["2 0"]


def test_cuda_bindings_are_limited(tmp_path: Path) -> None:
    """Case 69: a runtime that never calls dlsym for the functions it uses crashes."""
    script = """
from cuda.bindings import driver as d
MIB = 1 << 20
def ok(answer):
    assert answer[0] == d.CUresult.CUDA_SUCCESS, answer
    return answer[1] if len(answer) == 2 else answer[1:]
ok(d.cuInit(0))
device = ok(d.cuDeviceGet(0))
context = ok(d.cuDevicePrimaryCtxRetain(device))
ok(d.cuCtxSetCurrent(context))
stream = ok(d.cuStreamCreate(0))
pointer = ok(d.cuMemAlloc(400 * MIB))
print(int(d.cuMemAlloc(100 * MIB + 1)[0]), ok(d.cuMemGetInfo()), ok(d.cuDeviceTotalMem(device)))
ordered = ok(d.cuMemAllocAsync(64 * MIB, stream))
print(int(d.cuMemAllocAsync(100 * MIB, stream)[0]))
ok(d.cuMemFreeAsync(ordered, stream))
ok(d.cuStreamSynchronize(stream))
text = b".version 7.0\\n.target sm_75\\n.address_size 64\\n.visible .entry spin_1ms()\\n{ ret; }\\n"
kernel = ok(d.cuModuleGetFunction(ok(d.cuModuleLoadData(text)), b"spin_1ms"))
ok(d.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, None, 0))
ok(d.cuStreamSynchronize(stream))
ok(d.cuMemFree(pointer))
print(ok(d.cuMemGetInfo()))
"""
    lines = python(script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m"))
    assert lines == [f"2 ({100 * MIB}, {500 * MIB}) {500 * MIB}", "2", f"({500 * MIB}, {500 * MIB})"]


def test_no_other_thread_sees_an_address_before_its_hook(tmp_path: Path) -> None:
    """cuGetProcAddress would hand the driver's own function out, once."""
    program = tmp_path / "race"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{LIBVGPU / 'src'}"]
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, *flags, "-o", program, LIBVGPU / "tests/address_race.c"], check=True)
    assert run([program], os.environ).stdout == "looked, 0 wrong\n"
