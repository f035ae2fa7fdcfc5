"""What a stream capture forbids, and how it breaks: the 900 series of errors."""

from pathlib import Path

import pytest
from simulated import Machine

CLIENT = """
from simulator_client import *
context()
M, F = cu.CUstreamCaptureMode, cu.CUstream_flags
NON_BLOCKING = F.CU_STREAM_NON_BLOCKING
stream, other = (ok(cu.cuStreamCreate(NON_BLOCKING)) for _ in range(2))
begin = lambda s, mode="GLOBAL": ok(cu.cuStreamBeginCapture(s, getattr(M, "CU_STREAM_CAPTURE_MODE_" + mode)))
end = lambda s: code(cu.cuStreamEndCapture(s))
k = kernel("k_100us")
def try_launch(s):
    return code(cu.cuLaunchKernel(k, 1, 1, 1, 32, 1, 1, 0, s, 0, 0))
event = lambda: ok(cu.cuEventCreate(0))
"""
#: cuMemAlloc and its kind change what a graph names or wait for the device
UNSAFE = {
    "cuMemAlloc": "cu.cuMemAlloc(10)",
    "cuMemFree": "cu.cuMemFree(p)",
    "cuMemAllocPitch": "cu.cuMemAllocPitch(10, 10, 4)",
    "cuMemAllocManaged": "cu.cuMemAllocManaged(10, 1)",
    "cuMemHostAlloc": "cu.cuMemHostAlloc(10, 0)",
    "cuMemFreeHost": "cu.cuMemFreeHost(h)",
    "cuArrayCreate": "cu.cuArrayCreate(shape)",
    "cuCtxSynchronize": "cu.cuCtxSynchronize()",
    "cuStreamSynchronize": "cu.cuStreamSynchronize(other)",
    "cuMemcpyDtoH": "cu.cuMemcpyDtoH(h, p, 10)",
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards")


def test_unsafe_calls_fail_under_a_global_capture_and_break_it(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + f"""
shape = cu.CUDA_ARRAY_DESCRIPTOR()
shape.Width, shape.NumChannels, shape.Format = 8, 1, cu.CUarray_format.CU_AD_FORMAT_FLOAT
results = {{}}
for name, call in {UNSAFE!r}.items():
    p, h = ok(cu.cuMemAlloc(10)), ok(cu.cuMemHostAlloc(10, 0))
    rest = free()
    begin(stream)
    first = code(eval(call))
    kept = free() == rest
    results[name] = [first, try_launch(stream), end(stream), code(eval(call)), kept]
report(results)
"""
    )
    assert found == {name: [900, 901, 901, 0, True] for name in UNSAFE}


def test_relaxed_captures_and_relaxed_threads_allow_them(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
begin(stream, "RELAXED")
p = ok(cu.cuMemAlloc(10))
results = [code(cu.cuMemFree(p)), end(stream)]
begin(stream)
ok(cu.cuThreadExchangeStreamCaptureMode(M.CU_STREAM_CAPTURE_MODE_RELAXED))
p = ok(cu.cuMemAlloc(10))
report([*results, code(cu.cuMemFree(p)), end(stream)])
"""
    )
    assert found == [0, 0, 0, 0]


def test_the_legacy_stream_cannot_wait_for_a_blocking_stream_under_capture(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
blocking = ok(cu.cuStreamCreate(0))
p = ok(cu.cuMemAlloc(100))
results = []
for call in (lambda: try_launch(0), lambda: code(cu.cuMemsetD8(p, 1, 10)), lambda: code(cu.cuMemAllocAsync(10, 0)),
        lambda: code(cu.cuEventRecord(event(), 0))):
    for s in (blocking, stream):
        begin(s, "RELAXED")
        results.append([call(), end(s)])
report(results)
"""
    )
    assert found == [[906, 901], [0, 0]] * 4


def test_forks_must_come_back(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
third = ok(cu.cuStreamCreate(NON_BLOCKING))
def fork(back):
    begin(stream)
    e, f, g = event(), event(), event()
    ok(cu.cuEventRecord(e, stream)), ok(cu.cuStreamWaitEvent(other, e, 0))
    launch(k, other)
    ok(cu.cuEventRecord(f, other)), ok(cu.cuStreamWaitEvent(third, f, 0))
    launch(k, third)
    ok(cu.cuEventRecord(g, third))
    if back == "late":
        launch(k, third)
    if back != "never":
        ok(cu.cuStreamWaitEvent(stream, f if back == "early" else g, 0))
    result = cu.cuStreamEndCapture(stream)
    after = [s.value for s in (ok(cu.cuStreamIsCapturing(x)) for x in (stream, other, third))]
    return [code(result), after]
report([fork("whole"), fork("never"), fork("early"), fork("late"), fork("whole")])
"""
    )
    none = [0, 0, 0]
    assert found == [[0, none], [904, none], [904, none], [904, none], [0, none]]


def test_captures_that_meet(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
outside, e = event(), event()
ok(cu.cuEventRecord(outside, other))
begin(stream)
results = [code(cu.cuStreamWaitEvent(stream, outside, 0)), end(stream)]
begin(stream), begin(other)
ok(cu.cuEventRecord(e, other))
results += [code(cu.cuStreamWaitEvent(stream, e, 0)), end(stream), end(other)]
begin(stream)
ok(cu.cuEventRecord(e, stream)), ok(cu.cuStreamWaitEvent(other, e, 0))
results += [code(cu.cuEventQuery(e)), code(cu.cuEventSynchronize(e)), end(other), end(stream)]
report(results)
"""
    )
    assert found == [905, 901, 902, 901, 901, 907, 907, 903, 901]


def test_a_graph_that_is_launched_into_a_capture_becomes_part_of_it(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
begin(stream)
launch(k, stream), launch(k, stream)
inner = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
begin(stream)
ok(cu.cuGraphLaunch(inner, stream))
launch(k, stream)
graph = ok(cu.cuStreamEndCapture(stream))
outer = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphLaunch(outer, stream))
ok(cu.cuStreamSynchronize(stream))
report(os.getpid())
"""
    )
    assert machine.process(found).launches == (3,)


def test_a_thread_finds_its_own_stream_of_a_context_again(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
own = cu.CUstream(cu.CU_STREAM_PER_THREAD)
begin(own, "RELAXED")
first = ok(cu.cuStreamGetId(own))
second_context = ok(cu.cuCtxCreate(None, 0, 0))
elsewhere = ok(cu.cuStreamGetId(own)) != first
ok(cu.cuCtxPopCurrent())
report([elsewhere, ok(cu.cuStreamGetId(own)) == first, end(own), code(cu.cuMemAlloc(10))])
"""
    )
    assert found == [True, True, 0, 0]


def test_a_graph_under_capture_is_not_destroyed_by_an_old_handle(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
begin(stream, "RELAXED")
old = ok(cu.cuStreamEndCapture(stream))
ok(cu.cuGraphDestroy(old))
begin(stream, "RELAXED")
report([code(cu.cuGraphDestroy(old)), try_launch(stream), end(stream)])
"""
    )
    assert found == [1, 0, 0]
