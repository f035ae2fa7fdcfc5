"""Reported bugs of intercept libraries about versions of an entry point: the wrong one is called, or none."""

from pathlib import Path

import pytest
from cases_slice import slice_of
from preloaded import environment, python

DRIVERS = ("11.8", "12.4", "13.0")
PRELUDE = """
from driver_client import *
import ctypes
from ctypes import CFUNCTYPE

class Info(Structure):
    _fields_ = [("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p)]

def symbol(address):
    info = Info()
    found = address and ctypes.CDLL(None).dladdr(c_void_p(address), byref(info))
    return (info.symbol or b"?").decode() if found else "-"

def lookup(name, version, flags=0):
    found = c_void_p()
    cu.cuGetProcAddress(name.encode(), byref(found), version, c_uint64(flags))
    return found.value

def answered(name, version, *types, flags=0):
    return CFUNCTYPE(c_int, *types)(lookup(name, version, flags))
"""


def both(folder: Path, script: str, cards: str, **variables: str) -> list[str]:
    """What a script prints inside a slice, which has to be what it prints without the library."""
    limited = python(PRELUDE + script, slice_of(folder, cards=cards, **variables))
    assert limited == python(PRELUDE + script, environment(folder, cards=cards, preload=False))
    return limited


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_version_of_context_creation_is_called_by_its_own_interface(tmp_path: Path, driver: str) -> None:
    """Case 41: a program for CUDA 12.0 gets the newest cuCtxCreate, and its arguments land in the wrong places."""
    script = """
ok(cu.cuInit(0))
made, where, flags = c_void_p(), c_int(-1), c_uint()
for version in (3020, 11000, 11040, 12000, 12050, 13000):
    address = lookup("cuCtxCreate", version)
    name = symbol(address)
    before = {"cuCtxCreate_v3": (c_void_p, c_int), "cuCtxCreate_v4": (c_void_p,)}.get(name, ())
    if address:
        create = CFUNCTYPE(c_int, c_void_p, *before, c_uint, c_int)(address)
        ok(create(ctypes.addressof(made), *[None, 0][: len(before)], 8, 1))
        ok(cu.cuCtxGetDevice(byref(where)))
        ok(cu.cuCtxGetFlags(byref(flags)))
        ok(cu.cuCtxDestroy_v2(made))
    print(version, name, where.value, flags.value)
"""
    lines = both(tmp_path, script, f"T4x2@{driver}")
    assert lines[1] == "11000 cuCtxCreate_v2 1 8"
    assert lines[2] == "11040 cuCtxCreate_v3 1 8"
    if driver == "13.0":
        assert lines[-1] == "13000 cuCtxCreate_v4 1 8"


@pytest.mark.parametrize("driver", DRIVERS)
def test_each_version_of_other_calls_keeps_its_arguments(tmp_path: Path, driver: str) -> None:
    """Case 41, another of its kind: captures, releases and queries of which there are several versions."""
    script = """
ok(cu.cuInit(0))
primary, stream, graph = c_void_p(), c_void_p(), c_void_p()
for version in (7000, 11000, 13000):
    release = lookup("cuDevicePrimaryCtxRelease", version)
    ok(cu.cuDevicePrimaryCtxRetain(byref(primary), 0))
    print(symbol(release), CFUNCTYPE(c_int, c_int)(release)(0) if release else None)
start()
ok(cu.cuStreamCreate(byref(stream), 1))
for version, arguments in ((10000, ()), (10010, (2,)), (12030, (2,))):
    begin = lookup("cuStreamBeginCapture", version)
    if not begin:
        continue
    print(symbol(begin), CFUNCTYPE(c_int, c_void_p, *[c_int] * len(arguments))(begin)(stream, *arguments))
    end = lookup("cuStreamEndCapture", version)
    print(symbol(end), CFUNCTYPE(c_int, c_void_p, c_void_p)(end)(stream, ctypes.addressof(graph)))
for version in (2000, 3020, 12000):
    total = lookup("cuDeviceTotalMem", version)
    print(symbol(total), total and CFUNCTYPE(c_int, c_void_p, c_int)(total)(ctypes.addressof(c_uint64()), 0))
"""
    lines = both(tmp_path, script, f"T4@{driver}")
    assert lines[3] == "cuStreamBeginCapture 0"
    assert lines[5] == "cuStreamBeginCapture_v2 0"


@pytest.mark.parametrize("driver", DRIVERS)
def test_advice_and_prefetch_take_what_their_version_says(tmp_path: Path, driver: str) -> None:
    """Case 42: cuMemAdvise and cuMemPrefetchAsync for CUDA 12.0 take a device, later ones a location by value."""
    script = """
start()
p = c_uint64()
ok(cu.cuMemAllocManaged(byref(p), c_size_t(64 * MIB), 1))
for version in (8000, 12000, 12020, 13000):
    advise, prefetch = lookup("cuMemAdvise", version), lookup("cuMemPrefetchAsync", version)
    where = Location if symbol(advise).endswith("_v2") else c_int
    target = Location(1, 0) if where is Location else 0
    print(version, symbol(advise), symbol(prefetch))
    if advise:
        print(CFUNCTYPE(c_int, c_uint64, c_size_t, c_int, where)(advise)(p.value, 64 * MIB, 3, target))
    if prefetch and where is Location:
        print(CFUNCTYPE(c_int, c_uint64, c_size_t, where, c_uint, c_void_p)(prefetch)(p.value, MIB, target, 0, None))
    elif prefetch:
        print(CFUNCTYPE(c_int, c_uint64, c_size_t, where, c_void_p)(prefetch)(p.value, MIB, target, None))
print(free(p.value))
"""
    lines = both(tmp_path, script, f"T4@{driver}")
    assert lines[3] == "12000 cuMemAdvise cuMemPrefetchAsync" or driver == "11.8"
    assert lines[-1] == "0"


