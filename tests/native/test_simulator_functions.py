"""Functions: attributes of clusters, questions of occupancy; and the profiler's switch."""

from pathlib import Path

import pytest
from simulated import Machine

CLIENT = "from simulator_client import *\n"
INVALID_VALUE, INVALID_CONTEXT, NOT_INITIALIZED = 1, 201, 3


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "H100")


def test_attributes_of_clusters_are_kept(machine: Machine) -> None:
    """cuBLAS sets that clusters may be larger than portable."""
    found = machine.run(
        CLIENT
        + """
context()
f = kernel("spin_1ms")
every = [cu.CUfunction_attribute(number) for number in range(10, 17)]
before = [ok(cu.cuFuncGetAttribute(one, f)) for one in every]
codes = [code(cu.cuFuncSetAttribute(f, one, int(one) * 2)) for one in every]
report([before, codes, [ok(cu.cuFuncGetAttribute(one, f)) for one in every]])
"""
    )
    assert found == [[0] * 7, [INVALID_VALUE, 0, 0, 0, 0, 0, INVALID_VALUE], [0, 22, 24, 26, 28, 30, 0]]


OCCUPANCY = """
context()
f = kernel("spin_1ms")
config = cu.CUlaunchConfig()

def clusters(*size):
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = size
    named = cu.CUlaunchConfig()
    named.attrs, named.numAttrs = [attribute], 1
    return ok(cu.cuOccupancyMaxActiveClusters(f, named))

of = cu.cuOccupancyAvailableDynamicSMemPerBlock
"""


@pytest.mark.parametrize(
    ("card", "expected"), [("T4", [1, 40, 20, [48 << 10, 32 << 10]]), ("H100", [8, 16, 66, [48 << 10, 48 << 10]])]
)
def test_occupancy(tmp_path: Path, card: str, expected: list[object]) -> None:
    found = Machine(tmp_path / "cards", card).run(
        CLIENT
        + OCCUPANCY
        + "report([ok(cu.cuOccupancyMaxPotentialClusterSize(f, config)), ok(cu.cuOccupancyMaxActiveClusters(f, config))"
        ", clusters(2, 1, 1), [ok(of(f, 1, 256)), ok(of(f, 2, 256))]])"
    )
    assert found == expected


def test_more_shared_memory_that_a_function_may_use_is_available(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + OCCUPANCY
        + """
more = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ok(cu.cuFuncSetAttribute(f, more, 100 << 10))
report([ok(of(f, 1, 256)), code(of(f, 0, 256)), code(of(f, 1, 2048))])
"""
    )
    assert found == [100 << 10, INVALID_VALUE, INVALID_VALUE]


def test_there_is_no_profiler_to_switch(machine: Machine) -> None:
    """It changes nothing, and needs a context."""
    found = machine.run(
        CLIENT
        + """
import ctypes
calls = [cu.cuProfilerStart, cu.cuProfilerStop]
begin = ctypes.CDLL("libcuda.so.1").cuProfilerInitialize
codes = [code(call()) for call in calls]
ok(cu.cuInit(0))
codes += [code(call()) for call in calls]
context()
report([*codes, *(code(call()) for call in calls), begin(b"a", b"b", 0), begin(b"a", b"b", 2), begin(None, b"b", 0)])
"""
    )
    assert found == [NOT_INITIALIZED] * 2 + [INVALID_CONTEXT] * 2 + [0, 0, 0, INVALID_VALUE, INVALID_VALUE]
