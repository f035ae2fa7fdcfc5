"""The pacer's benchmark in its short form: it runs, and what it reads are shares near the limits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import HERE

BENCH = HERE.parents[1] / "benchmarks/pacer/bench.py"


def test_shares_are_read_and_drawn(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--only", "async 2 ms", "--jobs", "3"]
    page = tmp_path / "core-limit.md"
    page.write_text((HERE.parents[1] / "docs/core-limit.md").read_text())
    files = ["--json", tmp_path / "readings.json", "--docs", tmp_path]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "readings.json").read_bytes())["rows"]
    readings = {reading["expected"]: reading["value"] for reading in row["readings"]}
    assert sorted(readings) == [20, 50, 80]
    # far below can come from a test machine with no time for the launching thread
    assert all(limit / 2 < value < limit + 5 for limit, value in readings.items()), readings
    assert "async 2 ms" in (tmp_path / "images/one-process.svg").read_text()
    assert page.read_text().count("| async 2 ms |") == 1


def test_a_pattern_that_fits_no_row_is_refused() -> None:
    done = subprocess.run([sys.executable, BENCH, "--only", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing: no row has this in its name" in done.stderr


@pytest.mark.parametrize(
    ("tenths", "limit", "given"),
    [([70, 94] * 30, 80, 80), ([30] * 9, 50, 30), ([100] * 9, 50, 50), ([60] * 5 + [95] * 5, 80, 74)],
)
def test_what_a_limit_gives_a_program_that_rests(tenths: list[int], limit: int, given: float) -> None:
    """The program may make up for unused time, but only up to its credit of 50 ms."""
    code = f"import numpy; from rig.single import served; print(round(served(numpy.array({tenths}), {limit}), 3))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(BENCH).parent, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == given
