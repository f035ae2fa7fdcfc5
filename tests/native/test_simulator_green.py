"""Green contexts: parts of a primary context with multiprocessors of their own (cuda.h, "Green Contexts")."""

from pathlib import Path

import pytest
from simulated import Machine

MS = 1_000_000
GREEN = """
from simulator_client import *
SM = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
primary = context()

def split(count, groups=2, flags=0):
    return ok(cu.cuDevSmResourceSplitByCount(groups, ok(cu.cuDeviceGetDevResource(0, SM)), flags, count))

def green(count=16):
    groups, made, rest = split(count, 1)
    return ok(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc([groups[0]], 1)), 0, 1))

def stream_of(which):
    return ok(cu.cuGreenCtxStreamCreate(which, 1, 0))
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "A100-40")


@pytest.mark.parametrize(
    ("spec", "asked", "sizes", "left"),
    [
        ("A100-40", 16, [16, 16], 76),
        ("A100-40", 3, [4, 4], 100),
        ("T4", 3, [4, 4], 32),
        ("H100", 20, [24, 24], 84),
        ("H100", 0, [8, 8], 116),
    ],
)
def test_multiprocessors_are_split_as_the_architecture_wants(
    tmp_path: Path, spec: str, asked: int, sizes: list[int], left: int
) -> None:
    found = Machine(tmp_path / spec, spec).run(
        f"{GREEN}groups, made, rest = split({asked})\nreport([[g.sm.smCount for g in groups], made, rest.sm.smCount])"
    )
    assert found == [sizes, 2, left]


def test_what_cannot_be_split_is_refused(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
groups, made, rest = split(16)
whole = ok(cu.cuDeviceGetDevResource(0, SM))
report([
    code(cu.cuDevSmResourceSplitByCount(2, whole, 0, 200)),
    code(cu.cuDevSmResourceSplitByCount(2, groups[0], 0, 4)),
    code(cu.cuDevSmResourceSplitByCount(2, cu.CUdevResource(), 0, 4)),
    code(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_INVALID)),
    code(cu.cuDevResourceGenerateDesc([cu.CUdevResource()], 1)),
])
"""
    )
    assert found == [1, 915, 914, 914, 914]


def test_everything_made_in_one_is_the_primary_contexts(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
before = free()
g = green()
view = ok(cu.cuCtxFromGreenCtx(g))
ok(cu.cuCtxSetCurrent(view))
address = ok(cu.cuMemAlloc(1 << 20))
f = kernel("spin_10ms")
launch(f, stream_of(g))
launch(f)
ok(cu.cuCtxSynchronize())
same = int(ok(cu.cuCtxGetCurrent())) == int(view)
held = ok(cu.cuCtxGetDevResource(view, SM)).sm.smCount
ok(cu.cuCtxSetCurrent(primary))
launch(f)
ok(cu.cuGreenCtxDestroy(g))
used = before - free()
ok(cu.cuCtxSynchronize())
ok(cu.cuMemFree(address))
report([same, held, used >> 20, code(cu.cuCtxSetCurrent(view)), code(cu.cuGreenCtxDestroy(g))])
"""
    )
    assert found == [True, 16, 3, 201, 201]
    assert machine.card().busy_ns == 30 * MS


def test_its_streams_name_it_and_are_detached_with_it(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
g = green()
view = ok(cu.cuCtxFromGreenCtx(g))
s, plain = stream_of(g), ok(cu.cuStreamCreate(1))
ids = [int(ok(cu.cuStreamGetGreenCtx(s))) == int(g), int(ok(cu.cuStreamGetGreenCtx(plain)))]
base, its = ok(cu.cuStreamGetCtx_v2(s)) if hasattr(cu, "cuStreamGetCtx_v2") else (primary, g)
ids += [int(base) == int(primary), int(its) == int(g), int(ok(cu.cuStreamGetCtx(plain))) == int(primary)]
f = kernel("spin_1ms")
launch(f, s)
ok(cu.cuStreamSynchronize(s))
ok(cu.cuGreenCtxDestroy(g))
event = ok(cu.cuEventCreate(0))
codes = [code(cu.cuStreamSynchronize(s)), code(cu.cuStreamQuery(s)), code(cu.cuEventRecord(event, s)),
         code(cu.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, 0, 0)), code(cu.cuStreamDestroy(s))]
report([ids, codes, code(cu.cuGreenCtxStreamCreate(g, 1, 0))])
"""
    )
    assert found == [[True, 0, True, True, True], [917, 917, 917, 917, 0], 201]


