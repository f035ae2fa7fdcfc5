"""How memory looks that may be in host memory, and how it ends: always like memory of a card."""

import sys
from pathlib import Path

import pytest
from preloaded import MIB, run
from tiered import KINDS, PRELUDE, TRUTH, Container, container, of_kind


@pytest.fixture(params=KINDS)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Container:
    return of_kind(tmp_path, request.param)


def test_a_block_made_by_the_program_is_on_the_card_as_far_as_anybody_can_tell(tmp_path: Path) -> None:
    box = container(tmp_path)
    lines = box.python(
        TRUTH
        + """
start()
ok(alloc(info()[0] - (1024 - 512) * MIB - 50 * MIB)[0])
status, handle = create(64 * MIB)
at = reserve(64 * MIB)
ok(map_block(at, 64 * MIB, handle))
class Access(Structure):
    _fields_ = [("location", Location), ("flags", c_int)]
ok(cu.cuMemSetAccess(c_uint64(at), c_size_t(64 * MIB), byref(Access(Location(1, 0), 3)), c_size_t(1)))
asked = AllocationProperties()
ok(cu.cuMemGetAllocationPropertiesFromHandle(byref(asked), c_ulonglong(handle)))
print(status, (asked.location.type, asked.location.id), where(at + MIB), attribute(9, at, c_int)[1], truth()[2])
ok(release(handle))
print(truth()[2], unmap(at, 64 * MIB), truth()[2])
shared = c_ulonglong()
asked = AllocationProperties(type=1, handles=1, location=Location(1, 0))
print(cu.cuMemCreate(byref(shared), c_size_t(64 * MIB), byref(asked), c_ulonglong(0)))
"""
    )
    assert lines == ["0 (1, 0) 2 0 64", "64 0 0", "2"]


def test_a_pointer_into_host_memory_looks_like_one_of_the_card(box: Container) -> None:
    lines = box.python(
        """
ctx = start()
ok(alloc(info()[0] - (1024 - 512) * MIB - 50 * MIB)[0])
size = 100 * MIB + 512
status, pointer = alloc(size)
inside = pointer + 3 * MIB + 8
start, length, owner, buffer = (attribute(which, inside)[1] for which in (11, 12, 1, 7))
print(status, where(inside), attribute(9, inside, c_int), start == pointer, length - size)
print(owner == ctx.value, attribute(8, inside, c_int)[1], attribute(4, inside)[0], attribute(3, inside)[1] == inside)
print(buffer == attribute(7, pointer)[1], buffer != attribute(7, alloc(64 * MIB)[1])[1])
base, length = c_uint64(), c_size_t()
status = cu.cuMemGetAddressRange_v2(byref(base), byref(length), c_uint64(inside))
print(status, base.value == pointer, length.value - size)
kinds = (c_int * 3)(2, 9, 4)
kind, ordinal, host = c_uint(7), c_int(7), c_uint64(7)
data = (c_void_p * 3)(*(cast(byref(x), c_void_p) for x in (kind, ordinal, host)))
print(cu.cuPointerGetAttributes(3, kinds, data, c_uint64(inside)), kind.value, ordinal.value, host.value)
shared = cu.cuIpcGetMemHandle(byref((c_char * 64)()), c_uint64(pointer))
print(shared, cu.cuMemRetainAllocationHandle(byref(base), c_void_p(pointer)))
print(free(inside), free(pointer), free(pointer))
""".replace("ctx =", "from ctypes import cast\nctx =", 1)
    )
    assert lines == ["0 2 (0, 0) True 0", "True 0 1 True", "True True", "0 True 0", "0 2 0 0", "1 1", "1 0 1"]


def test_who_gets_no_ipc_handle_is_told_why(tmp_path: Path) -> None:
    box = container(tmp_path)
    done = run(
        [
            sys.executable,
            "-c",
            PRELUDE
            + """
import os, time
from pathlib import Path
from vgpu.native import Region
region = Region.open(Path(os.environ["VGPU_DIR"]))
in_host = lambda: region.usage().cards[0].host_used // MIB
handle = lambda: cu.cuIpcGetMemHandle(byref((c_char * 64)()), c_uint64(block))
start()
first, block = alloc(460 * MIB)[1], alloc(300 * MIB)[1]
print(in_host(), handle())
ok(free(first))
deadline = time.monotonic() + 30
while in_host() and time.monotonic() < deadline:
    ok(cu.cuMemsetD8_v2(c_uint64(block), 1, c_size_t(16)))
print(in_host(), handle())
""",
        ],
        {**box.env, "LIBCUDA_LOG_LEVEL": "1"},
    )
    assert done.stdout.splitlines() == ["300 1", "0 1"]
    down, up = (line for line in done.stderr.splitlines() if "no IPC handle" in line)
    assert "the block lies in host memory; " in down
    assert "the block came up from host memory, and stays what it was made as; " in up
    assert "of the pod, or vgpu run without --oversubscribe, keeps all memory on the card" in up


