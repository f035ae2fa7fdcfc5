"""A program that executes another one: what the driver still holds for the old program stays charged."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from preloaded import HERE, MIB, environment

from vgpu.native import CardLimit, Limits, Region, simulator

INHERITED = {"VGPU_SIM_FILES": "inherited"}
SHARED = """
import json, os, sys, time
def report(**what):
    print(json.dumps(what), flush=True)
def wait():
    assert sys.stdin.readline()
def files(word="/cards/nvidia-simulated."):
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except FileNotFoundError:
            continue  # the listing's own
        if word in target:
            found.append(int(name))
    return sorted(found)
def execute(program, *arguments, **variables):
    os.execve(sys.executable, [sys.executable, "-c", program, *arguments], os.environ | variables)
"""
CUDA = SHARED + "from driver_client import *\nstart()\n"


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    simulator.create(tmp_path / "cards", "T4")
    (tmp_path / "region").mkdir()
    limits = Limits((CardLimit(simulator.cards(tmp_path / "cards")[0].uuid, 1000 * MIB),))
    with Region.create(tmp_path / "region", limits) as made:
        yield made


class Program:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def heard(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@contextmanager
def started(folder: Path, script: str, **variables: str) -> Iterator[Program]:
    env = environment(folder, VGPU_DIR=str(folder / "region")) | variables
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def charged(region: Region) -> int:
    region.reap()
    return region.usage().cards[0].used // MIB


AGAIN = (
    CUDA
    + """
done = int(sys.argv[1])
status = alloc(300 * MIB)[0]
report(status=status)
wait()
execute(os.environ["AGAIN"], str(done + 1))
"""
)


def images(folder: Path, region: Region, **variables: str) -> list[tuple[int, int, int]]:
    """For six programs in one process: the driver's answer, MiB charged before and after dead processes are reaped."""
    seen = []
    first = AGAIN.replace("int(sys.argv[1])", "0")
    with started(folder, first, AGAIN=AGAIN, **variables) as program:
        for _ in range(6):
            status = program.heard()["status"]
            before = region.usage().cards[0].used // MIB
            seen.append((status, before, charged(region)))
            program.tell()
    eventually(lambda: charged(region) == 0)
    return seen


def test_every_old_image_stays_charged_where_its_files_stay_open(tmp_path: Path, region: Region) -> None:
    full = [(2, 900, 900)] * 3
    assert images(tmp_path, region, **INHERITED) == [(0, 300, 300), (0, 600, 600), (0, 900, 900), *full]


def test_old_images_are_forgotten_where_exec_closes_their_files(tmp_path: Path, region: Region) -> None:
    assert [(status, after) for status, _, after in images(tmp_path, region)] == [(0, 300)] * 6


@pytest.mark.parametrize("how", ["os.set_inheritable(driver, True)", "os.dup2(driver, 700)"])
def test_a_program_may_keep_the_files_itself(tmp_path: Path, region: Region, how: str) -> None:
    second = CUDA + "report(status=alloc(600 * MIB)[0])\nwait()"
    first = CUDA + f"assert alloc(600 * MIB)[0] == 0\ndriver, = files()\n{how}\nexecute({second!r})"
    with started(tmp_path, first) as program:
        assert program.heard() == {"status": 2}
        assert charged(region) == 600
        assert simulator.cards(tmp_path / "cards")[0].used > 600 * MIB


def test_a_program_without_the_driver_keeps_them_until_it_closes_them(tmp_path: Path, region: Region) -> None:
    second = SHARED + "report(at='second')\nwait()\nos.closerange(3, 999)\nreport(at='closed')\nwait()"
    first = CUDA + f"assert alloc(600 * MIB)[0] == 0\nexecute({second!r}, LD_PRELOAD='')"
    with started(tmp_path, first, **INHERITED) as program:
        program.heard()
        assert charged(region) == 600
        program.tell()
        program.heard()
        assert charged(region) == 0


def test_a_refusal_sees_that_they_were_closed_and_their_numbers_used_again(tmp_path: Path, region: Region) -> None:
    """The new image's own driver file gets the number of the old image's file."""
    second = SHARED + (
        """
from ctypes import byref, c_void_p
from driver_client import alloc, cu, start, MIB
old, = files()
assert cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0) == 3  # the driver has not begun, the library has
os.close(old)
start()
report(same=files() == [old], status=alloc(600 * MIB)[0])
wait()
"""
    )
    first = CUDA + f"assert alloc(600 * MIB)[0] == 0\nexecute({second!r})"
    with started(tmp_path, first, **INHERITED) as program:
        assert program.heard() == {"same": True, "status": 0}
        assert charged(region) == 600


