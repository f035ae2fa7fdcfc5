"""Every way to allocate and free device memory: what is granted, refused, told and given back."""

import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import MIB, environment, python

PRELUDE = "from driver_client import *\n"
LIMIT = 1000 * MIB


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="1000m")


def test_exact_fit_is_granted_and_one_byte_more_refused(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
start()
print(alloc(1000 * MIB + 1)[0])
status, pointer = alloc(1000 * MIB)
print(status, info()[0], alloc(1)[0])
print(free(pointer), info()[0] // MIB, alloc(1000 * MIB)[0])
""",
        env,
    )
    assert lines == ["2", "0 0 2", "0 1000 0"]


def test_what_the_driver_would_refuse_is_refused_for_its_reason(tmp_path: Path, env: dict[str, str]) -> None:
    script = (
        PRELUDE
        + """
made = byref(c_void_p())
def tried(device):
    return (cu.cuCtxCreate_v2(made, 0, device), cu.cuDevicePrimaryCtxRetain(made, device), alloc_async(16, 0x1234)[0],
            alloc_async(16, 0)[0])
print(*tried(0))
ok(cu.cuInit(0))
print(*tried(5))
start()
print(*tried(-1))
"""
    )
    assert (
        python(script, env)
        == python(script, environment(tmp_path, preload=False))
        == ["3 3 3 3", "101 101 201 201", "101 101 400 0"]
    )


def test_all_queries_tell_the_limit(env: dict[str, str]) -> None:
    lines = python(PRELUDE + "start()\nalloc(100 * MIB)\nprint(*info(), total_mem())", env)
    assert lines == [f"{900 * MIB} {LIMIT} {LIMIT}"]


def test_a_limit_above_the_card_does_not_show_more_than_the_card(tmp_path: Path) -> None:
    bare = python(PRELUDE + "start()\nprint(info()[1])", environment(tmp_path, preload=False))
    lines = python(PRELUDE + "start()\nprint(info()[1])", environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="900g"))
    assert lines == bare


def test_without_limits_nothing_changes(tmp_path: Path) -> None:
    script = PRELUDE + "start()\nprint(alloc(5000 * MIB)[0], *info(), total_mem())"
    assert python(script, environment(tmp_path)) == python(script, environment(tmp_path, preload=False))


ALLOCATORS = {
    "cuMemAlloc": "alloc(640 * MIB)",
    "cuMemAllocManaged": "(cu.cuMemAllocManaged(byref(p), c_size_t(640 * MIB), 1), p.value)",
    "cuMemAllocPitch": "(cu.cuMemAllocPitch_v2(byref(p), byref(n), c_size_t(MIB), c_size_t(640), 16), p.value)",
    "cuMemAllocAsync": "alloc_async(640 * MIB)",
    "cuMemAllocFromPoolAsync": "(cu.cuMemAllocFromPoolAsync(byref(p), c_size_t(640 * MIB), the_pool, None), p.value)",
    "cuMemCreate": "create(640 * MIB)",
    "cuArrayCreate": "(cu.cuArrayCreate_v2(byref(p), byref(ArrayDescriptor(32768, 20480, UINT8, 1))), p.value)",
    "cuArray3DCreate": "(cu.cuArray3DCreate_v2(byref(p), byref(Array3DDescriptor(8192, 8192, 10, 1, 1, 0))), p.value)",
}
FREES = {
    "cuMemCreate": "release(pointer)",
    "cuArrayCreate": "cu.cuArrayDestroy(c_void_p(pointer))",
    "cuArray3DCreate": "cu.cuArrayDestroy(c_void_p(pointer))",
    "cuMemAllocAsync": "free_async(pointer) or cu.cuStreamSynchronize(None)",
    "cuMemAllocFromPoolAsync": "free_async(pointer) or cu.cuStreamSynchronize(None)",
}


@pytest.mark.parametrize("family", ALLOCATORS)
def test_every_family_is_charged_refused_and_given_back(env: dict[str, str], family: str) -> None:
    """Cases 12, 70: memory of own pools and of cuMemCreate is not counted, or its free takes the count below zero."""
    lines = python(
        PRELUDE
        + f"""
start()
the_pool, p, n = pool(), c_uint64(), c_size_t()
status, pointer = {ALLOCATORS[family]}
print(status, used() // MIB, {ALLOCATORS[family]}[0])
print({FREES.get(family, "free(pointer)")}, used())
print({ALLOCATORS[family]}[0])
""",
        env,
    )
    assert lines == ["0 640 2", "0 0", "0"]


def test_any_legal_free_of_a_pointer_works(env: dict[str, str]) -> None:
    """Case 15: cuMemFree of a stream-ordered pointer takes the count below zero, or leaks."""
    lines = python(
        PRELUDE
        + """
start()
status, pointer = alloc_async(64 * MIB)
print(status, free(pointer), cu.cuStreamSynchronize(None), used())
status, pointer = alloc(64 * MIB)
print(status, used() // MIB, free(pointer), used())
""",
        env,
    )
    assert lines == ["0 0 0 0", "0 64 0 0"]


def test_many_stream_ordered_allocations_never_leak_charge(env: dict[str, str]) -> None:
    """Case 13: false out-of-memory after many stream-ordered allocations and frees."""
    lines = python(
        PRELUDE
        + """
start()
failed = 0
for i in range(200):
    status, pointer = alloc_async(64 * MIB)
    failed += status != 0
    failed += free_async(pointer) != 0
ok(cu.cuCtxSynchronize())
print(failed, used() <= 128 * MIB)
""",
        env,
    )
    assert lines == ["0 True"]


def test_a_pool_that_keeps_its_memory_is_charged_for_it_until_the_room_is_needed(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
start()
keep = c_uint64(2**64 - 1)
default = c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(byref(default), 0))
ok(cu.cuMemPoolSetAttribute(default, 4, byref(keep)))
status, pointer = alloc_async(800 * MIB)
ok(free_async(pointer))
ok(cu.cuCtxSynchronize())
print(used() // MIB)
print(alloc(600 * MIB)[0], used() // MIB)
""",
        env,
    )
    assert lines == ["800", "0 600"]


def test_a_free_debits_the_card_of_the_block(tmp_path: Path) -> None:
    """Cases 10, 11: memory freed while the other card is current is subtracted from that card, even below zero."""
    env = environment(tmp_path, cards="T4x2", CUDA_DEVICE_MEMORY_LIMIT="1000m", VGPU_DIR=str(tmp_path / "region"))
    (tmp_path / "region").mkdir()
    lines = python(
        PRELUDE
        + """
ok(cu.cuInit(0))
first, second = context(0), context(1)
ok(cu.cuCtxSetCurrent(first))
plain, ordered = alloc(100 * MIB)[1], alloc_async(200 * MIB)[1]
ok(cu.cuCtxSetCurrent(second))
print(used(), free(plain), free_async(ordered), used())
ok(cu.cuCtxSetCurrent(first))
ok(cu.cuCtxSynchronize())
print(used())
""",
        env,
    )
    assert lines == ["0 0 0 0", "0"]


def test_only_device_memory_of_cuMemCreate_is_charged(env: dict[str, str]) -> None:
    """Case 19: memory of the host is charged to the device number that happens to lie in memory."""
    lines = python(
        PRELUDE
        + """
start()
for kind in (2, 3):
    status, handle = create(64 * MIB, kind)
    print(used())
print(create(64 * MIB)[0], used() // MIB, cu.cuMemCreate(None, c_size_t(0), None, c_ulonglong(0)) != 0)
""",
        env,
    )
    assert lines == ["0", "0", "0 64 True"]


def test_a_block_is_charged_until_it_is_released_and_unmapped(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
start()
address = reserve(128 * MIB)
first, second = create(64 * MIB)[1], create(64 * MIB)[1]
ok(map_block(address, 64 * MIB, first))
ok(map_block(address + 64 * MIB, 64 * MIB, second))
ok(release(first))
print(used() // MIB)
print(unmap(address, 128 * MIB), used() // MIB)
print(release(second), used() // MIB)
""",
        env,
    )
    assert lines == ["128", "0 64", "0 0"]


def test_a_retained_handle_keeps_the_charge(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
start()
address = reserve(64 * MIB)
handle = create(64 * MIB)[1]
ok(map_block(address, 64 * MIB, handle))
ok(release(handle))
again = c_ulonglong()
ok(cu.cuMemRetainAllocationHandle(byref(again), c_void_p(address)))
ok(unmap(address, 64 * MIB))
print(used() // MIB)
print(release(again.value), used() // MIB)
""",
        env,
    )
    assert lines == ["64", "0 0"]


def test_a_destroyed_context_takes_its_memory_along(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
first = start()
alloc(300 * MIB)
second = context()
alloc(200 * MIB)
print(used() // MIB)
ok(cu.cuCtxDestroy_v2(second))
ok(cu.cuCtxSetCurrent(first))
print(used() // MIB)
""",
        env,
    )
    assert lines == ["500", "300"]


def test_a_reset_primary_context_takes_its_memory_along(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
ok(cu.cuInit(0))
primary = c_void_p()
for _ in range(2):
    ok(cu.cuDevicePrimaryCtxRetain(byref(primary), 0))
    ok(cu.cuCtxSetCurrent(primary))
    print(alloc(900 * MIB)[0], used() // MIB)
    ok(cu.cuDevicePrimaryCtxReset_v2(0))
""",
        env,
    )
    assert lines == ["0 900", "0 900"]


def test_arguments_that_make_no_sense_get_the_drivers_own_answer(tmp_path: Path) -> None:
    """Cases 18, 75: NULL results and descriptors crash the library."""
    script = (
        PRELUDE
        + """
p = c_uint64()
print(cu.cuMemAlloc_v2(byref(p), c_size_t(1)), cu.cuMemGetInfo_v2(None, None))
start()
n = c_size_t()
print(cu.cuMemAlloc_v2(None, c_size_t(1)), cu.cuMemAlloc_v2(byref(p), c_size_t(0)), cu.cuMemAlloc_v2(None, c_size_t(0)))
print(cu.cuMemAllocAsync(None, c_size_t(1), None), cu.cuMemAllocFromPoolAsync(byref(p), c_size_t(1), None, None))
print(cu.cuMemAllocPitch_v2(None, None, c_size_t(1), c_size_t(1), 4), cu.cuMemAllocManaged(None, c_size_t(1), 1))
print(cu.cuMemGetInfo_v2(None, None), cu.cuMemGetInfo_v2(None, byref(n)), cu.cuMemGetInfo_v2(byref(n), None))
print(free(0), free(12345), free_async(12345), cu.cuDeviceTotalMem_v2(None, 0), cu.cuDeviceTotalMem_v2(byref(n), 77))
print(cu.cuArrayCreate_v2(byref(p), None), cu.cuArrayCreate_v2(None, None), cu.cuArrayDestroy(None))
print(cu.cuMemCreate(None, c_size_t(0), None, c_ulonglong(0)), release(4242), unmap(0, 0))
print(cu.cuCtxCreate_v2(None, 0, 0), cu.cuCtxDestroy_v2(None), cu.cuDevicePrimaryCtxRetain(None, 0))
print(cu.cuDevicePrimaryCtxRelease_v2(99), cu.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, None, None, None))
print(cu.cuLaunchKernelEx(None, None, None, None), cu.cuMemPoolDestroy(None), cu.cuMemPoolCreate(None, None))
"""
    )
    bare = python(script, environment(tmp_path, preload=False))
    assert python(script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m")) == bare


def test_two_containers_on_one_card_see_only_their_own(tmp_path: Path) -> None:
    script = PRELUDE + "start()\nprint(used() // MIB, alloc(700 * MIB)[0], used() // MIB, alloc(400 * MIB)[0])\ninput()"
    clients = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m", VGPU_DIR=str(tmp_path / name))
        clients.append(
            subprocess.Popen(
                [sys.executable, "-uc", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        assert clients[-1].stdout
        assert clients[-1].stdout.readline() == "0 0 700 2\n"
    for client in clients:
        client.communicate("\n", timeout=30)
        assert client.returncode == 0


def test_a_refused_free_keeps_the_charge(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
mine = start()
pointer, handle = alloc(100 * MIB)[1], create(50 * MIB)[1]
ok(cu.cuCtxSetCurrent(None))
print(free_async(pointer) != 0)
ok(cu.cuCtxSetCurrent(mine))
print(used() // MIB, free(pointer), used() // MIB, release(handle), release(handle) != 0, used())
""",
        env,
    )
    assert lines == ["True", "150 0 50 0 True 0"]


def test_memory_from_outside_is_paid_by_whoever_imports_it(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
import os
from ctypes import *
class Handle(Union):
    _fields_ = [("fd", c_int), ("pair", c_void_p * 2)]
class Description(Structure):
    _fields_ = [("type", c_int), ("handle", Handle), ("size", c_uint64), ("flags", c_uint), ("reserved", c_uint * 16)]
def take(mib):
    file = os.memfd_create("outside")
    os.ftruncate(file, mib << 20)
    description, memory = Description(type=1, size=mib << 20), c_void_p()
    description.handle.fd = file
    return cu.cuImportExternalMemory(byref(memory), byref(description)), memory
start()
status, memory = take(600)
print(status, info()[0] // 1048576, take(401)[0], take(400)[0], info()[0])
print(cu.cuDestroyExternalMemory(memory), info()[0] // 1048576, cu.cuImportExternalMemory(None, None))
""",
        env,
    )
    assert lines == ["0 400 2 0 0", "0 600 1"]


EXTERNAL = """
import os
from ctypes import *
class Handle(Union):
    _fields_ = [("fd", c_int), ("pair", c_void_p * 2)]
class Description(Structure):
    _fields_ = [("type", c_int), ("handle", Handle), ("size", c_uint64), ("flags", c_uint), ("reserved", c_uint * 16)]
class Buffer(Structure):
    _fields_ = [("offset", c_uint64), ("size", c_uint64), ("flags", c_uint), ("reserved", c_uint * 16)]
def take(mib):
    file = os.memfd_create("outside")
    os.ftruncate(file, mib << 20)
    description, memory = Description(type=1, size=mib << 20), c_void_p()
    description.handle.fd = file
    return cu.cuImportExternalMemory(byref(memory), byref(description)), memory
def part(memory, offset, mib):
    pointer = c_uint64()
    status = cu.cuExternalMemoryGetMappedBuffer(byref(pointer), memory, byref(Buffer(offset << 20, mib << 20)))
    return status, pointer.value
def room():
    return info()[0] // 1048576
"""


def test_memory_from_outside_is_paid_until_its_last_buffer_is_gone(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + EXTERNAL
        + """
start()
memory = take(600)[1]
first, second, wrong = part(memory, 0, 100), part(memory, 100, 500), part(memory, 500, 101)
print(first[0], second[0], wrong[0], room())
print(cu.cuDestroyExternalMemory(memory), room(), take(401)[0], part(memory, 0, 1)[0])
print(free(second[1]), room(), take(401)[0])
print(free(first[1]), room(), free(first[1]), take(1000)[0])
""",
        env,
    )
    assert lines == ["0 0 1 400", "0 400 2 400", "0 400 2", "0 1000 1 0"]


def test_a_context_takes_imported_memory_and_its_buffers_along(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + EXTERNAL
        + """
start()
own = c_void_p()
ok(cu.cuCtxCreate_v2(byref(own), 0, 0))
alive, destroyed = take(300)[1], take(200)[1]
print(part(alive, 0, 100)[0], part(destroyed, 0, 100)[0], cu.cuDestroyExternalMemory(destroyed), room())
print(cu.cuCtxDestroy_v2(own))
start()
print(room(), used())
""",
        env,
    )
    assert lines == ["0 0 0 500", "0", "1000 0"]
