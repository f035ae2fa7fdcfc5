"""Commands of `vgpu run` whose state is lost, or is another state than the current one: they keep their slices."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_machine import PROBE, Machine, end, eventually

WHOLE = "14912"  #: MiB of a T4


def remove(folder: Path) -> None:
    """Removes a folder in which running commands may still make files."""
    while True:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        else:
            return


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    found = Machine(tmp_path / "state", "T4")
    yield found
    found.stop()


def refused(machine: Machine, *options: str, **environ: str) -> None:
    done = machine.run("--gpumem", "8000", *options, command=("true",), **environ)
    assert (done.returncode, done.stdout) == (os.EX_TEMPFAIL, ""), done.stderr
    assert "too little memory free" in done.stderr


@pytest.mark.parametrize("gone", [".", "slices", "simulator"])
def test_a_full_card_is_not_given_again_when_the_state_was_removed(machine: Machine, gone: str) -> None:
    """Removed at the end of a session, or by hand."""
    holder = machine.hold("--gpumem", "10000")
    remove(machine.state / gone)
    refused(machine)
    (shown,) = machine.ps()
    assert (shown["pid"], shown["slices"][0]["memory_limit_bytes"]) == (holder.pid, 10000 << 20)
    assert shown["command"][0] == "sh"
    end(holder)
    assert machine.ps() == []
    assert machine.run("--gpumem", WHOLE, command=("true",)).returncode == 0


def test_a_state_that_was_moved_behind_a_link_counts_once(machine: Machine) -> None:
    """Moved to a larger disk: running commands know the state by its old path."""
    holder = machine.hold("--gpumem", "10000")
    moved = machine.state.with_name("moved")
    machine.state.rename(moved)
    refused(machine)  # nothing is there
    shutil.rmtree(machine.state)
    machine.state.symlink_to(moved)
    refused(machine)
    assert [shown["pid"] for shown in machine.ps()] == [holder.pid]
    assert machine.run("--gpumem", "4000", command=("true",)).returncode == 0


def test_a_state_that_was_copied_back_holds_what_it_held(machine: Machine) -> None:
    """No process has the locks of the copied files: the environment of its processes identifies the command."""
    holder = machine.hold("--gpumem", "10000")
    copy = machine.state.with_name("copy")
    shutil.copytree(machine.state, copy)
    shutil.rmtree(machine.state)
    copy.rename(machine.state)
    refused(machine)
    assert [shown["pid"] for shown in machine.ps()] == [holder.pid]
    end(holder)
    assert machine.ps() == []


def test_a_child_that_closed_the_lock_counts_too(machine: Machine) -> None:
    """Python's subprocess closes what it inherits; the environment stays."""
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({[*PROBE, '--hold', '600']!r}, stdout=subprocess.PIPE, start_new_session=True)\n"
        "print(child.pid, child.stdout.readline().decode(), flush=True); input()"
    )
    process = machine.start("--gpumem", "10000", command=(sys.executable, "-c", script))
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[0])
    process.kill()
    process.wait()
    remove(machine.state)
    refused(machine)
    assert machine.ps()[0]["pid"] > 0
    os.kill(child, signal.SIGKILL)
    eventually("the child's end", lambda: machine.ps() == [])


#: Overwrites its environment, as servers do that show a title (setproctitle)
FORGETFUL = """
import ctypes, sys
strings, at = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), 'environ'), 0
while strings[at]:
    ctypes.memset(strings[at], 120, len(ctypes.string_at(strings[at])))
    at += 1
print('running', flush=True)
sys.stdin.read()
"""


def test_a_command_that_overwrote_its_environment_is_known_by_the_lock_it_inherited(machine: Machine) -> None:
    process = machine.start("--gpumem", "10000", command=(sys.executable, "-c", FORGETFUL))
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    remove(machine.state)
    refused(machine)
    end(process)
    assert machine.run("--gpumem", WHOLE, command=("true",)).returncode == 0


def test_what_has_neither_environment_nor_lock_is_charged_what_it_uses(machine: Machine) -> None:
    child = (
        "import ctypes, os\n"
        "cuda, context, pointer = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(), ctypes.c_uint64()\n"
        "assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0\n"
        "size = ctypes.c_size_t(9000 << 20)\n"
        "assert cuda.cuCtxSetCurrent(context) == cuda.cuMemAlloc_v2(ctypes.byref(pointer), size) == 0\n"
        f"os.closerange(600, 610)\n{FORGETFUL}"
    )
    process = machine.start("--gpumem", "10000", command=(sys.executable, "-c", child))
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    remove(machine.state / "slices")  # the simulated card stays, as a real one does
    refused(machine)
    end(process)
    assert machine.run("--gpumem", WHOLE, command=("true",)).returncode == 0


def test_two_states_do_not_give_the_same_card_twice(machine: Machine, tmp_path: Path) -> None:
    """States of two users where root may look, of a batch job with its own /tmp, of a version with another path."""
    holder = machine.hold("--gpumem", "10000")
    elsewhere = {"VGPU_STATE_DIR": str(tmp_path / "other"), "VGPU_SIM_DIR": str(machine.simulator)}
    refused(machine, **elsewhere)
    done = machine.vgpu("ps", "--json", **elsewhere)
    # this state has nothing on these cards, as long as none of its commands runs there
    assert json.loads(done.stdout) == []
    own = machine.run("--gpumem", "4000", command=(sys.executable, "-m", "vgpu", "ps", "--json"), **elsewhere)
    first, _ = json.loads(own.stdout)
    assert first["pid"] == holder.pid


@pytest.mark.parametrize("gone", [".", "slices", "queue"])
def test_a_waiter_whose_state_is_removed_goes_on(machine: Machine, gone: str) -> None:
    holder = machine.hold("--gpumem", "10000")
    waiter = machine.start("--gpumem", "8000", "--wait", command=("echo", "served"))
    eventually("a ticket", lambda: machine.waiting() == 1)
    remove(machine.state / gone)
    eventually("another ticket", lambda: machine.waiting() == 1 and (machine.state / "slices").exists())
    assert waiter.poll() is None
    end(holder)
    assert waiter.communicate(timeout=60)[0] == "served\n"


def test_a_slice_whose_state_is_lost_cannot_be_divided_either(machine: Machine) -> None:
    again = f"{sys.executable} -m vgpu run --simulate {machine.spec} --gpumem 200 -- echo inside"
    script = f"rm -r {machine.state}; exec {again}"
    done = machine.run("--gpumem", "10000", command=("sh", "-c", script))
    assert (done.returncode, done.stdout) == (1, "")
    assert "vgpu cannot divide a slice" in done.stderr


def test_the_folder_of_a_running_command_is_locked_against_those_who_remove_what_is_old(machine: Machine) -> None:
    holder = machine.hold("--gpumem", "1000")
    (folder,) = (machine.state / "slices").iterdir()
    assert subprocess.run(["flock", "--nonblock", str(folder), "true"], check=False).returncode == 1
    end(holder)
    assert subprocess.run(["flock", "--nonblock", str(folder), "true"], check=False).returncode == 0


def test_what_a_variable_names_is_no_reason_to_wait(machine: Machine, tmp_path: Path) -> None:
    """A variable may name anything: even a pipe, on which a reader waits for ever."""
    folder = tmp_path / "slices" / "abcdef"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "slice.json")
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, "VGPU_DIR": str(folder), "VGPU_SLICES": "{"})
    try:
        assert machine.run("--gpumem", WHOLE, command=("true",)).returncode == 0
    finally:
        child.kill()
        child.wait()
