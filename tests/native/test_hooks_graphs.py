"""Memory of graphs under a limit of 1000 MiB: the driver's reserve for them is charged, and never grows beyond it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from cases.cases_slice import slice_of
from preloaded import MIB, environment, python

from vgpu.native import simulator

PRELUDE = """
from driver_client import *
from graph_client import *
mine = start()
stream, other = make_stream(), make_stream()
run = lambda execution, on=stream: cu.cuGraphLaunch(execution, on)
wait = lambda: ok(cu.cuCtxSynchronize())
held = lambda: (used() // MIB, memory(RESERVED) // MIB)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return slice_of(tmp_path)


def test_a_graph_that_runs_may_be_launched_again(env: dict[str, str]) -> None:
    """Its memory cannot be trimmed during that time, and the launch needs no more."""
    script = """
busy = function("spin_200ms")
one, same = taking(640 * MIB), taking(640 * MIB)
ok(launch(busy, stream.value))
print([run(one), run(one), run(same), run(one)], held(), run(taking(640 * MIB), other), held())
wait()
print(run(taking(640 * MIB), other), held(), trim(), held())
"""
    assert python(PRELUDE + script, env) == ["[0, 0, 0, 0] (640, 640) 2 (640, 640)", "0 (640, 640) 0 (0, 0)"]


def test_memory_that_graphs_keep_is_given_back_before_a_refusal(env: dict[str, str]) -> None:
    script = """
print(run(taking(640 * MIB)), wait(), held(), alloc(900 * MIB)[0], held())
print(run(taking(96 * MIB)), wait(), held(), run(taking(128 * MIB)))
"""
    assert python(PRELUDE + script, env) == ["0 None (640, 640) 0 (900, 0)", "0 None (996, 96) 2"]


def test_what_a_graph_leaves_is_charged_until_it_is_freed_and_trimmed(env: dict[str, str]) -> None:
    script = """
graph = make_graph()
pointer = add_alloc(graph, 640 * MIB)
execution = instance(graph)
print(run(execution), held(), run(taking(480 * MIB)), alloc(480 * MIB)[0], free(pointer), held())
print(run(execution), held(), free_async(pointer, stream.value), cu.cuGraphExecDestroy(execution))
print(alloc(480 * MIB)[0], held())
"""
    assert python(PRELUDE + script, env) == ["0 (640, 640) 2 2 0 (640, 640)", "0 (640, 640) 0 0", "0 (480, 0)"]


def test_addresses_that_a_graph_uses_again_count_once(env: dict[str, str]) -> None:
    script = """
graph = make_graph()
for _ in range(20):
    ok(add_free(graph, add_alloc(graph, 320 * MIB)))
print(run(instance(graph)), held())
graph = make_graph()
pointers = [add_alloc(graph, 320 * MIB) for _ in range(4)]
print([add_free(graph, pointer) for pointer in pointers], run(instance(graph)), held())
"""
    assert python(PRELUDE + script, env) == ["0 (320, 320)", "[0, 0, 0, 0] 2 (0, 0)"]


def test_a_threads_own_streams_of_two_contexts_run_at_once(env: dict[str, str]) -> None:
    """They have one name; still, the graphs on them need memory of their own."""
    script = """
OWN = 2  # CU_STREAM_PER_THREAD
second = c_void_p()
busy, one = function("spin_20000ms"), taking(640 * MIB)
ok(cu.cuCtxCreate_v2(byref(second), 0, 0))
other_busy, two = function("spin_20000ms"), taking(640 * MIB)
ok(launch(other_busy, OWN))
ok(cu.cuCtxPopCurrent_v2(byref(second)))
ok(launch(busy, OWN))
print(run(one, OWN), cu.cuCtxPushCurrent_v2(second), run(two, OWN), memory(RESERVED) // MIB)
"""
    assert python(PRELUDE + script, env) == ["0 0 2 640"]


def test_an_upload_reserves_and_is_refused_as_a_launch_is(env: dict[str, str]) -> None:
    script = """
class Parameters(Structure):
    _fields_ = [("flags", c_uint64), ("stream", c_void_p), ("node", c_void_p), ("result", c_int)]
upload = lambda size: (graph := make_graph(), add_free(graph, add_alloc(graph, size)))[0]
with_upload = lambda size: cu.cuGraphInstantiateWithParams(byref(c_void_p()), upload(size), byref(given))
given = Parameters(flags=2, stream=stream)
print(cu.cuGraphUpload(taking(320 * MIB), stream), held(), cu.cuGraphUpload(taking(1200 * MIB), stream))
wait(), trim()
print(with_upload(320 * MIB), given.result, held(), with_upload(1200 * MIB), given.result != 0, held())
"""
    assert python(PRELUDE + script, env) == ["0 (320, 320) 2", "0 0 (320, 320) 2 True (0, 0)"]


def test_a_graph_whose_memory_cannot_be_read_is_not_instantiated(tmp_path: Path) -> None:
    """Here its second allocation went with a context. Nothing could pay for its memory. Found by the fuzz target."""
    script = """
class Parameters(Structure):
    _fields_ = [("flags", c_uint64), ("stream", c_void_p), ("node", c_void_p), ("result", c_int)]
primary, graph, made = c_void_p(), make_graph(), c_void_p(7)
ok(cu.cuDevicePrimaryCtxRetain(byref(primary), device(1)))
add_alloc(graph, 64 * MIB), add_alloc(graph, 64 * MIB, 1)
ok(cu.cuDevicePrimaryCtxReset_v2(device(1)))
given = Parameters(flags=2, stream=stream)
print(cu.cuGraphInstantiateWithParams(byref(made), graph, byref(given)), given.result != 0, made.value, held())
print(cu.cuGraphInstantiateWithFlags(byref(made), graph, c_uint64(0)), made.value, held())
"""
    assert python(PRELUDE + script, slice_of(tmp_path, cards="T4x2")) == ["1 True 7 (0, 0)", "1 7 (0, 0)"]


def test_an_upload_into_a_capture_is_charged_like_any_other(env: dict[str, str]) -> None:
    """A capture records launches, never uploads: a driver that does not refuse one does it at once (fuzz target)."""
    script = """
execution, too_much, graph = taking(320 * MIB), taking(1200 * MIB), c_void_p()
ok(cu.cuStreamBeginCapture_v2(stream, 2))
print(cu.cuGraphUpload(execution, stream), held(), cu.cuGraphUpload(too_much, stream), held())
print(cu.cuStreamEndCapture(stream, byref(graph)))
"""
    assert python(PRELUDE + script, env) == ["0 (320, 320) 2 (320, 320)", "0"]
    assert python(PRELUDE + script, env | {"VGPU_SIM_STRICT": "captures"}) == ["900 (0, 0) 2 (0, 0)", "901"]


def test_a_launch_into_a_capture_is_the_drivers_to_refuse(env: dict[str, str], tmp_path: Path) -> None:
    script = """
execution, graph = taking(1200 * MIB), c_void_p()
ok(cu.cuStreamBeginCapture_v2(stream, 2))
print(run(execution), cu.cuStreamEndCapture(stream, byref(graph)), run(None), cu.cuGraphUpload(None, stream))
print(cu.cuGraphExecDestroy(execution), cu.cuGraphExecDestroy(execution), run(execution))
"""
    assert python(PRELUDE + script, env) == python(PRELUDE + script, environment(tmp_path, preload=False))


def test_each_card_pays_for_what_is_allocated_on_it(tmp_path: Path) -> None:
    script = """
primary = c_void_p()
ok(cu.cuDevicePrimaryCtxRetain(byref(primary), device(1)))
print(run(taking(320 * MIB, where=1)), held(), memory(RESERVED, 1) // MIB)
ok(cu.cuCtxPushCurrent_v2(primary))
print(used() // MIB)
ok(cu.cuCtxPopCurrent_v2(byref(primary)))
print(run(taking(1200 * MIB, where=1)))
"""
    assert python(PRELUDE + script, slice_of(tmp_path, cards="T4x2")) == ["0 (0, 0) 320", "320", "2"]


RACER = (
    PRELUDE
    + """
import sys
execution = taking(600 * MIB)
print("ready", flush=True)
for line in sys.stdin:
    result = run(execution)
    wait()
    print(result, flush=True)
    sys.stdin.readline()
    trim()
    print("trimmed", flush=True)
"""
)


def racer(env: Mapping[str, str]) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", RACER], env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert heard(started) == "ready"
    return started


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def test_of_two_processes_that_launch_at_once_one_is_refused(env: dict[str, str], tmp_path: Path) -> None:
    both = [racer(env), racer(env)]
    for _ in range(50):
        for process in both:
            tell(process)
        answers = sorted(heard(process) for process in both)
        assert answers == ["0", "2"]
        (card,) = simulator.cards(tmp_path / "cards")
        assert card.used <= 1000 * MIB + 2 * contexts(tmp_path)
        for process in both:
            tell(process)
        assert [heard(process) for process in both] == ["trimmed", "trimmed"]
    for process in both:
        process.communicate()


def contexts(folder: Path) -> int:
    """More than one context costs on the card."""
    return simulator.cards(folder / "cards")[0].memory // 16


def test_a_killed_process_leaves_nothing(env: dict[str, str]) -> None:
    process = racer(env)
    tell(process)
    assert heard(process) == "0"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert python(PRELUDE + "print(run(taking(900 * MIB)), held())", env) == ["0 (928, 928)"]


def test_threads_that_launch_at_once_never_pass_the_limit(env: dict[str, str]) -> None:
    script = """
import threading
graphs = [taking(96 * MIB) for _ in range(4)] + [taking(480 * MIB) for _ in range(2)]
streams = [make_stream() for _ in graphs]
answers, most = set(), 0

def work(number):
    ok(cu.cuCtxSetCurrent(mine))
    for turn in range(40):
        answers.add(run(graphs[number], streams[number]))
        cu.cuStreamSynchronize(streams[number])
        if turn % 8 == number:
            alloc(900 * MIB)

threads = [threading.Thread(target=work, args=(number,)) for number in range(len(graphs))]
[thread.start() for thread in threads]
while any(thread.is_alive() for thread in threads):
    most = max(most, used() // MIB, memory(RESERVED) // MIB)
print(answers <= {0, 2}, 0 in answers, most <= 1000)
"""
    assert python(PRELUDE + script, env) == ["True True True"]
