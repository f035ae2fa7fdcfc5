"""`vgpu run --wait`: order, time-outs, and what waiting commands print."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_machine import Machine, end, eventually


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4")
    yield found
    found.stop()


def test_a_waiter_starts_when_there_is_room(machine: Machine) -> None:
    first = machine.hold("--gpumem", "10000")
    second = machine.start("--gpumem", "10000", "--wait", command=("echo", "served"))
    eventually("a ticket", machine.waiting)
    assert second.stderr is not None
    said = second.stderr.readline()  # the first command must not end before this one has looked
    assert said == "vgpu run: waiting for a slice, next in the queue: 0 of 1 cards have 10000 MiB free, 1 needed\n"
    assert second.poll() is None
    end(first)
    assert (*second.communicate(timeout=60), second.returncode) == ("served\n", "", 0)
    assert machine.waiting() == 0


def test_a_waiter_is_not_passed_by_those_who_come_later(machine: Machine, tmp_path: Path) -> None:
    order = tmp_path / "order"
    order.touch()
    first = machine.hold("--gpumem", "10000")
    waiters = []
    for number, memory in enumerate(("14850", "100", "100")):
        script = f"echo {number} >> {order}"
        waiters.append(machine.start("--gpumem", memory, "--wait", command=("sh", "-c", script)))
        eventually("a ticket", lambda number=number: machine.waiting() == number + 1)
    # There is room for 100 MiB, but an earlier request for 14850 takes the whole card.
    refused = machine.run("--gpumem", "100", command=("true",))
    assert refused.returncode == os.EX_TEMPFAIL
    assert "3 earlier requests wait for these cards" in refused.stderr
    assert order.read_text() == ""
    end(first)
    for waiter in waiters:
        waiter.communicate(timeout=60)
    assert order.read_text().split()[0] == "0"
    assert sorted(order.read_text().split()) == ["0", "1", "2"]


def test_waiters_of_equal_size_are_served_in_order(machine: Machine, tmp_path: Path) -> None:
    order = tmp_path / "order"
    first = machine.hold()
    waiters = []
    for number in range(4):
        waiters.append(machine.start("--wait", command=("sh", "-c", f"echo {number} >> {order}")))
        eventually("a ticket", lambda number=number: machine.waiting() == number + 1)
    end(first)
    for waiter in waiters:
        waiter.communicate(timeout=60)
    assert order.read_text().split() == ["0", "1", "2", "3"]


def test_a_dead_waiter_holds_nobody_up(machine: Machine) -> None:
    first = machine.hold("--gpumem", "10000")
    dead = machine.start("--wait", command=("true",))
    eventually("a ticket", machine.waiting)
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert machine.run("--gpumem", "100", command=("true",)).returncode == 0
    end(first)


def test_waiting_ends_after_the_time_given(machine: Machine) -> None:
    machine.hold("--gpumem", "10000")
    done = machine.run("--gpumem", "10000", "--wait", "0.3", command=("true",))
    assert done.returncode == os.EX_TEMPFAIL
    assert "vgpu run: no room within 0.3 s: 0 of 1 cards have 10000 MiB free, 1 needed" in done.stderr
    assert machine.waiting() == 0


def test_interrupted_waiting_leaves_nothing_behind(machine: Machine) -> None:
    first = machine.hold("--gpumem", "10000")
    waiter = machine.start("--gpumem", "10000", "--wait", command=("true",))
    assert waiter.stderr is not None
    assert waiter.stderr.readline().startswith("vgpu run: waiting for a slice")
    waiter.send_signal(signal.SIGINT)
    _, err = waiter.communicate(timeout=60)
    assert waiter.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    end(first)
    assert machine.run("--gpumem", "10000", command=("true",)).returncode == 0
    assert machine.waiting() == 0
