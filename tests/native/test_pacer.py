"""The core limit: its arithmetic, and what share of a card a limited container really gets."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preloaded import HERE, compiled, environment, python, run

from vgpu.native import CardLimit, Limits, Region, simulator

SOURCES = HERE.parents[1] / "libvgpu" / "src"
WINDOW_S = 1.5
LOOP = """
from driver_client import *
start()
kernel = function({kernel!r})
print("ready", flush=True)
while True:
    ok(launch(kernel))
    {wait}
"""


def test_arithmetic() -> None:
    run([compiled("../pacer_units.c", f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}", str(SOURCES / "costs.c"))], {})


@contextmanager
def loops(env: dict[str, str], kernel: str, *, processes: int = 1, sync: bool = True) -> Iterator[None]:
    """Processes that do nothing but launch."""
    script = LOOP.format(kernel=kernel, wait="ok(cu.cuCtxSynchronize())" if sync else "pass")
    running = []
    try:
        for _ in range(processes):
            running.append(subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True))
            assert running[-1].stdout
            assert running[-1].stdout.readline() == "ready\n"
        yield
        assert [process.poll() for process in running] == [None] * processes
    finally:
        for process in running:
            process.kill()
            process.communicate()


def share(folder: Path) -> float:
    """Percent of a window in which the first card was busy."""
    busy, begun = simulator.cards(folder / "cards")[0].busy_ns, time.monotonic()
    while time.monotonic() < begun + WINDOW_S:
        time.sleep(0.05)
    return (simulator.cards(folder / "cards")[0].busy_ns - busy) / (time.monotonic() - begun) / 1e7


def region(folder: Path, policy: str = "fixed", cores: int = 30, memory: int | None = None) -> Region:
    simulator.create(folder / "cards", "T4")
    uuid = simulator.cards(folder / "cards")[0].uuid
    (folder / "region").mkdir()
    return Region.create(folder / "region", Limits((CardLimit(uuid, memory, cores=cores),), core_policy=policy))  # type: ignore[arg-type]  # a plain str


# Above the limit is always wrong; far below it can come from a test machine with no time for the launching thread.
@pytest.mark.parametrize(
    ("kernel", "sync", "processes"),
    [("spin_100us", True, 1), ("spin_2ms", True, 2), ("spin_2ms", False, 1), ("spin_50ms", True, 1)],
)
def test_a_fixed_share_holds(tmp_path: Path, kernel: str, sync: bool, processes: int) -> None:
    with (
        region(tmp_path),
        loops(environment(tmp_path, VGPU_DIR=str(tmp_path / "region")), kernel, processes=processes, sync=sync),
    ):
        assert 10 < share(tmp_path) < 36


@pytest.mark.parametrize("policy", ["none", "elastic"])
def test_a_share_binds_only_where_the_policy_says_so(tmp_path: Path, policy: str) -> None:
    with (
        region(tmp_path, policy),
        loops(environment(tmp_path, VGPU_DIR=str(tmp_path / "region")), "spin_5ms", sync=False),
    ):
        # elastic without an arbiter that lives is fixed
        assert (share(tmp_path) > 40) == (policy == "none")


def test_a_changed_limit_is_followed(tmp_path: Path) -> None:
    with region(tmp_path, cores=100) as limited:
        uuid = limited.limits().cards[0].uuid
        with loops(environment(tmp_path, VGPU_DIR=str(tmp_path / "region")), "spin_5ms", sync=False):
            assert share(tmp_path) > 40
            limited.set_limits(Limits((CardLimit(uuid, None, cores=20),)))
            deadline = time.monotonic() + 30
            while share(tmp_path) > 24:
                assert time.monotonic() < deadline, "the new limit never held"


def test_what_ran_is_counted(tmp_path: Path) -> None:
    script = """
from driver_client import *
start()
kernel = function("spin_1ms")
for _ in range(100):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
ok(launch(kernel))
"""
    with region(tmp_path) as limited:
        python(script, environment(tmp_path, VGPU_DIR=str(tmp_path / "region")))
        card = limited.usage().cards[0]
        assert card.launches == 101
        assert 90e6 < card.gpu_ns < 150e6
        assert card.throttled_ns > 0


ROUTES = {
    "cuLaunchKernel": "cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None)",
    "cuLaunchKernel_ptsz": "cu.cuLaunchKernel_ptsz(kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None)",
    "cuLaunchKernelEx": "cu.cuLaunchKernelEx(byref(config), kernel, None, None)",
    "cuLaunchKernelEx_ptsz": "cu.cuLaunchKernelEx_ptsz(byref(config), kernel, None, None)",
    "cuLaunchCooperativeKernel": "cu.cuLaunchCooperativeKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, None)",
    "cuGraphLaunch": "cu.cuGraphLaunch(executable, None)",
    "cuGraphLaunch_ptsz": "cu.cuGraphLaunch_ptsz(executable, None)",
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_way_to_run_work_is_paid(tmp_path: Path, route: str) -> None:
    script = f"""
from driver_client import *

class Config(Structure):
    _fields_ = [("shape", c_uint * 7), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint)]

start()
kernel, stream, graph, executable = function("spin_4ms"), c_void_p(), c_void_p(), c_void_p()
config = Config(shape=(1, 1, 1, 32, 1, 1, 0))
ok(cu.cuStreamCreate(byref(stream), 1))
ok(cu.cuStreamBeginCapture_v2(stream, 0))
ok(launch(kernel, stream.value))
ok(cu.cuStreamEndCapture(stream, byref(graph)))
ok(cu.cuGraphInstantiateWithFlags(byref(executable), graph, c_ulonglong(0)))
for _ in range(10):
    ok({ROUTES[route]})
    ok(cu.cuCtxSynchronize())
ok({ROUTES[route]})
"""
    with region(tmp_path) as limited:
        python(script, environment(tmp_path, VGPU_DIR=str(tmp_path / "region")))
        card = limited.usage().cards[0]
        assert card.launches == 11
        assert 36e6 < card.gpu_ns < 60e6


CAPTURE = """
from driver_client import *
start()
kernel, stream, graph, executable = function("spin_20ms"), c_void_p(), c_void_p(), c_void_p()
ok(cu.cuStreamCreate(byref(stream), 1))
for _ in range(3):
    ok(launch(kernel, stream.value))
ok(cu.cuStreamSynchronize(stream))
ok(cu.cuStreamBeginCapture_v2(stream, 0))
for _ in range(50):
    ok(launch(kernel, stream.value))
pointer = c_uint64()
ok(cu.cuMemAllocAsync(byref(pointer), c_size_t(MIB), stream))
ok(cu.cuMemFreeAsync(pointer, stream))
ok(cu.cuStreamEndCapture(stream, byref(graph)))
print("captured")
"""


def test_captured_launches_are_neither_paid_nor_disturbed(tmp_path: Path) -> None:
    with region(tmp_path, cores=1, memory=1 << 30) as limited:
        # 50 launches of 20 ms at 1 % would take 100 seconds
        assert python(CAPTURE, environment(tmp_path, VGPU_DIR=str(tmp_path / "region"))) == ["captured"]
        assert limited.usage().cards[0].launches == 3
