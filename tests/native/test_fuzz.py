"""Plays the committed programs of the fuzz target under the preloaded library; `make fuzz` plays mutations of them."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parents[2] / "libvgpu/tests/fuzz"


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FUZZ / "run.py", *arguments], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.xdist_group("fuzz")
def test_ledger_and_truth_agree_after_every_program() -> None:
    done = fuzz("--seed", "1", "--runs", "16", "--seconds", "60")
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
