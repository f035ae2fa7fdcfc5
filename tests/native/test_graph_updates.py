"""Executable graphs that a program changes: what they run then, and that this is charged."""

from pathlib import Path

import pytest
from core_share import busy, make_region, running, share, within
from preloaded import environment, python

from vgpu.native import simulator

#: struct CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h, and a graph of one kernel
PRELUDE = """
from ctypes import Structure, c_uint, pointer
class Kernel(Structure):
    _fields_ = [("func", c_void_p), *((name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
                ("values", c_void_p), ("extra", c_void_p), ("kern", c_void_p), ("ctx", c_void_p)]
def kernel_of(name):
    return Kernel(function(name), 16, 1, 1, 32, 1, 1, 0, None, None, None, None)
def graph_of(name):
    graph, node, executable = c_void_p(), c_void_p(), c_void_p()
    ok(cu.cuGraphCreate(byref(graph), 0))
    ok(cu.cuGraphAddKernelNode_v2(byref(node), graph, None, c_size_t(0), byref(kernel_of(name))))
    ok(cu.cuGraphInstantiateWithFlags(byref(executable), graph, c_ulonglong(0)))
    return graph, node, executable
def run(executable):
    ok(cu.cuGraphLaunch(executable, None))
    ok(cu.cuCtxSynchronize())
"""


def test_a_changed_node_runs_what_it_is_now(tmp_path: Path) -> None:
    script = """
from driver_client import *
mine = start()
graph, node, executable = graph_of("spin_1ms")
other, foreign, _ = graph_of("spin_1ms")
run(executable), report(1)
print(cu.cuGraphExecKernelNodeSetParams_v2(executable, node, byref(kernel_of("spin_8ms"))))
run(executable), report(2)
enabled = c_uint(7)
print(cu.cuGraphNodeSetEnabled(executable, node, 0), cu.cuGraphNodeGetEnabled(executable, node, byref(enabled)))
run(executable), report(enabled.value + 3)
print(cu.cuGraphNodeSetEnabled(executable, node, 1))
run(executable), report(4)
print(cu.cuGraphExecKernelNodeSetParams_v2(executable, foreign, byref(kernel_of("spin_8ms"))),
      cu.cuGraphExecKernelNodeSetParams_v2(executable, node, None), cu.cuGraphNodeSetEnabled(executable, foreign, 0))
run(executable)
"""
    simulator.create(tmp_path / "cards", "T4")
    reading = """
from vgpu.native import simulator
from pathlib import Path
import os
def report(number):
    print(number, round(simulator.cards(Path(os.environ["CARDS"]))[0].busy_ns / 1e6))
"""
    env = environment(tmp_path) | {"CARDS": str(tmp_path / "cards")}
    lines = python("from driver_client import *" + PRELUDE + reading + script, env)
    assert lines == ["1 1", "0", "2 9", "0 0", "3 9", "0", "4 17", "1 1 1"]
    assert round(simulator.cards(tmp_path / "cards")[0].busy_ns / 1e6) == 25


#: how a graph that was short for a long time becomes long for one launch
CHANGES = {
    "parameters": "ok(cu.cuGraphExecKernelNodeSetParams_v2(mine[2], mine[1], byref(kernels[long])))",
    "update": "ok(cu.cuGraphExecUpdate_v2(mine[2], graphs[long][0], info))",
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_graph_that_becomes_long_is_paid_as_such(tmp_path: Path, how: str) -> None:
    prepare = f"""{PRELUDE}
kernels, graphs = [kernel_of("spin_10us"), kernel_of("spin_20ms")], [graph_of("spin_10us"), graph_of("spin_20ms")]
mine, info = graphs[0], (c_ulonglong * 4)()
"""
    step = f"""
    for long in (False, True):
        {CHANGES[how]}
        for _ in range(1 if long else 99):
            run(mine[2])
"""
    with make_region(tmp_path, cores=20) as region, running(within(tmp_path, region), step.strip(), prepare):
        share(tmp_path, 2)
        before, metered = busy(tmp_path), region.usage().cards[0].gpu_ns
        assert share(tmp_path, 3) < 21.5
        ran = busy(tmp_path) - before
        assert abs(region.usage().cards[0].gpu_ns - metered - ran) < ran * 0.05 + 100_000_000
