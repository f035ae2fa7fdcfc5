"""Access of one card to blocks of another that can move."""

from pathlib import Path

import pytest
from tiered import TRUTH, container

TWO = (
    TRUTH
    + """
import time
one, two = start(), context(1)
class Access(Structure):
    _fields_ = [("location", Location), ("flags", c_int)]
the_pool = c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(byref(the_pool), 0))
def open_pool(flags=3):
    return cu.cuMemPoolSetAccess(the_pool, byref(Access(Location(1, 1), flags)), c_size_t(1))
def access(pointer):
    flags = c_ulonglong(7)
    ok(cu.cuMemGetAccess(byref(flags), byref(Location(1, 1)), c_uint64(pointer)))
    return flags.value
def used_by_two(pointer):
    ok(cu.cuCtxSetCurrent(two))
    status = cu.cuMemsetD8_v2(c_uint64(pointer), 9, c_size_t(MIB))
    ok(cu.cuCtxSetCurrent(one))
    return status
def in_host():
    return Region.open(Path(os.environ["VGPU_DIR"])).usage().cards[0].host_used // MIB
def from_pool_by_way_of_host():
    filling = []
    while in_host() == 0:
        filling.append(alloc(64 * MIB)[1])
    status, pointer = alloc_async(64 * MIB)
    seen = in_host(), access(pointer), used_by_two(pointer)
    for other in filling:
        ok(free(other))
    end = time.monotonic() + 20
    while in_host() and time.monotonic() < end:
        ok(cu.cuCtxSynchronize())
    return pointer, (*seen, in_host())
ok(cu.cuCtxSetCurrent(one))
"""
)


def test_access_to_all_blocks_or_to_none(tmp_path: Path) -> None:
    """When the driver refuses access to a block, the program gets the error, and may try again."""
    box = container(tmp_path, cards="H100x2", movable=True)
    lines = box.python(
        TWO
        + """
ok(cu.cuCtxSetCurrent(two))
status, there = alloc(64 * MIB)
ok(cu.cuCtxSetCurrent(one))
status, here = alloc(64 * MIB)
simulator.inject_error(Path(os.environ["VGPU_SIM_DIR"]), "cuMemSetAccess", 2, 1)
print(cu.cuCtxEnablePeerAccess(two, 0), cu.cuCtxEnablePeerAccess(two, 0))
ok(cu.cuMemsetD8_v2(c_uint64(here), 9, c_size_t(MIB)))
print(cu.cuMemcpyDtoD_v2(c_uint64(there), c_uint64(here), c_size_t(MIB)))
"""
    )
    assert lines == ["2 0", "0"]


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_pool_s_access_stays_when_its_block_comes_up(tmp_path: Path, opened: str) -> None:
    """In host memory, where the pool had no room, every card may access it; on the card it has the pool's access
    rights.
    """
    box = container(tmp_path, cards="H100x2", movable=True)
    before, after = ("ok(open_pool())", "") if opened == "before" else ("", "print(access(pointer))\nok(open_pool())")
    lines = box.python(
        TWO
        + f"""
{before}
pointer, seen = from_pool_by_way_of_host()
{after}
print(seen, access(pointer), used_by_two(pointer), access(alloc(64 * MIB)[1]))
"""
    )
    assert lines == [*(["0"] if opened == "after" else []), "(128, 3, 0, 0) 3 0 3"]


def test_access_that_a_pool_refuses_opens_nothing(tmp_path: Path) -> None:
    box = container(tmp_path, cards="H100x2", movable=True)
    lines = box.python(
        TWO
        + """
block = alloc(64 * MIB)[1]
bad = cu.cuMemPoolSetAccess(the_pool, byref(Access(Location(1, 2), 3)), c_size_t(1))
print(bad, cu.cuMemPoolSetAccess(None, byref(Access(Location(1, 1), 3)), c_size_t(1)), open_pool(0), access(block))
print(cu.cuMemPoolSetAccess(the_pool, None, c_size_t(0)), open_pool(1), access(block))
"""
    )
    assert lines == ["1 1 0 0", "0 0 3"]


def test_a_block_that_the_pool_s_access_does_not_open_is_told(tmp_path: Path) -> None:
    box = container(tmp_path, cards="H100x2", movable=True)
    lines = box.python(
        TWO
        + """
block = alloc(64 * MIB)[1]
simulator.inject_error(Path(os.environ["VGPU_SIM_DIR"]), "cuMemSetAccess", 2, 1)
print(open_pool(), access(block), open_pool(), access(block))
"""
    )
    assert lines == ["2 0 0 3"]


