"""Launch calls that return late: the driver lets no more than so much work queue up (VGPU_SIM_LAUNCH_QUEUE_MS)."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulated import Machine, heard

CLIENT = "from simulator_client import *\n"
MS = 1_000_000


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4")


def busy_at_return(machine: Machine, script: str, queue: str, **variables: str) -> int:
    """What the card has run, in ns, when a script has made its launches; at most a little more, as it goes on."""
    process = machine.start(
        f"{CLIENT}context()\n{script}\nreport(1)\nwait()", VGPU_SIM_LAUNCH_QUEUE_MS=queue, **variables
    )
    heard(process)
    busy = machine.process(process.pid).busy_ns[0]
    process.kill()
    process.wait()
    return busy


@pytest.mark.parametrize(
    "work",
    [
        "launch(kernel('spin_1500ms'))",
        "f = kernel('spin_100ms')\n[launch(f) for _ in range(15)]",
        "launch(kernel('wide_perblock_100ms'), blocks=15)",
        "f = kernel('spin_750ms')\n[launch(f, ok(cu.cuStreamCreate(1))) for _ in range(2)]",
    ],
    ids=["one long launch", "many launches", "a kernel of many blocks", "two streams"],
)
def test_a_launch_returns_when_no_more_than_the_queue_holds_is_left(machine: Machine, work: str) -> None:
    assert busy_at_return(machine, work, "1000") >= 500 * MS


def test_the_work_that_fits_is_still_running_when_the_launch_returns(machine: Machine) -> None:
    found = machine.run(
        f"{CLIENT}context()\nlaunch(kernel('spin_2200ms'))\nreport(code(cu.cuStreamQuery(0)))",
        VGPU_SIM_LAUNCH_QUEUE_MS="2000",
    )
    assert found == 600


def test_a_queue_of_nothing_makes_launches_synchronous(machine: Machine) -> None:
    script = f"{CLIENT}context()\nf = kernel('spin_40ms')\nfound = []\n"
    script += "for _ in range(3):\n    launch(f)\n    found.append(code(cu.cuStreamQuery(0)))\nreport(found)"
    assert machine.run(script, VGPU_SIM_LAUNCH_QUEUE_MS="0") == [0, 0, 0]
    assert machine.run(script) == [600, 600, 600]  # the default: a launch returns at once


def test_a_graph_returns_late_as_a_whole(machine: Machine) -> None:
    busy = busy_at_return(
        machine,
        """
stream = ok(cu.cuStreamCreate(1))
f = kernel("spin_300ms")
ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
for _ in range(5):
    launch(f, stream)
graph = ok(cu.cuGraphInstantiate(ok(cu.cuStreamEndCapture(stream)), 0))
ok(cu.cuGraphLaunch(graph, stream))
""",
        "1000",
    )
    assert busy >= 500 * MS


def test_kernels_side_by_side_count_with_what_each_still_needs(machine: Machine) -> None:
    busy = busy_at_return(
        machine,
        "f = kernel('spin_900ms')\nlaunch(f, ok(cu.cuStreamCreate(1)))\nlaunch(f, ok(cu.cuStreamCreate(1)))",
        "1000",
        VGPU_SIM_TIME="kernels=4",
    )
    assert busy >= 400 * MS


@pytest.mark.parametrize("given", ["fast", "-1", "10001", "20ms"])
def test_a_wrong_number_is_refused_with_what_is_allowed(machine: Machine, given: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from cuda.bindings import driver as cu\nprint(cu.cuInit(0)[0].value)"],
        env=machine.environment(VGPU_SIM_LAUNCH_QUEUE_MS=given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() not in ("", "0")
    assert f"VGPU_SIM_LAUNCH_QUEUE_MS={given}: not a whole number of milliseconds from 0 to 10000" in done.stderr