def test_the_contents_are_the_program_s(box: Container) -> None:
    lines = box.python(
        """
start()
ok(alloc(info()[0] - (1024 - 512) * MIB - 50 * MIB)[0])
(_, one), (_, two) = alloc(96 * MIB), alloc(96 * MIB)
ok(cu.cuMemsetD8_v2(c_uint64(one), 17, c_size_t(96 * MIB)))
ok(cu.cuMemsetD8_v2(c_uint64(two), 18, c_size_t(96 * MIB)))
ok(cu.cuMemcpyDtoD_v2(c_uint64(two + 10), c_uint64(one + 50 * MIB), c_size_t(MIB)))
out = (c_char * 12)()
ok(cu.cuMemcpyDtoH_v2(out, c_uint64(two + 4), c_size_t(12)))
print(list(out.raw))
"""
    )
    assert lines == ["[18, 18, 18, 18, 18, 18, 17, 17, 17, 17, 17, 17]"]


def test_a_free_in_stream_order_waits_for_the_stream(tmp_path: Path) -> None:
    box = container(tmp_path)
    lines = box.python(
        TRUTH
        + """
start()
ok(alloc(info()[0] - (1024 - 512) * MIB - 50 * MIB)[0])
stream = c_void_p()
ok(cu.cuStreamCreate(byref(stream), 1))
status, pointer = alloc_async(100 * MIB, stream.value)
ok(launch(function("busy_300ms"), stream.value))
ok(free_async(pointer, stream.value))
held = lambda: Region.open(Path(os.environ["VGPU_DIR"])).usage().cards[0].host_used // MIB
info()
print(cu.cuStreamQuery(stream), held(), where(pointer), free_async(pointer, stream.value))
ok(cu.cuStreamSynchronize(stream))
info()
print(held())
"""
    )
    assert lines == ["600 100 2 1", "0"]


@pytest.mark.parametrize(
    "end", ["cu.cuCtxDestroy_v2(ctx)", "cu.cuDevicePrimaryCtxReset_v2(0)"], ids=["destroy", "reset"]
)
def test_blocks_go_with_their_context(box: Container, end: str) -> None:
    lines = box.python(
        TRUTH
        + f"""
ok(cu.cuInit(0))
ctx = c_void_p()
if "Primary" in {end!r}:
    ok(cu.cuDevicePrimaryCtxRetain(byref(ctx), 0)); ok(cu.cuCtxSetCurrent(ctx))
else:
    ctx = context()
ok(alloc(300 * MIB)[0])
ok(alloc(500 * MIB)[0])
ok(alloc(100 * MIB)[0])
status, pointer = alloc_async(100 * MIB)
print(truth()[2], status, free_async(pointer))
print({end}, truth(contexts=0))
context()
ok(alloc(700 * MIB)[0])
print(truth())
"""
    )
    assert lines == ["600 0 0", "0 (0, 0, 0)", "(700, 0, 700)"]


def test_a_child_has_nothing_of_its_parent_s(tmp_path: Path) -> None:
    box = container(tmp_path)
    lines = box.python(
        TRUTH
        + """
start()
ok(alloc(info()[0] - (1024 - 512) * MIB - 50 * MIB)[0])
status, pointer = alloc(100 * MIB)
before = truth()
if os.fork() == 0:
    free(pointer)
    os._exit(0)
os.wait()
print(truth() == before, where(pointer), free(pointer), truth()[2])
"""
    )
    assert lines == ["True 2 0 0"]


def test_a_block_that_moves_looks_the_same(tmp_path: Path) -> None:
    box = container(tmp_path, movable=True)
    box.region.lend(0, 400 * MIB)
    lines = box.python(
        TRUTH
        + """
import time
start()
blocks = [alloc(64 * MIB)[1] for _ in range(12)]
def seen():
    return [[attribute(which, pointer + 4096)[1] for which in (1, 2, 3, 7, 9, 11, 12, 20)] for pointer in blocks]
before, moved = seen(), truth()[2]
Region.open(Path(os.environ["VGPU_DIR"]), writable=True).lend(0, 0)
deadline = time.monotonic() + 20
while truth()[1] > 512 and time.monotonic() < deadline:
    ok(cu.cuCtxSynchronize())
print(moved, truth()[2] > 0, seen() == before)
"""
    )
    assert lines == ["0 True True"]


def test_cards_may_reach_each_other(tmp_path: Path) -> None:
    box = container(tmp_path, cards="H100x2", movable=True)
    lines = box.python(
        """
one, two = start(), context(1)
status, there = alloc(64 * MIB)
ok(cu.cuCtxSetCurrent(one))
print(cu.cuCtxEnablePeerAccess(two, 0), cu.cuCtxEnablePeerAccess(two, 0))
status, here = alloc(64 * MIB)
ok(cu.cuMemsetD8_v2(c_uint64(here), 9, c_size_t(MIB)))
ok(cu.cuMemcpyDtoD_v2(c_uint64(there), c_uint64(here), c_size_t(MIB)))
out = (c_char * 4)()
ok(cu.cuMemcpyDtoH_v2(out, c_uint64(there + MIB - 4), c_size_t(4)))
print(list(out.raw))
"""
    )
    assert lines == ["0 704", "[9, 9, 9, 9]"]
