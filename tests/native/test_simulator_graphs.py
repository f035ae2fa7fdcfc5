"""Memory of graphs on a simulated card, as the CUDA programming guide describes it."""

from pathlib import Path

import pytest
from preloaded import environment, python

PRELUDE = """
from driver_client import *
from graph_client import *
start()
stream, other = make_stream(), make_stream()
base = used()
mib = lambda: [memory(a) // MIB for a in (USED, USED_HIGH, RESERVED, RESERVED_HIGH)] + [(used() - base) // MIB]
run = lambda execution, on=stream: cu.cuGraphLaunch(execution, on)
wait = lambda: ok(cu.cuCtxSynchronize())
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path, preload=False)


def test_the_first_launch_reserves_and_a_trim_gives_back(env: dict[str, str]) -> None:
    script = """
one, two = taking(64 * MIB), taking(64 * MIB)
print(mib())
print(run(one), run(one), run(two), wait(), mib())
print(trim(), mib(), reset(USED_HIGH), reset(RESERVED_HIGH), reset(USED), mib())
print(cu.cuGraphUpload(one, stream), memory(RESERVED) // MIB, cu.cuGraphExecDestroy(one), memory(RESERVED) // MIB)
"""
    assert python(PRELUDE + script, env) == [
        "[0, 0, 0, 0, 0]",
        "0 0 0 None [0, 64, 64, 64, 64]",
        "0 [0, 64, 0, 64, 0] 0 0 1 [0, 0, 0, 0, 0]",
        "0 64 0 64",
    ]


def test_streams_that_run_at_once_need_memory_of_their_own(env: dict[str, str]) -> None:
    script = """
graph = make_graph()
pointer = add_alloc(graph, 64 * MIB)
ok(cu.cuGraphDestroy(make_graph()))
long = function("spin_300ms")
one, two = taking(64 * MIB), taking(64 * MIB)
ok(launch(long, stream.value)), ok(launch(long, other.value))
print(run(one), run(two, other), mib()[2], trim(), mib()[2])
wait()
print(trim(), mib()[2], run(one), wait(), run(two, other), mib()[2])
"""
    assert python(PRELUDE + script, env) == ["0 0 128 0 128", "0 0 0 None 0 64"]


def test_what_a_graph_leaves_stays_until_it_is_freed(env: dict[str, str]) -> None:
    script = """
graph = make_graph()
pointer = add_alloc(graph, 64 * MIB)
execution = instance(graph)
print(cu.cuMemsetD8_v2(c_uint64(pointer), 1, c_size_t(9)))
print(run(execution), run(execution), cu.cuMemsetD8_v2(c_uint64(pointer), 1, c_size_t(9)), trim(), mib()[2])
print(free(pointer), free(pointer), mib()[2], run(execution), free_async(pointer, stream.value), trim(), mib()[2])
freeing = make_graph()
print(add_free(freeing, pointer), add_free(freeing, pointer), add_free(freeing, 4096))
print(run(execution), run(instance(freeing)), trim(), mib()[2])
"""
    assert python(PRELUDE + script, env) == ["1", "0 1 0 0 64", "0 1 64 0 0 0 0", "0 1 1", "0 0 0 0"]


def test_auto_free_lets_a_graph_run_again(env: dict[str, str]) -> None:
    script = """
graph = make_graph()
add_alloc(graph, 64 * MIB)
execution = instance(graph, AUTO_FREE)
print(run(execution), run(execution), trim(), mib()[2])
"""
    assert python(PRELUDE + script, env) == ["0 0 0 64"]


def test_a_graph_reuses_addresses_and_exists_once(env: dict[str, str]) -> None:
    script = """
graph = make_graph()
pointers = []
for _ in range(5):
    pointers.append(add_alloc(graph, 64 * MIB))
    ok(add_free(graph, pointers[-1]))
second = c_void_p()
execution = instance(graph)
print(len(set(pointers)), cu.cuGraphInstantiateWithFlags(byref(second), graph, c_ulonglong(0)))
print(run(execution), wait(), mib()[2], cu.cuGraphExecDestroy(execution), run(instance(graph)))
count = c_size_t()
ok(cu.cuGraphGetNodes(graph, None, byref(count)))
nodes = (c_void_p * count.value)()
ok(cu.cuGraphGetNodes(graph, nodes, byref(count)))
got, pointer = AllocationNode(), c_uint64()
print(cu.cuGraphMemAllocNodeGetParams(c_void_p(nodes[0]), byref(got)), got.size // MIB, got.pointer == pointers[0])
print(cu.cuGraphMemFreeNodeGetParams(c_void_p(nodes[1]), byref(pointer)), pointer.value == pointers[0])
print(cu.cuGraphMemFreeNodeGetParams(c_void_p(nodes[0]), byref(pointer)))
"""
    assert python(PRELUDE + script, env) == ["1 801", "0 None 64 0 0", "0 64 True", "0 True", "1"]


def test_a_launch_that_finds_no_memory_fails_alone(env: dict[str, str]) -> None:
    script = """
blocker = alloc(info()[0] - 100 * MIB)[1]
large, small = taking(200 * MIB), taking(90 * MIB)
print(run(large), run(small), free(blocker), run(large), mib()[2])
"""
    assert python(PRELUDE + script, env) == ["2 0 0 0 224"]


def test_memory_nodes_cannot_be_part_of_another_capture(env: dict[str, str]) -> None:
    script = """
execution, graph = taking(MIB), c_void_p()
ok(cu.cuStreamBeginCapture_v2(stream, 2))
print(run(execution), cu.cuStreamEndCapture(stream, byref(graph)))
plain = alloc_async(MIB, other.value)[1]
ok(cu.cuStreamBeginCapture_v2(stream, 2))
print(free_async(plain, stream.value), cu.cuStreamEndCapture(stream, byref(graph)), free_async(plain, other.value))
"""
    assert python(PRELUDE + script, env) == ["900 901", "1 901 0"]


def test_a_capture_into_a_graph_of_the_program(env: dict[str, str]) -> None:
    script = """
graph, got = make_graph(), c_void_p()
pointer = add_alloc(graph, 64 * MIB)
ok(cu.cuStreamBeginCaptureToGraph(stream, graph, None, None, c_size_t(0), 0))
print(free_async(pointer, stream.value), cu.cuStreamEndCapture(stream, byref(got)), got.value == graph.value)
print(run(instance(graph)), wait(), trim(), mib()[2], cu.cuGraphDestroy(graph))
"""
    assert python(PRELUDE + script, env) == ["0 0 True", "0 None 0 0 0"]


@pytest.mark.parametrize("end", ["cu.cuStreamDestroy_v2(stream)", "cu.cuCtxDestroy_v2(mine)"])
def test_a_capture_ends_with_its_stream_or_context(env: dict[str, str], end: str) -> None:
    script = f"""
mine = context()
stream = make_stream()
ok(cu.cuStreamBeginCapture_v2(stream, 0))
refused = alloc(MIB)[0]
print(refused, {end})
start()
print(alloc(MIB)[0], cu.cuCtxSynchronize())
"""
    assert python(PRELUDE + script, env) == ["900 0", "0 0"]


def test_a_graph_with_memory_is_not_cloned(env: dict[str, str]) -> None:
    script = """
plain, graph, clone, node = make_graph(), make_graph(), c_void_p(), c_void_p()
ok(cu.cuGraphAddEmptyNode(byref(node), plain, None, c_size_t(0)))
add_alloc(graph, MIB)
count = c_size_t()
print(cu.cuGraphClone(byref(clone), graph), cu.cuGraphClone(byref(clone), plain), cu.cuGraphClone(None, plain))
ok(cu.cuGraphDestroy(plain))
print(cu.cuGraphGetNodes(clone, None, byref(count)), count.value)
"""
    assert python(PRELUDE + script, env) == ["801 0 1", "0 1"]


def test_an_update_keeps_the_allocations_of_a_graph(env: dict[str, str]) -> None:
    script = """
def update(execution, graph):
    outcome = c_int(-1)
    return cu.cuGraphExecUpdate(execution, graph, None, byref(outcome)), outcome.value
graph, other, longer = make_graph(), make_graph(), make_graph()
add_alloc(graph, 64 * MIB), add_alloc(other, 64 * MIB)
add_free(longer, add_alloc(longer, MIB))
execution = instance(graph)
print(update(execution, graph), update(execution, other), update(execution, longer), update(execution, None))
print(run(execution), mib()[2])
"""
    assert python(PRELUDE + script, env) == ["(0, 0) (910, 5) (910, 2) (1, 1)", "0 64"]


def test_a_graph_holds_one_capture_at_a_time(env: dict[str, str]) -> None:
    script = """
graph, made = make_graph(), c_void_p()
begin = lambda on: cu.cuStreamBeginCaptureToGraph(on, graph, None, None, c_size_t(0), 2)
end = lambda on: cu.cuStreamEndCapture(on, byref(made))
print(begin(stream), begin(other), end(stream), begin(other), end(other))
"""
    assert python(PRELUDE + script, env) == ["0 401 0 0 0"]
