"""Reported bugs of intercept libraries about core limits. What is asserted is the simulator's busy time."""

from pathlib import Path

import pytest
from core_share import make_region, running, share, within

from vgpu.native import simulator

ASYNC = "ok(launch(kernel))"
SYNC = "ok(launch(kernel)); wait()"
STREAM = "stream = c_void_p(); ok(cu.cuStreamCreate(byref(stream), 1))"


def spin(duration: str) -> str:
    return f"kernel = function('spin_{duration}')"


def holds(value: float, limit: float) -> bool:
    """Above the limit is wrong; a test machine without time for the launching thread may stay below."""
    return limit / 3 < value < limit * 1.15 + 2


def one(folder: Path, cores: int, step: str, prepare: str, *, processes: int = 1) -> float:
    """Share of one container, after half a second."""
    with (
        make_region(folder, cores=cores) as region,
        running(within(folder, region), step, prepare, processes=processes),
    ):
        share(folder, 0.3)
        return share(folder, 0.7)


@pytest.mark.parametrize("processes", [1, 3])
def test_a_limit_is_neither_passed_nor_forgotten(tmp_path: Path, processes: int) -> None:
    """Case 31, and several processes as another of its kind: a limit of 30 gives 90 percent, or is no limit."""
    assert holds(one(tmp_path, 30, ASYNC, spin("2ms"), processes=processes), 30)


@pytest.mark.parametrize(
    ("cards", "cores", "duration"), [("H100", (30, 70), "2ms"), ("T4", (10, 90), "2ms"), ("T4", (20, 80), "20ms")]
)
def test_shares_are_time_whatever_the_card_s_size(
    tmp_path: Path, cards: str, cores: tuple[int, int], duration: str
) -> None:
    """Cases 32, 39, and long kernels as another of their kind: 50 gives 99 % of a wide card; 10 to 90 give 1 to 6."""
    with (
        make_region(tmp_path, "a", cores=cores[0], cards=cards) as a,
        make_region(tmp_path, "b", cores=cores[1]) as b,
        running(within(tmp_path, a, cards=cards), ASYNC, spin(duration)),
        running(within(tmp_path, b, cards=cards), ASYNC, spin(duration)),
    ):
        share(tmp_path, 0.5)
        first = [process.busy_ns[0] for process in simulator.processes(tmp_path / "cards") if process.alive]
        share(tmp_path, 1.5)
        then = [process.busy_ns[0] for process in simulator.processes(tmp_path / "cards") if process.alive]
        small, large = sorted(after - before for before, after in zip(first, then, strict=True))
        assert 0.3 * cores[0] < small / (small + large) * 100 < 1.4 * cores[0] + 2


@pytest.mark.parametrize(("duration", "cores"), [("100us", 30), ("3ms", 20)])
def test_debt_of_many_threads_is_bounded(tmp_path: Path, duration: str, cores: int) -> None:
    """Case 33, and long kernels as another of its kind: launches of many threads make a debt without bound."""
    threads = """
def work():
    ok(cu.cuCtxSetCurrent(mine))
    while True:
        ok(launch(kernel))
for _ in range(7):
    threading.Thread(target=work, daemon=True).start()
"""
    assert holds(one(tmp_path, cores, ASYNC, spin(duration) + threads), cores)


@pytest.mark.parametrize("duration", ["100us", "5us"])
def test_graphs_are_limited(tmp_path: Path, duration: str) -> None:
    """Case 34, and a short graph as another of its kind: a graph of 20 kernels runs without the limit."""
    graph = f"""
{spin(duration)}
{STREAM}
graph, execution = c_void_p(), c_void_p()
ok(cu.cuStreamBeginCapture_v2(stream, 0))
for _ in range(20):
    ok(launch(kernel, stream.value))
ok(cu.cuStreamEndCapture(stream, byref(graph)))
ok(cu.cuGraphInstantiateWithFlags(byref(execution), graph, c_ulonglong(0)))
"""
    assert holds(one(tmp_path, 30, "ok(cu.cuGraphLaunch(execution, stream))", graph), 30)


CONFIG = """
class Config(Structure):
    _fields_ = [("shape", c_uint * 7), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint)]
config = Config(shape=(1, 1, 1, 32, 1, 1, 0))
"""
BY_ADDRESS = """
from ctypes import CFUNCTYPE
address, status = c_void_p(), c_int()
ok(cu.cuGetProcAddress_v2(b"cuLaunchKernelEx", byref(address), 12000, c_ulonglong({flags}), byref(status)))
extended = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_void_p)(address.value)
"""


@pytest.mark.parametrize("flags", [0, 2])
def test_a_newer_launch_is_limited(tmp_path: Path, flags: int) -> None:
    """Case 35, and the per-thread stream as another of its kind: a limit of 20 gives 60 with cuLaunchKernelEx."""
    prepare = spin("1ms") + CONFIG + BY_ADDRESS.format(flags=flags)
    assert holds(one(tmp_path, 20, "ok(extended(byref(config), kernel, None, None))", prepare), 20)


@pytest.mark.parametrize("name", ["cuLaunchCooperativeKernel", "cuLaunchCooperativeKernel_ptsz"])
def test_a_cooperative_launch_is_limited(tmp_path: Path, name: str) -> None:
    """Case 36, and the per-thread stream as another of its kind: cooperative launches are unlimited."""
    step = f"ok(cu.{name}(kernel, 4, 1, 1, 32, 1, 1, 0, None, None))"
    assert holds(one(tmp_path, 30, step, spin("1ms")), 30)


@pytest.mark.parametrize("step", [SYNC, ASYNC])
def test_one_long_kernel_owes_its_time_afterwards(tmp_path: Path, step: str) -> None:
    """Case 37, and queued long kernels as another of its kind: one huge kernel at a time is never limited."""
    with make_region(tmp_path, cores=20) as region, running(within(tmp_path, region), step, spin("50ms")):
        share(tmp_path, 0.5)
        assert holds(share(tmp_path, 1.5), 20)


@pytest.mark.parametrize("grid", [1, 1024])
def test_small_kernels_are_limited(tmp_path: Path, grid: int) -> None:
    """Case 38, and a wide grid as another of its kind: a core limit has no effect on kernels of 10 us."""
    step = f"ok(cu.cuLaunchKernel(kernel, {grid}, 1, 1, 32, 1, 1, 0, None, None, None))"
    assert holds(one(tmp_path, 30, step, spin("10us")), 30)


@pytest.mark.parametrize("step", [ASYNC, SYNC])
def test_a_small_limit_on_a_small_card_holds(tmp_path: Path, step: str) -> None:
    """Case 72, and a program that waits as another of its kind: a floor breaks a limit of 10, jitter pins it near 0."""
    assert holds(one(tmp_path, 10, step, spin("1ms")), 10)
