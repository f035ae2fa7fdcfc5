"""The context of a launch: that of its stream, for any current context (cuda.h on cuLaunchKernel)."""

from pathlib import Path

import pytest
from simulated import Machine

CLIENT = "from simulator_client import *\n"
MS = 1_000_000
LIBRARY = (
    CLIENT
    + """
def library(name="spin_20ms"):
    code = (PTX + f".visible .entry {name}(.param .u64 p, .param .u32 n)\\n{{ ret; }}").encode()
    return ok(cu.cuLibraryLoadData(code, [], [], 0, [], [], 0))

def library_kernel(name="spin_20ms"):
    return cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library(name), name.encode()))))

def try_launch(function, stream=0):
    return code(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))

a = context(0)
streams = {0: ok(cu.cuStreamCreate(1))}
if "x2" in os.environ["VGPU_SIMULATE"]:
    b = context(1)
    streams[1] = ok(cu.cuStreamCreate(1))
"""
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x2")


def busy(machine: Machine) -> list[int]:
    return [machine.card(0).busy_ns, machine.card(1).busy_ns]


@pytest.mark.parametrize("current", ["a", "b", "0"])
def test_a_kernel_of_a_library_runs_where_its_stream_is(machine: Machine, current: str) -> None:
    found = machine.run(
        f"{LIBRARY}f = library_kernel()\nok(cu.cuCtxSetCurrent({current}))\n"
        "codes = [try_launch(f, streams[0]), try_launch(f, streams[1]), try_launch(f, streams[1])]\n"
        "[(ok(cu.cuCtxSetCurrent(c)), ok(cu.cuCtxSynchronize())) for c in (a, b)]\nreport(codes)"
    )
    assert found == [0, 0, 0]
    assert busy(machine) == [20 * MS, 40 * MS]


def test_on_the_null_stream_it_runs_in_the_current_context(machine: Machine) -> None:
    found = machine.run(
        f"{LIBRARY}f = library_kernel()\nok(cu.cuCtxSetCurrent(a))\ncodes = [try_launch(f)]\n"
        "ok(cu.cuCtxSynchronize())\n"
        "ok(cu.cuCtxSetCurrent(0))\nreport([*codes, try_launch(f)])"
    )
    assert found == [0, 201]
    assert busy(machine) == [20 * MS, 0]


def test_a_function_runs_on_a_stream_of_its_own_context_whatever_is_current(machine: Machine) -> None:
    found = machine.run(
        f"{LIBRARY}ok(cu.cuCtxSetCurrent(a))\nf = kernel('spin_20ms')\nok(cu.cuCtxSetCurrent(b))\n"
        "codes = [try_launch(f, streams[0]), try_launch(f, streams[1]), try_launch(f)]\n"
        "ok(cu.cuStreamSynchronize(streams[0]))\nreport(codes)"
    )
    assert found == [0, 400, 400]
    assert busy(machine) == [20 * MS, 0]


def test_a_driver_that_wants_the_current_context_refuses_it(machine: Machine) -> None:
    found = machine.run(
        f"{LIBRARY}ok(cu.cuCtxSetCurrent(a))\nf = kernel('spin_20ms')\nok(cu.cuCtxSetCurrent(b))\n"
        "codes = [try_launch(f, streams[0])]\nok(cu.cuCtxSetCurrent(a))\nreport([*codes, try_launch(f, streams[0])])",
        VGPU_SIM_STRICT="launch-context",
    )
    assert found == [400, 0]


def test_each_context_of_one_card_has_a_module_of_its_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "one", "T4")
    found = machine.run(
        LIBRARY
        + """
kept = library()
f = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(kept, b"spin_20ms"))))
before = free()
other = ok(cu.cuCtxCreate(None, 0, 0)) if cu.CUDA_VERSION >= 13000 else ok(cu.cuCtxCreate(0, 0))
second = ok(cu.cuStreamCreate(1))
codes = [try_launch(f, streams[0]), try_launch(f, second), try_launch(f, second)]
modules = {int(ok(cu.cuLibraryGetModule(kept)))}
ok(cu.cuCtxSetCurrent(a))
modules.add(int(ok(cu.cuLibraryGetModule(kept))))
ok(cu.cuCtxSynchronize())
ok(cu.cuCtxDestroy(other))
codes.append(try_launch(f, streams[0]))
ok(cu.cuStreamSynchronize(streams[0]))
ok(cu.cuLibraryUnload(kept))
report([codes, len(modules), before - free()])
"""
    )
    assert found == [[0, 0, 0, 0], 2, 0]
    assert machine.card().busy_ns == 80 * MS


def test_a_graph_node_runs_on_the_card_of_its_kernel(machine: Machine) -> None:
    found = machine.run(
        LIBRARY
        + """
ok(cu.cuCtxSetCurrent(a))
f = kernel("spin_20ms")
fork, join = ok(cu.cuEventCreate(2)), None
ok(cu.cuStreamBeginCapture(streams[0], cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
launch(f, streams[0])
ok(cu.cuEventRecord(fork, streams[0]))
ok(cu.cuCtxSetCurrent(b))
g, join = kernel("spin_50ms"), ok(cu.cuEventCreate(2))
ok(cu.cuStreamWaitEvent(streams[1], fork, 0))
launch(g, streams[1])
ok(cu.cuEventRecord(join, streams[1]))
ok(cu.cuCtxSetCurrent(a))
ok(cu.cuStreamWaitEvent(streams[0], join, 0))
launch(f, streams[0])
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(streams[0])), 0))
begin = time.monotonic()
ok(cu.cuGraphLaunch(graph, streams[0]))
ok(cu.cuStreamSynchronize(streams[0]))
took = time.monotonic() - begin
ok(cu.cuGraphExecDestroy(graph))
report(took * 1000)
"""
    )
    assert found >= 90
    assert busy(machine) == [40 * MS, 50 * MS]
    assert found >= 90


def test_a_node_for_a_kernel_of_a_library_names_its_context(machine: Machine) -> None:
    machine.run(
        LIBRARY
        + """
kept = library()
params = cu.CUDA_KERNEL_NODE_PARAMS()
params.kern = ok(cu.cuLibraryGetKernel(kept, b"spin_20ms"))
params.ctx = b
params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimX = params.blockDimY = params.blockDimZ = 1
ok(cu.cuCtxSetCurrent(a))
graph = ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddKernelNode(graph, [], 0, params))
ok(cu.cuGraphLaunch(ok(cu.cuGraphInstantiate(graph, 0)), streams[0]))
ok(cu.cuStreamSynchronize(streams[0]))
report(1)
"""
    )
    assert busy(machine) == [0, 20 * MS]
