"""Reported bugs of intercept libraries about memory: what is charged, where, and that it comes back."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases_slice import slice_of
from preloaded import environment, python

from vgpu.native import simulator

PRELUDE = "from driver_client import *\n"


@pytest.fixture
def two_cards(tmp_path: Path) -> dict[str, str]:
    return slice_of(tmp_path, cards="T4x2")


def test_a_pointer_freed_twice_is_given_back_once(env: dict[str, str]) -> None:
    """Case 10, another of its kind: usage wraps around below zero when one charge is taken off twice."""
    script = """
start()
kept = alloc(300 * MIB)[1]
for allocate, give_back in ((alloc, free), (alloc_async, free_async), (alloc, free_async), (create, release)):
    pointer = allocate(200 * MIB)[1]
    first, second = give_back(pointer), give_back(pointer)
    cu.cuStreamSynchronize(None)
    print(first, second != 0, used() // MIB)
print(free(kept), used(), alloc(1000 * MIB)[0])
"""
    assert python(PRELUDE + script, env) == [*["0 True 300"] * 4, "0 0 0"]


def test_a_free_from_another_thread_and_card_debits_the_card_of_the_block(two_cards: dict[str, str]) -> None:
    """Case 11, another of its kind: frees by a thread without a context, and by one on the other card."""
    script = """
from threading import Thread
ok(cu.cuInit(0))
first, second = context(0), context(1)

def on_cards():
    here = []
    for one in (first, second):
        ok(cu.cuCtxSetCurrent(one))
        ok(cu.cuCtxSynchronize())
        here.append(used() // MIB)
    return here

def elsewhere(current, work):
    results = []
    def body():
        if current:
            ok(cu.cuCtxSetCurrent(current))
        results.append(work())
    thread = Thread(target=body)
    thread.start()
    thread.join()
    return results[0]

blocks = []
for where in (first, second):
    ok(cu.cuCtxSetCurrent(where))
    blocks.append((alloc(100 * MIB)[1], create(50 * MIB, 1, 1 if where is first else 0)[1]))
print(on_cards())
print(elsewhere(second, lambda: free(blocks[0][0])), elsewhere(None, lambda: release(blocks[0][1])), on_cards())
print(elsewhere(first, lambda: release(blocks[1][1])), elsewhere(first, lambda: free(blocks[1][0])), on_cards())
"""
    assert python(PRELUDE + script, two_cards) == ["[150, 150]", "0 0 [50, 100]", "0 0 [0, 0]"]


def test_a_block_of_a_pool_freed_on_another_stream(env: dict[str, str]) -> None:
    """Case 12, another of its kind: memory of a program's pool goes on another stream, and then the pool itself."""
    script = """
start()
one, two, p = c_void_p(), c_void_p(), c_uint64()
ok(cu.cuStreamCreate(byref(one), 1))
ok(cu.cuStreamCreate(byref(two), 1))
the_pool = pool()
ok(cu.cuMemAllocFromPoolAsync(byref(p), c_size_t(640 * MIB), the_pool, one))
ok(cu.cuStreamSynchronize(one))
print(used() // MIB, alloc(400 * MIB)[0], free_async(p.value, two.value), cu.cuStreamSynchronize(two))
print(cu.cuMemPoolDestroy(the_pool), used(), alloc(1000 * MIB)[0])
"""
    assert python(PRELUDE + script, env) == ["640 2 0 0", "0 0 0"]


def test_a_loop_over_streams_and_pools_never_runs_out(env: dict[str, str]) -> None:
    """Case 13, another of its kind: allocations and frees that change streams and pools."""
    script = """
start()
streams = [c_void_p() for _ in range(3)]
for s in streams:
    ok(cu.cuStreamCreate(byref(s), 1))
pools, failed = [pool(), pool()], 0
p = c_uint64()
for i in range(120):
    stream = streams[i % 3]
    failed += cu.cuMemAllocFromPoolAsync(byref(p), c_size_t((64 + i) * MIB), pools[i % 2], stream) != 0
    failed += free_async(p.value, stream.value) != 0
    status, block = alloc(200 * MIB)
    failed += status != 0
    failed += free(block) != 0
    ok(cu.cuStreamSynchronize(stream))
ok(cu.cuCtxSynchronize())
for one in pools:
    ok(cu.cuMemPoolTrimTo(one, c_size_t(0)))
print(failed, used(), alloc(1000 * MIB)[0])
"""
    assert python(PRELUDE + script, env) == ["0 0 0"]


def test_an_ordered_free_of_a_plain_pointer(tmp_path: Path, env: dict[str, str]) -> None:
    """Case 15, another of its kind: the reverse, cuMemFreeAsync of plain and pitched memory."""
    script = """
start()
pitch, p = c_size_t(), c_uint64()
before = used()
for _ in range(3):
    plain = alloc(100 * MIB)[1]
    ok(cu.cuMemAllocPitch_v2(byref(p), byref(pitch), c_size_t(1000), c_size_t(1000), 4))
    print(free_async(plain), free_async(p.value), cu.cuStreamSynchronize(None), used() - before)
"""
    assert python(PRELUDE + script, env) == ["0 0 0 0"] * 3
    assert python(PRELUDE + script, environment(tmp_path, preload=False)) == ["0 0 0 0"] * 3


def test_half_a_question_about_memory(tmp_path: Path, env: dict[str, str]) -> None:
    """Case 17: cuMemGetInfo(NULL, &total) crashes, and the free of a foreign pointer takes the count below zero."""
    script = """
start()
n, host, seen = c_size_t(), c_void_p(), c_uint64()
status = cu.cuMemGetInfo_v2(None, byref(n)), cu.cuMemGetInfo_v2(byref(n), None)
ok(cu.cuMemHostAlloc(byref(host), c_size_t(MIB), 2))
ok(cu.cuMemHostGetDevicePointer_v2(byref(seen), host, 0))
print(status, free(seen.value) != 0, cu.cuMemFreeHost(host))
"""
    assert python(PRELUDE + script, env) == python(PRELUDE + script, environment(tmp_path, preload=False))
    assert python(PRELUDE + script + "print(used())", env)[1] == "0"


def test_the_free_of_a_mapped_range_leaves_its_charge(env: dict[str, str]) -> None:
    """Case 17, another of its kind: cuMemFree of a mapped range is refused, and nothing is given back."""
    script = """
start()
address, handle = reserve(64 * MIB), create(64 * MIB)[1]
ok(map_block(address, 64 * MIB, handle))
print(free(address) != 0, free(address + 4096) != 0, free_async(address) != 0, used() // MIB)
print(unmap(address, 64 * MIB), release(handle), used())
"""
    assert python(PRELUDE + script, env) == ["True True True 64", "0 0 0"]


def test_host_locations_that_the_driver_refuses(tmp_path: Path, env: dict[str, str]) -> None:
    """Cases 19, 21, another of their kind: locations that are not there, the current node, none at all."""
    script = """
start()
before = used()
places = (3, 99), (3, -1), (4, 0), (0, 0), (9, 0), (2, 0), (1, 7), (1, -1)
answers = [create(64 * MIB, kind, where)[0] for kind, where in places]
print(answers, used() - before)
print(alloc(100 * MIB)[0], (used() - before) // MIB)
"""
    assert python(PRELUDE + script, env) == python(PRELUDE + script, environment(tmp_path, preload=False))


def test_a_refused_probe_for_host_memory_is_passed_on(tmp_path: Path, env: dict[str, str]) -> None:
    """Case 21: a library that probes memory of a NUMA node gets the driver's own error, and goes on."""
    script = """
start()
print([create(2 * MIB + 1, kind)[0] == 0 for kind in (3, 2, 4, 1)], used(), create(2 * MIB, 1, 0)[0], alloc(MIB)[0])
"""
    for variables in (env, environment(tmp_path, preload=False)):
        assert python(PRELUDE + script.replace("used()", "0"), variables) == ["[False, False, False, False] 0 0 0"]
    assert python(PRELUDE + script, env) == ["[False, False, False, False] 0 0 0"]


def test_a_refusal_of_the_driver_is_passed_on_and_costs_nothing(env: dict[str, str], tmp_path: Path) -> None:
    """Case 21, another of its kind: whatever the driver says to an allocation is the answer, and no charge stays."""
    folder = str(tmp_path / "cards")
    script = f"""
from pathlib import Path
from vgpu.native import simulator
start()
p, n, the_pool = c_uint64(), c_size_t(), pool()
calls = {{
    "cuMemAlloc_v2": lambda: alloc(64 * MIB)[0],
    "cuMemAllocManaged": lambda: cu.cuMemAllocManaged(byref(p), c_size_t(64 * MIB), 1),
    "cuMemAllocPitch_v2": lambda: cu.cuMemAllocPitch_v2(byref(p), byref(n), c_size_t(MIB), c_size_t(64), 16),
    "cuMemAllocAsync": lambda: alloc_async(64 * MIB)[0],
    "cuMemAllocFromPoolAsync": lambda: cu.cuMemAllocFromPoolAsync(byref(p), c_size_t(64 * MIB), the_pool, None),
    "cuMemCreate": lambda: create(64 * MIB)[0],
    "cuArrayCreate_v2": lambda: cu.cuArrayCreate_v2(byref(p), byref(ArrayDescriptor(8192, 8192, UINT8, 1))),
}}
for name, call in calls.items():
    answers = []
    for code in (1, 2, 101, 800, 999):
        # an allocation from the device's pool is asked of the pool that was charged
        simulator.inject_error(Path({folder!r}), name.replace("AllocAsync", "AllocFromPoolAsync"), code)
        answers.append(call())
    print(name, answers, used())
"""
    lines = python(PRELUDE + script, env)
    assert [line.split(" ", 1)[1] for line in lines] == ["[1, 2, 101, 800, 999] 0"] * 7


def test_a_buffer_of_another_interface_is_the_drivers_alone(env: dict[str, str], tmp_path: Path) -> None:
    """Case 17, another of its kind: cuMemFree of a buffer of imported external memory goes below zero."""
    script = """
import os

class Handle(Structure):
    _fields_ = [("type", c_ulonglong), ("fd", c_int), ("rest", c_char * 12), ("size", c_ulonglong), ("flags", c_uint),
                ("reserved", c_uint * 16)]

class Buffer(Structure):
    _fields_ = [("offset", c_ulonglong), ("size", c_ulonglong), ("flags", c_uint), ("reserved", c_uint * 16)]

start()
fd = os.memfd_create("other")
os.ftruncate(fd, 8 * MIB)
memory, p = c_void_p(), c_uint64()
description = Handle(type=1, fd=fd, size=8 * MIB)
print(cu.cuImportExternalMemory(byref(memory), byref(description)))
print(cu.cuExternalMemoryGetMappedBuffer(byref(p), memory, byref(Buffer(MIB, 2 * MIB, 0))), alloc(100 * MIB)[0])
print(free(p.value), free(p.value) != 0, cu.cuDestroyExternalMemory(memory))
"""
    lines = python(PRELUDE + script, env)
    assert lines == python(PRELUDE + script, environment(tmp_path, preload=False)) == ["0", "0 0", "0 True 0"]
    assert python(PRELUDE + script + "print(used() // MIB)", env)[-1] == "100"


def test_the_second_large_array_is_refused(env: dict[str, str]) -> None:
    """Case 25: two 3D arrays of 576 MiB each fit into a slice of 1000 MiB."""
    script = """
start()
arrays = [c_void_p(), c_void_p()]
shape = Array3DDescriptor(1024, 1024, 144, 0x20, 1, 0)
print([cu.cuArray3DCreate_v2(byref(a), byref(shape)) for a in arrays], used() // MIB)
print(cu.cuArrayDestroy(arrays[0]), used())
"""
    assert python(PRELUDE + script, env) == ["[0, 2] 576", "0 0"]


def test_layers_levels_and_channels_of_arrays_are_counted(env: dict[str, str]) -> None:
    """Case 25, another of its kind: mipmapped, layered and four-channel arrays."""
    script = """
start()
mipmap, layered, wide = c_void_p(), c_void_p(), c_void_p()
print(cu.cuMipmappedArrayCreate(byref(mipmap), byref(Array3DDescriptor(8192, 8192, 0, 0x20, 1, 0)), 2), used() // MIB)
print(cu.cuArray3DCreate_v2(byref(layered), byref(Array3DDescriptor(4096, 4096, 6, 0x01, 1, 1))), used() // MIB)
print(cu.cuArrayCreate_v2(byref(wide), byref(ArrayDescriptor(4096, 4096, 0x20, 4))), used() // MIB)
print(cu.cuArrayCreate_v2(byref(wide), byref(ArrayDescriptor(8192, 8192, 0x20, 4))), used() // MIB)
print(cu.cuMipmappedArrayDestroy(mipmap), cu.cuArrayDestroy(layered), used() // MIB)
"""
    assert python(PRELUDE + script, env) == ["0 320", "0 416", "0 672", "2 672", "0 0 256"]


@pytest.mark.parametrize("form", ["whole", "beginning"])
def test_a_card_chosen_by_uuid_has_its_own_account(two_cards: dict[str, str], tmp_path: Path, form: str) -> None:
    """Case 27, and a UUID's beginning as another of its kind: free memory of a chosen card never changes."""
    simulator.create(tmp_path / "cards", "T4x2")
    uuid = simulator.cards(tmp_path / "cards")[1].uuid
    visible = uuid if form == "whole" else uuid[:16]
    script = """
start()
before = info()[0]
print(alloc(300 * MIB)[0], (before - info()[0]) // MIB, alloc(800 * MIB)[0])
import pynvml as n
n.nvmlInit()
print([n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(i)).used // MIB for i in range(2)])
"""
    lines = python(PRELUDE + script, two_cards | {"CUDA_VISIBLE_DEVICES": visible})
    assert lines == ["0 300 2", "[0, 300]"]


@pytest.mark.parametrize("form", ["uuids", "orders"])
def test_processes_that_see_different_cards_are_charged_apart(
    two_cards: dict[str, str], tmp_path: Path, form: str
) -> None:
    """Case 29, and different orders as another of its kind: processes on different cards are all charged to card 0."""
    simulator.create(tmp_path / "cards", "T4x2")
    a, b = (card.uuid for card in simulator.cards(tmp_path / "cards"))
    visible = (a, b) if form == "uuids" else ("0,1", "1,0")
    script = f"""
from crew import *
one, two = Member(CUDA_VISIBLE_DEVICES={visible[0]!r}), Member(CUDA_VISIBLE_DEVICES={visible[1]!r})
for member, size in ((one, 700), (two, 900)):
    print(member.do("start()"), member.ask(f"alloc({{size}} * MIB)[0]"))
print(one.ask("used() // MIB"), two.ask("used() // MIB"))
print(one.ask("alloc(301 * MIB)[0]"), two.ask("alloc(101 * MIB)[0]"))
"""
    assert python(script, two_cards) == ["None 0", "None 0", "700 900", "2 2"]


def test_memory_that_others_take_past_the_library_shows_as_not_free(env: dict[str, str]) -> None:
    """Case 60, another of its kind: what is allocated past the library lowers what is free, and the driver refuses."""
    bare = {k: v for k, v in env.items() if k != "LD_PRELOAD"}
    script = "start()\nprint(alloc(info()[0] - 300 * MIB)[0], flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script], env=bare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdout
        assert neighbour.stdout.readline() == "0\n"
        script = """
start()
free_now = info()[0]
print(0 < free_now <= 300 * MIB, alloc(free_now + 1)[0], alloc(free_now)[0], info()[0])
"""
        assert python(PRELUDE + script, env) == ["True 2 0 0"]
        neighbour.communicate("\n", timeout=30)


def test_unknown_handles_take_nothing_off(env: dict[str, str]) -> None:
    """Case 70, another of its kind: frees, unmaps and releases of what nobody allocated."""
    script = """
start()
pointer, handle = alloc(300 * MIB)[1], create(200 * MIB)[1]
answers = {free(pointer + MIB), free(1 << 40), free_async(pointer + 8), release(handle + 1), unmap(1 << 40, 2 * MIB),
           cu.cuMipmappedArrayDestroy(c_void_p(0x1234)), cu.cuMemPoolDestroy(None)}
print(0 in answers, used() // MIB, alloc(501 * MIB)[0])
print(free(pointer), release(handle), used(), alloc(1000 * MIB)[0])
"""
    assert python(PRELUDE + script, env) == ["False 500 2", "0 0 0 0"]


def test_no_descriptor(tmp_path: Path, env: dict[str, str]) -> None:
    """Case 75, another of its kind: every creation that takes a descriptor, without one and without a result."""
    script = """
start()
p = c_uint64()
print(cu.cuArray3DCreate_v2(byref(p), None), cu.cuArray3DCreate_v2(None, byref(Array3DDescriptor(1, 1, 1, 1, 1, 0))))
print(cu.cuMipmappedArrayCreate(byref(p), None, 1), cu.cuMipmappedArrayCreate(None, None, 1))
print(cu.cuMemPoolCreate(byref(p), None), cu.cuMemPoolCreate(None, None), cu.cuCtxCreate_v4(None, None, 0, 0))
print(cu.cuMemCreate(byref(p), c_size_t(2 * MIB), None, c_ulonglong(0)))
print(cu.cuArrayCreate_v2(None, byref(ArrayDescriptor())), cu.cuArrayCreate_v2(byref(p), byref(ArrayDescriptor())))
print(cu.cuMemMap(c_uint64(0), c_size_t(0), c_size_t(0), c_ulonglong(0), c_ulonglong(0)))
print(cu.cuMemRetainAllocationHandle(None, None), cu.cuMemAllocPitch_v2(byref(p), None, c_size_t(8), c_size_t(8), 4))
"""
    assert python(PRELUDE + script, env) == python(PRELUDE + script, environment(tmp_path, preload=False))
