"""Reported bugs of intercept libraries about stream capture and graphs."""

from pathlib import Path

import pytest
from cases_slice import slice_of
from preloaded import environment, python

PRELUDE = """
from driver_client import *
RELAXED, THREAD_LOCAL, GLOBAL = 2, 1, 0
stream, graph, execution = c_void_p(), c_void_p(), c_void_p()

def begin(mode):
    ok(cu.cuStreamBeginCapture_v2(stream, mode))

def end():
    return cu.cuStreamEndCapture(stream, byref(graph))

def instantiate():
    ok(cu.cuGraphInstantiateWithFlags(byref(execution), graph, c_ulonglong(0)))

def run():
    return cu.cuGraphLaunch(execution, stream) or cu.cuStreamSynchronize(stream)

def prepared():
    mine = start()
    ok(cu.cuStreamCreate(byref(stream), 1))
    return mine
"""


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_an_allocation_under_capture_works(tmp_path: Path, env: dict[str, str], mode: str) -> None:
    """Case 23: an allocation during a capture crashes; here the graph keeps its nodes and runs repeatedly."""
    script = f"""
prepared()
begin({mode})
status, pointer = alloc_async(64 * MIB, stream.value)
kernel_runs = cu.cuMemsetD8Async(c_uint64(pointer), 7, c_size_t(MIB), stream)
print(status, pointer != 0, kernel_runs, free_async(pointer, stream.value), end())
count = c_size_t()
ok(cu.cuGraphGetNodes(graph, None, byref(count)))
instantiate()
print(count.value, [run() for _ in range(3)], cu.cuGraphExecDestroy(execution), cu.cuGraphDestroy(graph))
"""
    assert python(PRELUDE + script, env) == python(PRELUDE + script, environment(tmp_path, preload=False))
    after = "print(used() // MIB, cu.cuDeviceGraphMemTrim(0), used())"
    assert python(PRELUDE + script + after, env)[-1] == "64 0 0"


def test_a_graph_that_does_not_fit_is_refused_alone(env: dict[str, str]) -> None:
    """Case 23, another of its kind: memory that only a graph takes passes the limit, or ends the program."""
    script = """
from graph_client import *
mine = prepared()
print(alloc(500 * MIB)[0])
large, small = taking(600 * MIB), taking(400 * MIB)
print(cu.cuGraphLaunch(large, stream), cu.cuGraphUpload(large, stream), used() // MIB, memory(RESERVED))
print([cu.cuGraphLaunch(small, stream) for _ in range(3)], used() // MIB - 500, memory(RESERVED) // MIB)
print(alloc(200 * MIB)[0], cu.cuStreamSynchronize(stream), alloc(500 * MIB)[0], used() // MIB)
"""
    assert python(PRELUDE + script, env) == ["0", "2 2 500 0", "[0, 0, 0] 416 416", "0 0 2 700"]


def test_a_captured_allocation_takes_nothing_yet(env: dict[str, str]) -> None:
    """Cases 23, 74, another of their kind: a capture is charged at once, and fails where its graph would never run."""
    script = """
prepared()
print(alloc(600 * MIB)[0])
begin(GLOBAL)
status, pointer = alloc_async(640 * MIB, stream.value)
print(status, free_async(pointer, stream.value), end(), used() // MIB, alloc(400 * MIB)[0], cu.cuGraphDestroy(graph))
"""
    assert python(PRELUDE + script, env) == ["0", "0 0 0 600 0 0"]


def test_allocations_around_a_capture_keep_their_charge(env: dict[str, str]) -> None:
    """Case 23, another of its kind: memory from before a relaxed capture, and from inside it on another stream."""
    script = """
prepared()
other = c_void_p()
ok(cu.cuStreamCreate(byref(other), 1))
before = alloc_async(320 * MIB, other.value)[1]
ok(cu.cuStreamSynchronize(other))
cu.cuThreadExchangeStreamCaptureMode(byref(c_int(RELAXED)))
begin(RELAXED)
inside = [alloc(200 * MIB), alloc(500 * MIB), alloc_async(320 * MIB, other.value)]
print([status for status, _ in inside], free_async(before, other.value), end())
ok(cu.cuStreamSynchronize(other))
print(used() // MIB, free(inside[0][1]), free_async(inside[2][1], other.value), cu.cuStreamSynchronize(other), used())
"""
    assert python(PRELUDE + script, env) == ["[0, 2, 0] 0 0", "520 0 0 0 0"]


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL"])
def test_nothing_is_called_that_a_capture_forbids(tmp_path: Path, mode: str) -> None:
    """Case 74: a library that synchronises or measures inside a capture breaks it; launches there cost nothing, too."""
    script = f"""
mine = prepared()
kernel = function("k_100us")
begin({mode})
answers = [alloc_async(16 * MIB, stream.value)]
for _ in range(50):
    ok(launch(kernel, stream.value))
    answers.append(alloc_async(MIB, stream.value))
for _, pointer in answers:
    ok(free_async(pointer, stream.value))
print(end(), {{status for status, _ in answers}})
instantiate()
print([run() for _ in range(2)])
"""
    env = slice_of(tmp_path, CUDA_DEVICE_SM_LIMIT="50")
    assert (
        python(PRELUDE + script, env)
        == python(PRELUDE + script, environment(tmp_path, preload=False))
        == ["0 {0}", "[0, 0]"]
    )


def test_a_refused_allocation_of_another_thread_leaves_the_capture_whole(env: dict[str, str]) -> None:
    """Case 74, another of its kind: pools may not be trimmed while a neighbour captures, yet a refusal would."""
    script = """
import threading
mine = prepared()
keep, pool = c_uint64(2**64 - 1), c_void_p()
ok(cu.cuDeviceGetDefaultMemPool(byref(pool), 0))
ok(cu.cuMemPoolSetAttribute(pool, 4, byref(keep)))
other = c_void_p()
ok(cu.cuStreamCreate(byref(other), 1))
ok(free_async(alloc_async(640 * MIB, other.value)[1], other.value))
ok(cu.cuStreamSynchronize(other))
results = []

def neighbour():
    ok(cu.cuCtxSetCurrent(mine))
    cu.cuThreadExchangeStreamCaptureMode(byref(c_int(RELAXED)))
    ordered = [alloc_async(size * MIB, other.value)[0] for size in (2000, 32)]
    results.append([*ordered, alloc(2000 * MIB)[0]])

begin(GLOBAL)
thread = threading.Thread(target=neighbour)
thread.start()
thread.join()
print(results, end(), alloc(900 * MIB)[0])
"""
    assert python(PRELUDE + script, env) == ["[[2, 0, 2]] 0 0"]
