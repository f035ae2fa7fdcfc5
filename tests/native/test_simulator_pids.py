"""The pids in the simulated NVML: those of the caller's pid namespace, without processes outside it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulated import Machine, heard, tell
from test_ledger import CONTAINER, may_make_namespaces

from vgpu.native import simulator

HOLDER = """
from simulator_client import *
context()
ok(cu.cuMemAlloc(MIB))
f = kernel("k_5ms")
report(os.getpid())
while True:
    launch(f)
    ok(cu.cuCtxSynchronize())
    time.sleep(0.02)
"""
#: What a pod with neighbours in its own namespace, or an agent with hostPID, asks of the driver
QUERY = """
import ctypes, json, os, sys, time
from pynvml import *
def told(card):
    listed = sorted(p.pid for p in nvmlDeviceGetComputeRunningProcesses(card))
    detail = sorted(p.pid for p in nvmlDeviceGetRunningProcessDetailList(card,
        ctypes.sizeof(c_nvmlProcessDetailList_v1_t) | 1 << 24, 0))
    return listed, detail, sampled(card)
def sampled(card):
    try:
        return sorted(s.pid for s in nvmlDeviceGetProcessUtilization(card, 0))
    except NVMLError as error:
        return type(error).__name__
nvmlInit()
h = nvmlDeviceGetHandleByIndex(0)
"""
TELL = QUERY + "print(json.dumps(told(h)))\n"
#: The same, once this many processes have been seen to run something
TELL_RUNNING = (
    QUERY
    + """
deadline = time.monotonic() + 60
while len(sampled(h)) != {count} and time.monotonic() < deadline:
    time.sleep(0.02)
print(json.dumps(told(h)))
"""
)
PLACES = 128  #: number of places in the simulator's history (SIM_HISTORY): then the oldest place is used again
#: Processes that end have used all places except one
CROWD = f"""
from simulator_client import *
for number in range({PLACES - 1}):
    if os.fork() == 0:
        context()
        os._exit(0)
    assert os.wait()[1] == 0
report(number + 1)
"""
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")

needs_namespaces = pytest.mark.skipif(
    not may_make_namespaces(), reason="needs the right to make pid and mount namespaces (root)"
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards")


def started(machine: Machine, script: str, *through: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*through, sys.executable, "-u", "-c", script],
        env=machine.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def asked(machine: Machine, *through: str, script: str = TELL) -> Any:
    process = started(machine, script, *through)
    try:
        return heard(process)
    finally:
        ended(process)


def inside(parent: int) -> int:
    """The pid, here, of the only child of an `unshare --fork`."""
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(child)


@needs_namespaces
@pytest.mark.parametrize("rights", [(), WITHOUT_RIGHTS], ids=["", "not-allowed-to-look-into-them"])
def test_a_process_of_a_namespace_below_has_the_pid_that_the_caller_sees(
    machine: Machine, rights: tuple[str, ...]
) -> None:
    pod, plain = started(machine, HOLDER, *CONTAINER), started(machine, HOLDER)
    try:
        assert (heard(pod), heard(plain)) == (1, plain.pid)
        pids = sorted([inside(pod.pid), plain.pid])
        assert asked(machine, *rights, script=TELL_RUNNING.format(count=2)) == [pids] * 3
    finally:
        ended(pod, plain)


@needs_namespaces
def test_a_process_that_the_caller_cannot_see_is_left_out(machine: Machine) -> None:
    """NVIDIA/open-gpu-kernel-modules, gpuGetProcWithObject: what os_find_ns_pid does not find is not listed."""
    pod, plain = started(machine, HOLDER, *CONTAINER), started(machine, HOLDER)
    try:
        heard(pod), heard(plain)
        assert len(asked(machine, script=TELL_RUNNING.format(count=2))[2]) == 2
        assert asked(machine, *CONTAINER) == [[], [], "NVMLError_NotFound"]
        shows_the_outer_processes = CONTAINER[: CONTAINER.index("--mount-proc")]
        assert asked(machine, *shows_the_outer_processes) == [[], [], "NVMLError_NotFound"]
    finally:
        ended(pod, plain)


@needs_namespaces
def test_in_its_own_namespace_a_process_has_its_own_pid(machine: Machine) -> None:
    plain = started(machine, HOLDER)
    script = "from simulator_client import *\ncontext()\nok(cu.cuMemAlloc(MIB))\n" + TELL
    try:
        heard(plain)
        assert asked(machine, *CONTAINER, script=script)[:2] == [[1], [1]]
    finally:
        ended(plain)


@needs_namespaces
def test_a_pid_is_asked_anew_when_another_process_has_the_place(machine: Machine) -> None:
    reader = machine.start(QUERY + "for line in sys.stdin:\n    print(json.dumps(told(h)[0]), flush=True)\n")
    try:
        for _ in range(2):
            pod = started(machine, HOLDER, *CONTAINER)
            try:
                assert heard(pod) == 1
                for _ in range(2):  # searched for, then known
                    tell(reader)
                    assert heard(reader) == [inside(pod.pid)]
            finally:
                ended(pod)
            assert asked(machine, script=CROWD) == PLACES - 1
        assert [process.pid for process in simulator.processes(machine.folder)].count(1) == 1
    finally:
        ended(reader)


@needs_namespaces
def test_a_fork_in_a_namespace_of_its_own_does_not_keep_what_its_parent_knew(machine: Machine) -> None:
    pod = started(machine, HOLDER, *CONTAINER)
    script = (
        QUERY
        + """
before = told(h)[0]
CLONE_NEWPID = 0x20000000
assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) == 0
child = os.fork()
if child == 0:
    print(json.dumps([before, told(h)[0]]), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    )
    try:
        heard(pod)
        assert asked(machine, script=script) == [[inside(pod.pid)], []]
    finally:
        ended(pod)
