"""Fills and copies within a card under a core limit: paced by measured time where the multiprocessors make them."""

import time
from pathlib import Path

import pytest
from core_share import busy, make_region, running, within
from preloaded import python

from vgpu.native import CardLimit, Limits, Region

LIMIT, BAR = 10, 11
WINDOW_S = 3.0
#: a fill of 64 KiB takes 0.65 ms, a copy 1.3 ms
SLOW = "memory=100MB/s"
PREPARE = """
from ctypes import c_size_t, c_uint64
a, b = c_uint64(), c_uint64()
ok(cu.cuMemAlloc_v2(byref(a), c_size_t(2 << 20)))
ok(cu.cuMemAlloc_v2(byref(b), c_size_t(2 << 20)))
fill = lambda size: cu.cuMemsetD32Async(a, 7, c_size_t(size // 4), None)
"""
#: each keeps the card with one call of the driver
FILLS = {
    "64 KiB": "ok(fill(65536))",
    "1 KiB": "ok(fill(1024))",
    "1 MiB, each waited for": "ok(fill(1 << 20)); wait()",
    "of bytes, synchronous": "ok(cu.cuMemsetD8_v2(a, 1, c_size_t(65536)))",
    "a plane": "ok(cu.cuMemsetD2D16Async(a, c_size_t(1024), 3, c_size_t(256), c_size_t(128), None))",
    "sizes in turn": "ok(fill(1024)); ok(fill(1 << 20))",
}
COPIES = {
    "DtoD": "ok(cu.cuMemcpyDtoDAsync_v2(b, a, c_size_t(65536), None))",
    "by address": "ok(cu.cuMemcpyAsync(b, a, c_size_t(65536), None))",
    "synchronous": "ok(cu.cuMemcpyDtoD_v2(b, a, c_size_t(65536)))",
}


def shares(folder: Path, region: Region) -> tuple[float, float]:
    """Percent of a window that the card was busy, by its books, and that the container was metered."""

    def look() -> tuple[float, int, int]:
        return time.monotonic(), busy(folder), region.usage().cards[0].gpu_ns

    begun = look()
    while time.monotonic() < begun[0] + WINDOW_S:
        time.sleep(0.05)
    ended = look()
    passed = (ended[0] - begun[0]) * 1e7
    return (ended[1] - begun[1]) / passed, (ended[2] - begun[2]) / passed


def settled(folder: Path, region: Region) -> None:
    """Until the container has been held up: what it had earned by doing nothing is spent."""
    deadline = time.monotonic() + 20
    while not region.usage().cards[0].throttled_ns:
        assert time.monotonic() < deadline, "nothing was held up"
        time.sleep(0.05)
    shares(folder, region)


@pytest.mark.parametrize("work", FILLS)
def test_a_loop_of_fills_keeps_its_share(tmp_path: Path, work: str) -> None:
    with (
        make_region(tmp_path, cores=LIMIT) as region,
        running(within(tmp_path, region, VGPU_SIM_TIME=f"{SLOW},fills=sms"), FILLS[work], PREPARE),
    ):
        settled(tmp_path, region)
        share, metered = shares(tmp_path, region)
        assert LIMIT / 2 < share <= BAR
        assert metered == pytest.approx(share, abs=0.6)


@pytest.mark.parametrize("work", COPIES)
def test_a_loop_of_copies_keeps_its_share_where_they_take_multiprocessors(tmp_path: Path, work: str) -> None:
    with make_region(tmp_path, cores=LIMIT) as region:
        uuid = region.limits().cards[0].uuid
        region.set_limits(Limits((CardLimit(uuid, None, cores=LIMIT),), copies_on_sms=True))
        with running(within(tmp_path, region, VGPU_SIM_TIME=f"{SLOW},within=sms"), COPIES[work], PREPARE):
            settled(tmp_path, region)
            assert shares(tmp_path, region)[0] <= BAR


COUNTED = """
from driver_client import *
import time
start()
{prepare}
calls, until = 0, time.monotonic() + 1.5
while time.monotonic() < until:
    {step}
    ok(cu.cuCtxSynchronize())
    calls += 1
print(calls)
"""


@pytest.mark.parametrize(
    ("step", "mode", "flag"),
    [(FILLS["64 KiB"], "fills=engine", True), (COPIES["DtoD"], "within=engine", False)],
    ids=["fills", "copies"],
)
def test_engines_are_not_paced(tmp_path: Path, step: str, mode: str, flag: bool) -> None:
    """A copy engine keeps no kernel from the card: nothing waits for the limit, and nothing is metered."""
    with make_region(tmp_path, cores=LIMIT) as region:
        uuid = region.limits().cards[0].uuid
        region.set_limits(Limits((CardLimit(uuid, None, cores=LIMIT),), fills_on_engine=flag))
        python(COUNTED.format(prepare=PREPARE, step=step), within(tmp_path, region, VGPU_SIM_TIME=f"{SLOW},{mode}"))
        card = region.usage().cards[0]
        assert (card.throttled_ns, card.gpu_ns, card.launches) == (0, 0, 0)


def test_captured_fills_are_paid_with_their_graph(tmp_path: Path) -> None:
    script = f"""
from driver_client import *
start()
{PREPARE}
stream, graph, executable = c_void_p(), c_void_p(), c_void_p()
ok(cu.cuStreamCreate(byref(stream), 1))
ok(cu.cuStreamBeginCapture_v2(stream, 2))
ok(cu.cuMemsetD32Async(a, 7, c_size_t(16384), stream))
ok(cu.cuStreamEndCapture(stream, byref(graph)))
ok(cu.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
for _ in range(5):
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
"""
    with make_region(tmp_path, cores=50) as region:
        python(script, within(tmp_path, region, VGPU_SIM_TIME=f"{SLOW},fills=sms"))
        card = region.usage().cards[0]
        assert card.launches == 5
        assert card.gpu_ns == pytest.approx(busy(tmp_path), rel=0.1)
