"""During an open capture, nothing is freed, polled or measured. So the library must never miss its end."""

from pathlib import Path

import pytest
from cases.cases_slice import slice_of
from preloaded import python

PRELUDE = """
from driver_client import *
from graph_client import *
import threading
mine = start()
stream, other, graph, event = make_stream(), make_stream(), c_void_p(), c_void_p()
begin = lambda on, mode=2: ok(cu.cuStreamBeginCapture_v2(on, mode))
end = lambda on=stream: cu.cuStreamEndCapture(on, byref(graph))

def there(work):
    results = []
    def body():
        ok(cu.cuCtxSetCurrent(mine))
        results.append(work())
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return results[0]

def gives_back():
    '''Whether a pool's unused memory goes back to the card for somebody else, which an open capture forbids.'''
    keep, pool = c_uint64(2**64 - 1), c_void_p()
    ok(cu.cuDeviceGetDefaultMemPool(byref(pool), 0))
    ok(cu.cuMemPoolSetAttribute(pool, 4, byref(keep)))
    ok(free_async(alloc_async(640 * MIB, other.value)[1], other.value))
    status, pointer = alloc(900 * MIB)
    return status == 0 and free(pointer) == 0
"""
ENDS = {
    "its end": "print(end())",
    "the end of one that was invalidated": "begin(other); "
    "cu.cuStreamWaitEvent(stream, event, 0); print(end(other), end())",
    "the end of one that was not joined": "ok(cu.cuEventRecord(event, stream)); "
    "ok(cu.cuStreamWaitEvent(other, event, 0)); ok(launch(function('k_1us'), other.value)); print(end())",
    "the end of its stream": "print(cu.cuStreamDestroy_v2(stream))",
    "the end of its stream, as of old": "print(cu.cuStreamDestroy(stream))",
}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return slice_of(tmp_path)


@pytest.mark.parametrize("what", ENDS)
def test_a_capture_is_over_after(env: dict[str, str], what: str) -> None:
    script = f"""
ok(cu.cuEventCreate(byref(event), 0))
begin(stream)
before = gives_back()
{ENDS[what]}
print(before, gives_back())
"""
    assert python(PRELUDE + script, env)[-1] == "False True"


@pytest.mark.parametrize(
    "end", ["cuCtxDestroy_v2(theirs)", "cuDevicePrimaryCtxReset_v2(0)", "cuDevicePrimaryCtxRelease_v2(0)"]
)
def test_a_capture_is_over_with_its_context(env: dict[str, str], end: str) -> None:
    made = (
        "theirs = context()"
        if "theirs" in end
        else "theirs = c_void_p(); ok(cu.cuDevicePrimaryCtxRetain(byref(theirs), 0)); "
        "ok(cu.cuCtxPushCurrent_v2(theirs))"
    )
    script = f"""
{made}
begin(make_stream())
ok(cu.cuCtxPopCurrent_v2(byref(c_void_p())))
print(gives_back(), cu.{end}, gives_back())
"""
    assert python(PRELUDE + script, env) == ["False 0 True"]


def test_what_ends_no_capture_leaves_it_open(env: dict[str, str]) -> None:
    script = """
begin(stream, 1)
cu.cuThreadExchangeStreamCaptureMode(byref(c_int(2)))
print(there(lambda: end()), end(other), cu.cuStreamDestroy_v2(None), cu.cuStreamDestroy_v2(other) == 0)
other = make_stream()
print(gives_back(), end(), gives_back(), end(), gives_back())
"""
    assert python(PRELUDE + script, env) == ["908 401 400 True", "False 0 True 401 True"]


def test_a_stream_per_thread_is_each_threads_own(env: dict[str, str]) -> None:
    script = """
PER_THREAD = c_void_p(2)
cu.cuThreadExchangeStreamCaptureMode(byref(c_int(2)))
begin(PER_THREAD)
print(there(lambda: (begin(PER_THREAD), end(PER_THREAD))[1]), gives_back(), end(PER_THREAD), gives_back())
ok(cu.cuStreamBeginCapture_v2_ptsz(None, 2))
print(gives_back(), cu.cuStreamEndCapture_ptsz(None, byref(graph)), gives_back())
"""
    assert python(PRELUDE + script, env) == ["0 False 0 True", "False 0 True"]


def test_captures_into_a_graph_count_too(env: dict[str, str]) -> None:
    script = """
target = make_graph()
ok(cu.cuStreamBeginCaptureToGraph(stream, target, None, None, c_size_t(0), 2))
print(gives_back(), end(), graph.value == target.value, gives_back())
ok(cu.cuStreamBeginCaptureToGraph_ptsz(None, target, None, None, c_size_t(0), 2))
print(gives_back(), cu.cuStreamEndCapture_ptsz(None, byref(graph)), gives_back())
print(cu.cuStreamBeginCaptureToGraph(stream, None, None, None, c_size_t(0), 2), gives_back())
"""
    assert python(PRELUDE + script, env) == ["False 0 True True", "False 0 True", "1 True"]