def test_memory_advice_in_per_thread_form(tmp_path: Path) -> None:
    """Case 42, another of its kind: the same two questions with the flag for per-thread streams."""
    script = """
for name in ("cuMemPrefetchAsync", "cuMemAdvise", "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuStreamSynchronize"):
    print(name, [symbol(lookup(name, version, flags)) for version in (8000, 12000, 13000) for flags in (0, 1, 2)])
"""
    lines = both(tmp_path, script, "T4")
    assert "cuMemPrefetchAsync_ptsz" in lines[0]


PER_THREAD = 2  # CU_STREAM_PER_THREAD; also CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM


def test_a_launch_with_the_per_thread_flag_reaches_the_per_thread_stream(tmp_path: Path) -> None:
    """Case 44: the flag is lost, and the launch lands in the legacy stream; here a capture shows its stream."""
    script = f"""
start()
kernel, graph, count = function("k_100us"), c_void_p(), c_size_t()
for flags in (0, 1, {PER_THREAD}):
    run = answered("cuLaunchKernel", 12000, c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p, flags=flags)
    ok(cu.cuStreamBeginCapture_v2(c_void_p({PER_THREAD}), 2))
    result = run(kernel.value, 1, 1, 1, 32, 1, 1, 0, None, None, None)
    ended = cu.cuStreamEndCapture(c_void_p({PER_THREAD}), byref(graph))
    count.value = 0
    if ended == 0:
        ok(cu.cuGraphGetNodes(graph, None, byref(count)))
    print(flags, result == 0 and ended == 0 and count.value)
    ok(cu.cuCtxSynchronize())
"""
    assert both(tmp_path, script, "T4")[-1] == f"{PER_THREAD} 1"


def test_allocations_with_the_per_thread_flag_reach_the_per_thread_stream(tmp_path: Path) -> None:
    """Case 44, another of its kind: stream-ordered allocation and free, which are also limited in that form."""
    script = f"""
start()
graph, count, p = c_void_p(), c_size_t(), c_uint64()
allocate = answered("cuMemAllocAsync", 12000, c_void_p, c_size_t, c_void_p, flags={PER_THREAD})
give_back = answered("cuMemFreeAsync", 12000, c_uint64, c_void_p, flags={PER_THREAD})
ok(cu.cuStreamBeginCapture_v2(c_void_p({PER_THREAD}), 2))
ok(allocate(ctypes.addressof(p), 16 * MIB, None) or give_back(p.value, None))
ok(cu.cuStreamEndCapture(c_void_p({PER_THREAD}), byref(graph)))
ok(cu.cuGraphGetNodes(graph, None, byref(count)))
print(count.value)
"""
    assert both(tmp_path, script, "T4") == ["2"]
    script += """
print(allocate(ctypes.addressof(p), 1001 * MIB, None), allocate(ctypes.addressof(p), 992 * MIB, None))
print(give_back(p.value, None), cu.cuCtxSynchronize(), used())
"""
    assert python(PRELUDE + script, slice_of(tmp_path, "second")) == ["2", "2 0", "0 0 0"]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_program_with_entry_points_from_the_driver_alone_is_limited(tmp_path: Path, driver: str) -> None:
    """Cases 63, 68, 69, another of their kind: one dlsym, then everything by the looked-up look-up, on every driver."""
    script = """
start()
ask = answered("cuGetProcAddress", 11030, c_char_p, c_void_p, c_int, c_uint64)

def by(name, *types, version=11080):
    found = c_void_p()
    ok(ask(name.encode(), ctypes.addressof(found), version, 0))
    return CFUNCTYPE(c_int, *types)(found.value)

p, at = c_uint64(), ctypes.addressof
allocate, ordered = by("cuMemAlloc", c_void_p, c_size_t), by("cuMemAllocAsync", c_void_p, c_size_t, c_void_p)
array = by("cuArrayCreate", c_void_p, c_void_p)
shape = ArrayDescriptor(32768, 32769, UINT8, 1)
print(allocate(at(p), 1001 * MIB), ordered(at(p), 1001 * MIB, None), array(at(p), at(shape)))
print(allocate(at(p), 400 * MIB), ordered(at(p), 384 * MIB, None), used() // MIB, allocate(at(p), 217 * MIB))
"""
    assert python(PRELUDE + script, slice_of(tmp_path, cards=f"T4@{driver}")) == ["2 2 2", "0 0 784 2"]


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_driver_version_is_limited(tmp_path: Path, driver: str) -> None:
    """Case 64, another of its kind: drivers older and newer than the toolkit that the library was made with."""
    script = """
start()
version = c_int()
ok(cu.cuDriverGetVersion(byref(version)))
print(version.value, alloc(1001 * MIB)[0], alloc(1000 * MIB)[0], info()[1] // MIB)
"""
    number = int(driver.split(".")[0]) * 1000 + int(driver.split(".")[1]) * 10
    assert python(PRELUDE + script, slice_of(tmp_path, cards=f"T4@{driver}")) == [f"{number} 2 0 1000"]
