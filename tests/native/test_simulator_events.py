"""Events that take time on the card: pairs of them around short kernels measure too much (VGPU_SIM_TIME=event=...)."""

from pathlib import Path

import pytest
from simulated import Machine, heard

CLIENT = "from simulator_client import *\n"
#: kernels with a pair of events each, all behind one long kernel: the host's time does not show
PAIRS = (
    CLIENT
    + """
context()
def pairs(name, count=50, flags=0, between=1):
    f, hold, stream = kernel(name), kernel("hold_20ms"), ok(cu.cuStreamCreate(1))
    ok(cu.cuFuncLoad(f))
    marks = [(ok(cu.cuEventCreate(flags)), ok(cu.cuEventCreate(flags))) for _ in range(count)]
    launch(hold, stream)
    for begin, end in marks:
        ok(cu.cuEventRecord(begin, stream))
        [launch(f, stream) for _ in range(between)]
        ok(cu.cuEventRecord(end, stream))
    ok(cu.cuStreamSynchronize(stream))
    return [ok(cu.cuEventElapsedTime(*pair)) * 1000 for pair in marks], marks
"""
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "A100-40")


@pytest.mark.parametrize("microseconds", [5, 10, 20])
def test_a_pair_measures_a_kernel_and_an_event(machine: Machine, microseconds: int) -> None:
    found = machine.run(f"{PAIRS}report(pairs('spin_{microseconds}us')[0])", VGPU_SIM_TIME="event=3us")
    assert sum(found) / len(found) == pytest.approx(microseconds + 3, abs=0.6)  # events are cut to 0.5 us
    assert machine.card().busy_ns == 20_000_000 + 50 * microseconds * 1000  # an event is no kernel


def test_an_empty_pair_measures_an_event(machine: Machine) -> None:
    found = machine.run(f"{PAIRS}report(pairs('unused', between=0)[0])", VGPU_SIM_TIME="event=4us")
    assert sum(found) / len(found) == pytest.approx(4, abs=0.6)


def test_several_kernels_between_them_pay_once(machine: Machine) -> None:
    found = machine.run(f"{PAIRS}report(pairs('spin_5us', count=10, between=20)[0])", VGPU_SIM_TIME="event=3us")
    assert sum(found) / len(found) == pytest.approx(103, abs=0.6)


def test_the_card_is_taken_while_an_event_is_recorded(machine: Machine) -> None:
    """From the first event to the last: all kernels and all events except the first, although kernels
    are half of that.
    """
    script = f"{PAIRS}marks = pairs('spin_5us')[1]\nreport(ok(cu.cuEventElapsedTime(marks[0][0], marks[-1][1])) * 1000)"
    assert machine.run(script, VGPU_SIM_TIME="event=5us") == pytest.approx(50 * 5 + 99 * 5, abs=1)
    assert machine.card().busy_ns == 20_000_000 + 250_000


@pytest.mark.parametrize(("spec", "microseconds"), [("A100-40", 2.5), ("T4", 1.1), ("H100", 2.5)])
def test_the_profile_has_a_figure(tmp_path: Path, spec: str, microseconds: float) -> None:
    found = Machine(tmp_path / spec, spec).run(f"{PAIRS}report(pairs('unused', between=0)[0])")
    assert sum(found) / len(found) == pytest.approx(microseconds, abs=0.6)


def test_none_where_it_is_switched_off(machine: Machine) -> None:
    found = machine.run(f"{PAIRS}report(pairs('spin_5us')[0])", VGPU_SIM_TIME="event=0ns")
    assert sum(found) / len(found) == pytest.approx(5, abs=0.6)


def test_events_without_a_time_cost_the_card_nothing(machine: Machine) -> None:
    found = machine.run(
        f"""{PAIRS}
f, stream = kernel("spin_5us"), ok(cu.cuStreamCreate(1))
ok(cu.cuFuncLoad(f))
plain = ok(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value))
begin, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
launch(kernel("hold_20ms"), stream)
ok(cu.cuEventRecord(begin, stream))
for _ in range(100):
    launch(f, stream)
    ok(cu.cuEventRecord(plain, stream))
ok(cu.cuEventRecord(end, stream))
ok(cu.cuStreamSynchronize(stream))
report(ok(cu.cuEventElapsedTime(begin, end)) * 1000)
""",
        VGPU_SIM_TIME="event=5us",
    )
    assert found == pytest.approx(505, abs=1)


def test_kernels_side_by_side_go_on_while_another_stream_records(machine: Machine) -> None:
    found = machine.run(
        f"""{PAIRS}
a, b = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
mark = ok(cu.cuEventCreate(0))
launch(kernel("hold_50ms"), a)
for _ in range(4):
    ok(cu.cuEventRecord(mark, b))
ok(cu.cuStreamSynchronize(b))
report([code(cu.cuStreamQuery(a)), ok(cu.cuStreamSynchronize(a))])
""",
        VGPU_SIM_TIME="event=1ms,kernels=8",
    )
    assert found[0] == 600
    assert machine.card().busy_ns == 50_000_000


def test_the_books_count_no_events_as_launches(machine: Machine) -> None:
    process = machine.start(f"{PAIRS}pairs('spin_5us')\nreport(os.getpid())\nwait()")
    heard(process)
    assert machine.process(process.pid).launches[0] == 51
    process.kill()
    process.wait()