def test_they_are_known_when_they_move_and_no_longer_pass_to_others(tmp_path: Path, region: Region) -> None:
    move = "old, = files()\nos.dup2(old, 700, inheritable=False)\nos.close(old)\n"
    second = SHARED + move + "from driver_client import *\nstart()\nreport(status=alloc(600 * MIB)[0])\nwait()"
    first = CUDA + f"assert alloc(600 * MIB)[0] == 0\nexecute({second!r})"
    with started(tmp_path, first, **INHERITED) as program:
        assert program.heard() == {"status": 2}
        assert charged(region) == 600


#: last action of a parent that allocated; the child prints its pid
CHILDREN = {
    "fork and exec": """
if os.fork() == 0:
    report(pid=os.getpid())
    execute(SECOND, LD_PRELOAD='')
""",
    "posix_spawn": """
report(pid=os.posix_spawn(sys.executable, [sys.executable, "-c", SECOND], os.environ | {"LD_PRELOAD": ""}))
""",
}


@pytest.mark.parametrize("how", CHILDREN)
@pytest.mark.parametrize("files", [{}, INHERITED], ids=["closed", "inherited"])
def test_a_child_that_inherits_them_outlives_its_parent(
    tmp_path: Path, region: Region, how: str, files: dict[str, str]
) -> None:
    """Its lock has the same fate as the driver's files."""
    second = SHARED + "report(at='second')\nwait()\nos.closerange(3, 999)\nreport(at='closed')\nwait()"
    first = CUDA + f"SECOND = {second!r}\nassert alloc(600 * MIB)[0] == 0\n{CHILDREN[how]}\nwait()\nos._exit(0)"
    with started(tmp_path, first, **files) as program:
        said = [program.heard(), program.heard()]
        (child,) = [answer["pid"] for answer in said if "pid" in answer]
        try:
            program.process.kill()
            program.process.wait()
            eventually(lambda: charged(region) == 0 or bool(files))
            assert (charged(region), simulator.cards(tmp_path / "cards")[0].used > 0) == (
                600 * bool(files),
                bool(files),
            )
            program.tell()
            assert program.heard() == {"at": "closed"}
            assert charged(region) == 0
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_that_uses_cuda_itself_gives_them_back_by_closing_them(tmp_path: Path, region: Region) -> None:
    """Also the descriptor of the lock that it inherited with them: the child does not know this descriptor."""
    second = CUDA.replace("from driver_client", "old = files()\nfrom driver_client") + (
        "report(full=alloc(600 * MIB)[0])\nwait()\nfor one in old: os.close(one)\n"
        "report(status=alloc(600 * MIB)[0])\nwait()"
    )
    first = CUDA + (
        f"assert alloc(600 * MIB)[0] == 0\nif os.fork() == 0:\n    report(pid=os.getpid())\n    execute({second!r})\n"
        "wait()\nos._exit(0)"
    )
    with started(tmp_path, first, **INHERITED) as program:
        child = program.heard()["pid"]
        try:
            assert program.heard() == {"full": 2}
            program.process.kill()
            program.process.wait()
            assert charged(region) == 600
            program.tell()
            assert program.heard() == {"status": 0}
            assert charged(region) == 600
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("files", [{}, INHERITED], ids=["closed", "inherited"])
def test_the_bench_s_program_is_charged_what_it_has(tmp_path: Path, region: Region, files: dict[str, str]) -> None:
    """benchmarks/gpu: a program executes itself until its slice is full."""
    bench = Path(__file__).parents[2] / "benchmarks/gpu/programs/again.py"
    script = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(bench)!r}, '256', '4'])"
    with started(tmp_path, script, PYTHONPATH=f"{HERE}:{HERE.parents[1]}", **files) as program:
        program.heard()
        program.tell()
        assert len(program.heard()["files"]) == len(files)
        program.tell()
        last = program.heard()
        assert (last["held"], last["rounds"]) == ((False, 3) if files else (True, 4))
        region.reap()
        assert last["used"] >= 256 * MIB * (3 if files else 1)
