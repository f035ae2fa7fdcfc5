"""Kernels that spin until those of other cards have started, as the kernels of collectives do."""

import time
from pathlib import Path

import pytest
from simulated import Machine, eventually, heard, tell

CLIENT = "from simulator_client import *\n"
MS = 1_000_000


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x2")


#: a process on one card that launches on request, as often as requested
RANK = """
context({card})
f = kernel("reduce_meet2_5ms")
ok(cu.cuFuncLoad(f))
report(1)
for _ in range(int(wait())):
    launch(f)
report(2)
ok(cu.cuCtxSynchronize())
report(3)
wait()
"""


def test_a_kernel_spins_until_its_peer_has_started(machine: Machine) -> None:
    first, second = (machine.start(CLIENT + RANK.format(card=card)) for card in (0, 1))
    heard(first)
    heard(second)
    tell(first, "1")
    heard(first)
    eventually("a busy card", lambda: machine.card(0).busy_ns >= 300 * MS)
    assert machine.card(1).busy_ns == 0
    tell(second, "1")
    assert [heard(second), heard(second), heard(first)] == [2, 3, 3]
    assert machine.card(1).busy_ns == pytest.approx(5 * MS, abs=MS)
    assert machine.card(0).busy_ns >= 305 * MS - 100_000
    before = [machine.card(card).busy_ns for card in (0, 1)]
    time.sleep(0.02)  # nothing runs any more
    assert [machine.card(card).busy_ns for card in (0, 1)] == before
    for process in (first, second):
        process.kill()
        process.wait()


def test_many_in_a_row_go_on_together(machine: Machine) -> None:
    first, second = (machine.start(CLIENT + RANK.format(card=card)) for card in (0, 1))
    for process in (first, second):
        heard(process)
    tell(first, "20")
    tell(second, "20")
    for process in (first, second):
        assert [heard(process), heard(process)] == [2, 3]
    busy = [machine.card(card).busy_ns for card in (0, 1)]
    # all but the wait for the later one is the same on both
    assert min(busy) == pytest.approx(100 * MS, rel=0.1)
    for process in (first, second):
        process.kill()
        process.wait()


def test_one_process_with_two_cards(machine: Machine) -> None:
    took = machine.run(
        f"""{CLIENT}
streams, kernels = [], []
for card in (0, 1):
    context(card)
    streams.append(ok(cu.cuStreamCreate(1)))
    kernels.append(kernel("ring_meet2_20ms"))
    ok(cu.cuFuncLoad(kernels[-1]))
launch(kernels[1], streams[1])
late = kernel("before_100ms")
context(0)
late = kernel("before_100ms")
launch(late, streams[0])
launch(kernels[0], streams[0])
for stream in streams:
    ok(cu.cuStreamSynchronize(stream))
report(1)
"""
    )
    assert took == 1
    assert machine.card(0).busy_ns == pytest.approx(120 * MS, abs=MS)
    assert machine.card(1).busy_ns >= 119 * MS  # it spun while the other card was at something else


def test_without_a_peer_it_spins_until_its_process_ends(machine: Machine) -> None:
    process = machine.start(CLIENT + RANK.format(card=0))
    heard(process)
    tell(process, "1")
    heard(process)
    eventually("a busy card", lambda: machine.card(0).busy_ns >= 200 * MS)
    process.kill()
    process.wait()
    busy = machine.card(0).busy_ns
    assert machine.card(0).busy_ns == pytest.approx(busy, abs=2 * MS)


def test_others_get_their_slices_while_one_spins(machine: Machine) -> None:
    process = machine.start(CLIENT + RANK.format(card=0))
    heard(process)
    tell(process, "1")
    heard(process)
    found = machine.run(f"{CLIENT}context(0)\nreport(elapsed(lambda: launch(kernel('spin_40ms'))))")
    assert found >= 60  # it has the card half of the time
    assert machine.card(0).switches > 10
    process.kill()
    process.wait()


def test_a_process_that_launches_many_on_both_cards_is_not_held_up(machine: Machine) -> None:
    """All 200 are launched while the first one still spins."""
    codes = machine.run(
        f"""{CLIENT}
made = []
for card in (0, 1):
    made.append((context(card), kernel("all_meet2_5ms")))
    ok(cu.cuFuncLoad(made[-1][1]))
for current, f in made:
    ok(cu.cuCtxSetCurrent(current))
    for _ in range(100):
        launch(f)
report([code(cu.cuStreamQuery(0)) for current, f in made if not ok(cu.cuCtxSetCurrent(current))])
for current, f in made:
    ok(cu.cuCtxSetCurrent(current))
    ok(cu.cuCtxSynchronize())
"""
    )
    assert codes == [600, 600]
    assert machine.card(1).busy_ns == pytest.approx(500 * MS, rel=0.1)
