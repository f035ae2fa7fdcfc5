"""Memory that must be, or should be, on the card: movable blocks give way to it."""

import sys
from pathlib import Path

import pytest
from preloaded import MIB, run
from tiered import PRELUDE, TRUTH, Container, container

NOWHERE_ELSE = (
    TRUTH
    + """
import time
def exportable(size, handles=1):
    handle = c_ulonglong()
    properties = AllocationProperties(type=1, handles=handles, location=Location(1, 0))
    return cu.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_ulonglong(0))
def full():  # of blocks that can move; some lie in host memory
    blocks = []
    while truth()[2] < 100:
        blocks.append(alloc(20 * MIB)[1])
    return blocks
def come_up(blocks):  # some are freed, and those in host memory have taken their place
    for pointer in blocks[:5]:
        ok(free(pointer))
    end = time.monotonic() + 20
    while truth()[2] and time.monotonic() < end:
        ok(cu.cuCtxSynchronize())
    return truth()[2]
start()
"""
)


@pytest.fixture
def box(tmp_path: Path) -> Container:
    """Of 512 MiB, 16 are reserved for small blocks."""
    return container(tmp_path, movable=True)


def test_memory_that_is_shown_to_others_finds_room(box: Container) -> None:
    lines = box.python(
        NOWHERE_ELSE
        + """
full()
before = truth()
print(exportable(200 * MIB), truth()[2] > before[2], truth()[1] <= 512, truth()[0] - before[0])
print(exportable(400 * MIB), truth()[0] - before[0])
"""
    )
    assert lines == ["0 True True 200", "2 200"]
    assert box.usage().cards[0].refused == 1


def test_room_that_others_were_let_use_is_given_back(box: Container) -> None:
    lines = box.python(NOWHERE_ELSE + "print(come_up(full()), exportable(100 * MIB), truth()[2] > 0)")
    assert lines == ["0 0 True"]


SMALL = {"cuMemAlloc": "alloc(MIB)", "cuMemAllocAsync": "alloc_async(MIB)"}


@pytest.mark.parametrize("kind", SMALL)
def test_small_blocks_are_on_the_card(box: Container, kind: str) -> None:
    """In host memory they would stay for ever: at addresses of the process, like pinned memory."""
    lines = box.python(
        NOWHERE_ELSE
        + f"""
come_up(full())
small = [{SMALL[kind]} for _ in range(60)]
print({{status for status, _ in small}}, [pointer for _, pointer in small if pointer < 1 << 47], truth()[1] <= 512)
"""
    )
    assert lines == ["{0} [] True"]


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("why", ["busy", "captures"])
def test_small_blocks_are_not_refused_where_nothing_can_move(box: Container, kind: str, why: str) -> None:
    hinder = {
        "busy": "ok(launch(function('spin_5000ms'), stream.value))",
        "captures": "ok(cu.cuStreamBeginCapture_v2(stream, 2))",
    }[why]
    lines = box.python(
        NOWHERE_ELSE
        + f"""
full()
stream = c_void_p()
ok(cu.cuStreamCreate(byref(stream), 1))
{hinder}
small = [{SMALL[kind]} for _ in range(60)]
print({{status for status, _ in small}}, any(pointer < 1 << 47 for _, pointer in small))
"""
    )
    assert lines == ["{0} True"]


SPECIAL = {"exportable": "handles=1", "for the decompression engine": "usage=2"}


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_pool_whose_memory_nothing_can_stand_for_gives_no_other(tmp_path: Path, kind: str) -> None:
    """A pointer of such a pool is exported as the pool's; beyond the guarantee it is refused, and the log says so."""
    box = container(tmp_path, movable=True, memory=2048, host=1536)
    script = (
        PRELUDE
        + NOWHERE_ELSE
        + f"""
full()
made = c_void_p()
ok(cu.cuMemPoolCreate(byref(made), byref(PoolProperties(type=1, location=Location(1, 0), {SPECIAL[kind]}))))
def of_pool():
    pointer = c_uint64()
    status = cu.cuMemAllocFromPoolAsync(byref(pointer), c_size_t(64 * MIB), made, None)
    return status, attribute(17, pointer.value, c_void_p)[1] == made.value
print([of_pool() for _ in range(9)] == [(0, True)] * 8 + [(2, False)], truth()[1])
"""
    )
    done = run([sys.executable, "-c", script], box.env | {"LIBCUDA_LOG_LEVEL": "1"})
    assert done.stdout.splitlines() == ["True 512"]
    assert f"refused {64 * MIB} bytes" in done.stderr


def test_a_pool_is_as_large_as_the_program_wants_it(box: Container) -> None:
    """Programs limit their pools by it: what is beyond is refused, though there is host memory."""
    lines = box.python(
        """
start()
made, pointer = c_void_p(), c_uint64()
properties = PoolProperties(type=1, location=Location(1, 0), max_size=64 * MIB)
ok(cu.cuMemPoolCreate(byref(made), byref(properties)))
print([cu.cuMemAllocFromPoolAsync(byref(pointer), c_size_t(30 * MIB), made, None) for _ in range(4)])
"""
    )
    assert lines == ["[0, 0, 2, 2]"]
