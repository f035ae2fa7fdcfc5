"""Plays the committed programs of the fuzz target under the preloaded library, then random ones: one minute in all."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # the first of them compiles the target
FUZZ = Path(__file__).resolve().parents[2] / "libvgpu/tests/fuzz"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FUZZ / "run.py", *arguments], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.xdist_group("fuzz")
def test_ledger_and_truth_agree_after_every_program() -> None:
    done = fuzz("--seed", "1", "--seconds", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 found" in done.stdout.splitlines()[-1]


@pytest.mark.xdist_group("fuzz")
@pytest.mark.parametrize("tier", ["static", "movable"])
def test_they_agree_where_a_half_lies_in_host_memory(tier: str) -> None:
    done = fuzz("--seed", "2", "--seconds", "8", "--tier", tier)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 found" in done.stdout.splitlines()[-1]


@pytest.mark.xdist_group("fuzz")
def test_memory_that_the_limits_do_not_know_is_found(tmp_path: Path) -> None:
    """A process that allocates without the library breaks the comparison: the target can fail."""
    program = tmp_path / "program"
    program.write_bytes(bytes((0, 0, 0, 0, 56, 0, 0, 1, 0, 0, 9, 0)))
    done = fuzz("--replay", str(program), "--bare")
    assert done.returncode == 1
    assert "the ledger says 0" in done.stderr


def child_of(parent: int) -> int | None:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0]) if children else None


def processes_in(finding: Path) -> set[int]:
    """The processes in the report next to an input."""
    report = finding.with_suffix(".stacks")
    lines = report.read_text().splitlines() if report.exists() else []
    return {int(line.split()[1]) for line in lines if line.startswith("process ")}


@pytest.mark.xdist_group("fuzz")
def test_of_a_program_that_hangs_the_stacks_of_all_threads_are_kept(tmp_path: Path) -> None:
    """The worker is stopped, which looks like a hang; its processes are reported before they are ended."""
    arguments = ["--seed", "7", "--hang", "3", "--runs", "1000000", "--seconds", "270", "--found", str(tmp_path)]
    with subprocess.Popen([sys.executable, FUZZ / "run.py", *arguments], stdout=subprocess.DEVNULL) as run:
        try:
            deadline = time.monotonic() + 270
            worker = None
            while worker is None and time.monotonic() < deadline and run.poll() is None:
                time.sleep(0.05)
                program = child_of(run.pid)
                with suppress(FileNotFoundError, ProcessLookupError):  # a compiler that has just ended
                    if program and Path(f"/proc/{program}/comm").read_text() == "fuzz\n":
                        worker = child_of(program)
            assert worker is not None
            os.kill(worker, signal.SIGSTOP)
            hung: list[Path] = []
            while not hung and time.monotonic() < deadline:
                time.sleep(0.05)
                hung = [f for f in tmp_path.glob("crash-*") if f.suffix != ".stacks" and worker in processes_in(f)]
        finally:
            run.terminate()
    assert hung, "no report of the process that was stopped"
    report = hung[0].with_suffix(".stacks").read_text()
    assert f"process {worker} thread {worker}\n  comm: fuzz\n" in report
    for part in ("  wchan: ", "  syscall: ", "fuzz+0x"):
        assert part in report