def test_handles_come_back_and_stand_for_the_new_one(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
first = green(16)
view = int(ok(cu.cuCtxFromGreenCtx(first)))
handle, id_before = int(first), ok(cu.cuGreenCtxGetId(first))
ok(cu.cuGreenCtxDestroy(first))
again = green(32)
both = {handle, view} & {int(again), int(ok(cu.cuCtxFromGreenCtx(again)))}
report([bool(both), ok(cu.cuGreenCtxGetId(again)) == id_before, ok(cu.cuGreenCtxGetDevResource(again, SM)).sm.smCount])
"""
    )
    assert found == [True, False, 32]


def test_events_of_a_green_context_wait_for_its_work_alone(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
g, h = green(16), green(32)
a, b = stream_of(g), stream_of(h)
of_g, of_all = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
short, long = kernel("spin_20ms"), kernel("spin_1500ms")
launch(short, a)
launch(long, b)
ok(cu.cuGreenCtxRecordEvent(g, of_g))
ok(cu.cuCtxRecordEvent(primary, of_all))
ok(cu.cuEventSynchronize(of_g))
codes = [code(cu.cuEventQuery(of_all))]
ok(cu.cuGreenCtxWaitEvent(g, of_all))
launch(short, a)
ok(cu.cuStreamSynchronize(a))
codes.append(code(cu.cuStreamQuery(b)))
report(codes)
"""
    )
    assert found == [600, 0]


def test_a_capture_and_an_event_of_all_exclude_each_other(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
g = green()
s, event = stream_of(g), ok(cu.cuEventCreate(2))
ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
codes = [code(cu.cuGreenCtxRecordEvent(g, event)), code(cu.cuStreamEndCapture(s))]
ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ok(cu.cuGreenCtxDestroy(g))
report([*codes, code(cu.cuStreamEndCapture(s)), code(cu.cuStreamDestroy(s))])
"""
    )
    assert found == [900, 901, 917, 0]


@pytest.mark.parametrize(("kernels", "side_by_side"), [("1", False), ("8", True)])
def test_two_of_them_run_side_by_side_where_kernels_do(machine: Machine, kernels: str, side_by_side: bool) -> None:
    machine.run(
        GREEN
        + """
f = kernel("spin_100ms")
streams = [stream_of(green(48)), stream_of(green(48))]
[launch(f, s, blocks=100000) for s in streams]
[ok(cu.cuStreamSynchronize(s)) for s in streams]
""",
        VGPU_SIM_TIME=f"kernels={kernels}",
    )
    assert (machine.card().busy_ns < 150 * MS) == side_by_side


def test_a_primary_context_that_is_reset_takes_them_along(machine: Machine) -> None:
    found = machine.run(
        GREEN
        + """
g = green()
view = ok(cu.cuCtxFromGreenCtx(g))
ok(cu.cuCtxSetCurrent(view))
ok(cu.cuDevicePrimaryCtxReset(0))
report([code(cu.cuGreenCtxGetId(g)), code(cu.cuMemGetInfo()), code(cu.cuGreenCtxDestroy(g))])
"""
    )
    assert found == [201, 709, 201]


@pytest.mark.parametrize("driver", ["12.4", "11.8"])
def test_older_drivers_have_none(machine: Machine, driver: str) -> None:
    found = machine.run(
        f"""from simulator_client import *
context()
import ctypes
lib, at, status = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
lib.cuGetProcAddress_v2(b"cuGreenCtxCreate", ctypes.byref(at), {driver.replace(".", "0")}0, ctypes.c_uint64(0),
                        ctypes.byref(status))
report(bool(at.value))
""",
        VGPU_SIM_DRIVER=driver,
    )
    assert found == (driver == "12.4")
