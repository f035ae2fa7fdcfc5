"""Which card may use which memory: each card has its own access to mappings; without access, the driver's error
follows.
"""

from pathlib import Path

import pytest
from simulated import Machine

CLIENT = """from simulator_client import *
from simulator_blocks import *
there, here = context(1), context(0)
def use(context_of):
    ok(cu.cuCtxSetCurrent(context_of))
def allow(address, card, flags):
    a = access(card)
    a.flags = cu.CUmemAccess_flags(flags)
    return code(cu.cuMemSetAccess(address, 2 * MIB, [a], 1))
def allowed(address, card):
    return int(ok(cu.cuMemGetAccess(access(card).location, address)))
NONE, READ, BOTH = 0, 1, 3
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "A100-40x2")


def test_access_is_each_card_s_own(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
p = mapped(2 * MIB)
seen = [[allowed(p, 0), allowed(p, 1)]]
for card, flags in ((1, READ), (0, NONE), (1, BOTH), (0, READ), (1, NONE)):
    allow(p, card, flags)
    seen.append([allowed(p, 0), allowed(p, 1)])
report([seen, code(cu.cuMemGetAccess(access(2).location, p)), allow(p, 2, BOTH)])
"""
    )
    assert found == [[[3, 0], [3, 1], [0, 1], [0, 3], [1, 3], [1, 0]], 101, 101]


KERNELS = {"none": ("NONE", [700, 700]), "read": ("READ", [0, 700]), "both": ("BOTH", [0, 0])}


@pytest.mark.parametrize("flags", KERNELS)
@pytest.mark.parametrize("reads", [True, False])
def test_a_kernel_fails_where_its_card_has_no_access(machine: Machine, flags: str, reads: bool) -> None:
    given, answers = KERNELS[flags]
    kernel = 'go(touching("touch_sum"), room, p, 10)' if reads else 'go(touching("touch_fill"), p, 10, 1)'
    found = machine.run(
        CLIENT
        + f"""
p = mapped(2 * MIB)
allow(p, 1, {given})
use(there)
room = int(ok(cu.cuMemAlloc(8)))
{kernel}
report(code(cu.cuCtxSynchronize()))
"""
    )
    assert found == answers[0 if reads else 1]


def test_copies_and_fills_use_the_card_of_their_stream_or_of_the_contexts_they_name(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
p = mapped(2 * MIB)
use(there)
q = int(ok(cu.cuMemAlloc(8)))
def tried():
    return [code(x) for x in (
        cu.cuMemcpyDtoD(q, p, 8), cu.cuMemcpyDtoD(p, q, 8), cu.cuMemsetD8(p, 1, 8),
        cu.cuMemcpyPeer(q, there, p, here, 8), cu.cuMemcpyPeer(p, here, q, there, 8),
        cu.cuMemcpyPeer(q, here, p, there, 8), cu.cuMemcpyPeerAsync(p, there, q, here, 8, 0))]
answers = [tried()]
for flags in (READ, BOTH):
    allow(p, 1, flags)
    answers.append(tried())
report(answers)
"""
    )
    assert found == [[1, 1, 1, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0]]


def test_copies_of_graphs_keep_the_contexts_that_they_named(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
p = mapped(2 * MIB)
use(there)
q, stream = int(ok(cu.cuMemAlloc(8))), ok(cu.cuStreamCreate(1))
def launched(copy):
    ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ok(copy())
    graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
    return code(cu.cuGraphLaunch(graph, stream))
report([launched(lambda: cu.cuMemcpyPeerAsync(q, there, p, here, 8, stream)),
        launched(lambda: cu.cuMemcpyDtoDAsync(q, p, 8, stream))])
"""
    )
    assert found == [0, 1]


def test_pools_keep_who_may_use_them(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
pool = ok(cu.cuDeviceGetDefaultMemPool(0))
def seen():
    return [int(ok(cu.cuMemPoolGetAccess(pool, access(card).location))) for card in (0, 1)]
answers = [seen()]
for flags in (READ, BOTH, NONE):
    a = access(1)
    a.flags = cu.CUmemAccess_flags(flags)
    ok(cu.cuMemPoolSetAccess(pool, [a], 1))
    answers.append(seen())
report([answers, code(cu.cuMemPoolGetAccess(pool, access(2).location))])
"""
    )
    assert found == [[[3, 0], [3, 1], [3, 3], [3, 0]], 1]


def test_strict_captures_forbid_access_to_be_set(machine: Machine) -> None:
    script = (
        CLIENT
        + """
p, stream = mapped(2 * MIB), ok(cu.cuStreamCreate(1))
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
report(allow(p, 1, BOTH))
"""
    )
    assert [machine.run(script), machine.run(script, VGPU_SIM_STRICT="captures")] == [0, 900]
