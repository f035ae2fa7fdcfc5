"""The core limit: its arithmetic, and what share of a card a limited container really gets."""

import time
from pathlib import Path

import pytest
from core_share import make_region, running, share, within
from preloaded import HERE, compiled, python, run

from vgpu.native import CardLimit, Limits
from vgpu.native.region import CorePolicy

SOURCES = HERE.parents[1] / "libvgpu" / "src"


UNITS = {
    "pacer_units": ("pacer/bounds", "pacer/costs", "pacer/busy_intervals", "pacer/launch_sources"),
    "pacer_launch_units": (
        "pacer/settle",
        "pacer/costs",
        "pacer/busy_intervals",
        "pacer/launch_sources",
        "pacer/launch_thread",
        "pacer/owed",
        "pacer/firsts",
        "pacer/inspect",
    ),
    "contention_units": ("pacer/contention",),
    "inspect_units": ("pacer/inspect",),
    "share_units": ("pacer/core_share",),
}


@pytest.mark.parametrize("name", UNITS)
def test_arithmetic(name: str) -> None:
    includes = (f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}")
    run([compiled(f"../{name}.c", *includes, *(str(SOURCES / f"{source}.c") for source in UNITS[name]))], {})


SYNC = "ok(launch(kernel)); wait()"
ASYNC = "ok(launch(kernel))"


def spin(duration: str) -> str:
    return f"kernel = function('spin_{duration}')"


# Above the limit is always wrong; far below it can come from a test machine with no time for the launching thread.
@pytest.mark.parametrize(
    ("duration", "step", "processes"), [("100us", SYNC, 1), ("2ms", SYNC, 2), ("2ms", ASYNC, 1), ("50ms", SYNC, 1)]
)
def test_a_fixed_share_holds(tmp_path: Path, duration: str, step: str, processes: int) -> None:
    with (
        make_region(tmp_path) as region,
        running(within(tmp_path, region), step, spin(duration), processes=processes),
    ):
        assert 10 < share(tmp_path, 1.5) < 36


@pytest.mark.parametrize("policy", ["none", "elastic"])
def test_a_share_binds_only_where_the_policy_says_so(tmp_path: Path, policy: CorePolicy) -> None:
    with (
        make_region(tmp_path, policy=policy) as region,
        running(within(tmp_path, region), ASYNC, spin("5ms")),
    ):
        # elastic without an arbiter that lives is fixed
        assert (share(tmp_path) > 40) == (policy == "none")


def test_times_of_one_kernel_that_differ_are_paid(tmp_path: Path) -> None:
    prepare = """
kernel = function("spin_arg_us")
times = [(c_void_p * 1)(cast(pointer(c_uint(us)), c_void_p)) for us in (10, 10000)]
def one(values):
    return cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, values, None)
"""
    prepare = "from ctypes import cast, pointer" + prepare
    with (
        make_region(tmp_path) as region,
        running(within(tmp_path, region), "ok(one(times[0]) or one(times[1]))", prepare),
    ):
        share(tmp_path, 0.5)
        assert 10 < share(tmp_path, 1.5) < 36


@pytest.mark.parametrize("kernels", [1, 4])
def test_streams_that_overlap_pay_for_the_time_that_the_card_was_busy(tmp_path: Path, kernels: int) -> None:
    prepare = f"""
{spin("1ms")}
streams = [c_void_p() for _ in range(4)]
for stream in streams:
    ok(cu.cuStreamCreate(byref(stream), 1))
"""
    step = "[ok(launch(kernel, stream.value)) for stream in streams]"
    with (
        make_region(tmp_path) as region,
        running(within(tmp_path, region, VGPU_SIM_TIME=f"kernels={kernels}"), step, prepare),
    ):
        share(tmp_path, 0.5)
        assert 10 < share(tmp_path) < 36


def test_a_changed_limit_is_followed(tmp_path: Path) -> None:
    with make_region(tmp_path, cores=100) as limited:
        uuid = limited.limits().cards[0].uuid
        with running(within(tmp_path, limited), ASYNC, spin("5ms")):
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
    with make_region(tmp_path) as limited:
        python(script, within(tmp_path, limited))
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
    with make_region(tmp_path) as limited:
        python(script, within(tmp_path, limited))
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
    with make_region(tmp_path, cores=1, memory=1 << 30) as limited:
        # 50 launches of 20 ms at 1 % would take 100 seconds
        assert python(CAPTURE, within(tmp_path, limited)) == ["captured"]
        assert limited.usage().cards[0].launches == 3
