"""What fills and copies within a card run on: the multiprocessors, as kernels do, or an engine (VGPU_SIM_TIME)."""

from pathlib import Path

import pytest
from simulated import Machine

CLIENT = "from simulator_client import *\n"
MS = 1_000_000
#: ten times one MiB at 100 MB/s: a fill writes it in about 10.5 ms, a copy reads it, too
WORK = (
    CLIENT
    + """
context()
f = kernel("spin_150ms")
ok(cu.cuFuncLoad(f))
a, b = ok(cu.cuMemAlloc(MIB)), ok(cu.cuMemAlloc(MIB))
s, t = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
fill = lambda: ok(cu.cuMemsetD32Async(a, 7, MIB // 4, s))
copy = lambda: ok(cu.cuMemcpyDtoDAsync(b, a, MIB, s))
"""
)
FILL_NS = MIB_NS = (1 << 20) * 1000 // 100
COPY_NS = 2 * MIB_NS


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4")


@pytest.mark.parametrize(
    ("work", "option", "takes"),
    [
        ("fill", "fills=sms", FILL_NS),
        ("fill", "fills=engine", 0),
        ("copy", "within=sms", COPY_NS),
        ("copy", "within=engine", 0),
        ("fill", "bus=profile", FILL_NS),  # what the profiles assume
        ("copy", "bus=profile", 0),
        ("fill", "bus=profile,fills=engine", 0),
        ("copy", "within=profile", 0),
    ],
)
def test_the_card_is_busy_where_they_run_on_multiprocessors(
    machine: Machine, work: str, option: str, takes: int
) -> None:
    machine.run(
        f"{WORK}[{work}() for _ in range(10)]\nok(cu.cuStreamSynchronize(s))", VGPU_SIM_TIME=f"memory=100MB/s,{option}"
    )
    assert machine.card().busy_ns == 10 * takes


@pytest.mark.parametrize(("option", "behind"), [("fills=sms", True), ("fills=engine", False)])
def test_a_fill_waits_for_a_kernel_where_it_is_one(machine: Machine, option: str, behind: bool) -> None:
    found = machine.run(
        f"{WORK}launch(kernel('spin_1500ms'), t)\nfill()\nok(cu.cuStreamSynchronize(s))\n"
        "report(code(cu.cuStreamQuery(t)))",
        VGPU_SIM_TIME=f"memory=100MB/s,{option}",
    )
    assert found == (0 if behind else 600)


@pytest.mark.parametrize("option", ["fills=sms", "fills=engine"])
def test_a_pair_of_events_measures_it_either_way(machine: Machine, option: str) -> None:
    found = machine.run(
        f"{WORK}report(elapsed(lambda: [fill() for _ in range(5)], s))",
        VGPU_SIM_TIME=f"memory=100MB/s,event=0ns,{option}",
    )
    assert found * 1e6 >= 5 * FILL_NS - 1000


def test_fills_of_a_graph_are_the_same(machine: Machine) -> None:
    machine.run(
        f"""{WORK}
ok(cu.cuStreamBeginCapture(s, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
fill()
copy()
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(s)), 0))
ok(cu.cuGraphLaunch(graph, s))
ok(cu.cuStreamSynchronize(s))
""",
        VGPU_SIM_TIME="memory=100MB/s,fills=sms,within=sms",
    )
    assert machine.card().busy_ns == FILL_NS + COPY_NS


def test_copies_from_the_host_never_take_multiprocessors(machine: Machine) -> None:
    machine.run(
        f"{WORK}ok(cu.cuMemcpyHtoDAsync(a, bytes(MIB), MIB, s))\nok(cu.cuMemcpyDtoHAsync(bytearray(MIB), a, MIB, s))\n"
        "ok(cu.cuStreamSynchronize(s))",
        VGPU_SIM_TIME="memory=100MB/s,fills=sms,within=sms,bus=100MB/s",
    )
    assert machine.card().busy_ns == 0


def test_they_take_no_time_where_nothing_says_so(machine: Machine) -> None:
    machine.run(f"{WORK}fill()\ncopy()\nok(cu.cuStreamSynchronize(s))", VGPU_SIM_TIME="memory=1MB/s")
    assert machine.card().busy_ns == 0