OPENINGS = {"peers": "cu.cuCtxEnablePeerAccess(two, 0)", "pool": "open_pool()"}


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_capture_meanwhile_neither_forbids_access_nor_breaks(tmp_path: Path, opening: str) -> None:
    box = container(tmp_path, cards="H100x2", movable=True)
    box.env["VGPU_SIM_STRICT"] = "captures"
    lines = box.python(
        TWO
        + f"""
pointer, stream, graph = alloc(64 * MIB)[1], c_void_p(), c_void_p()
ok(cu.cuCtxSetCurrent(two))
theirs = alloc(64 * MIB)[1]
ok(cu.cuCtxSetCurrent(one))
ok(cu.cuStreamCreate(byref(stream), 1))
ok(cu.cuStreamBeginCapture_v2(stream, 0))
print({OPENINGS[opening]}, cu.cuStreamEndCapture(stream, byref(graph)), access(pointer))
"""
    )
    assert lines == ["0 0 3" if opening == "pool" else "0 0 0"]


COPIES = {
    "cuMemcpyDtoD": "cu.cuMemcpyDtoD_v2(c_uint64(to), c_uint64(at), c_size_t(SIZE))",
    "cuMemcpyDtoDAsync": "cu.cuMemcpyDtoDAsync_v2(c_uint64(to), c_uint64(at), c_size_t(SIZE), stream)",
    "cuMemcpy": "cu.cuMemcpy(c_uint64(to), c_uint64(at), c_size_t(SIZE))",
    "cuMemcpyAsync": "cu.cuMemcpyAsync(c_uint64(to), c_uint64(at), c_size_t(SIZE), stream)",
    "cuMemcpyAsync_ptsz": "cu.cuMemcpyAsync_ptsz(c_uint64(to), c_uint64(at), c_size_t(SIZE), None)",
    "cuMemcpyDtoD_v2_ptds": "cu.cuMemcpyDtoD_v2_ptds(c_uint64(to), c_uint64(at), c_size_t(SIZE))",
}


@pytest.mark.parametrize("copy", COPIES)
def test_cards_without_access_to_each_other_copy(tmp_path: Path, copy: str) -> None:
    """As without the tier: between blocks, to and from the driver's own small blocks, in either context."""
    box = container(tmp_path, cards="T4x2", movable=True)
    lines = box.python(
        TWO
        + f"""
SIZE = MIB
here = [alloc(64 * MIB)[1], alloc(MIB)[1]]
ok(cu.cuCtxSetCurrent(two))
there = [alloc(64 * MIB)[1], alloc(MIB)[1]]
filled = 0
def told(pointer, owner):
    out = (c_char * 2)()
    ok(cu.cuCtxSetCurrent(owner))
    ok(cu.cuMemcpyDtoH_v2(out, c_uint64(pointer + SIZE - 2), c_size_t(2)))
    return list(out.raw)
for current in (one, two):
    ok(cu.cuCtxSetCurrent(current))
    stream = c_void_p()
    ok(cu.cuStreamCreate(byref(stream), 0))
    within = (here[0], here[0] + 2 * MIB, one, one)
    for at, to, source, target in [*((a, b, one, two) for a in here for b in there), within]:
        filled += 1
        ok(cu.cuCtxSetCurrent(source))
        ok(cu.cuMemsetD8_v2(c_uint64(at), filled, c_size_t(SIZE)))
        ok(cu.cuCtxSetCurrent(current))
        ok({COPIES[copy]})
        ok(cu.cuCtxSynchronize())
        assert told(to, target) == [filled] * 2
print(filled)
"""
    )
    assert lines == ["10"]


def test_copies_between_cards_that_a_graph_holds(tmp_path: Path) -> None:
    box = container(tmp_path, cards="T4x2", movable=True)
    lines = box.python(
        TWO
        + """
at = alloc(64 * MIB)[1]
ok(cu.cuMemsetD8_v2(c_uint64(at), 5, c_size_t(MIB)))
ok(cu.cuCtxSetCurrent(two))
to = alloc(64 * MIB)[1]
stream, graph, ready, out = c_void_p(), c_void_p(), c_void_p(), (c_char * 2)()
ok(cu.cuStreamCreate(byref(stream), 1))
ok(cu.cuStreamBeginCapture_v2(stream, 0))
ok(cu.cuMemcpyDtoDAsync_v2(c_uint64(to), c_uint64(at), c_size_t(MIB), stream))
ok(cu.cuStreamEndCapture(stream, byref(graph)))
ok(cu.cuGraphInstantiateWithFlags(byref(ready), graph, c_ulonglong(0)))
ok(cu.cuGraphLaunch(ready, stream))
ok(cu.cuStreamSynchronize(stream))
ok(cu.cuMemcpyDtoH_v2(out, c_uint64(to), c_size_t(2)))
print(list(out.raw))
"""
    )
    assert lines == ["[5, 5]"]
