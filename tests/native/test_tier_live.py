"""The bench of the tier with real programs: the library's result for traces with known bus times."""

import json
import subprocess
import sys
from pathlib import Path

from preloaded import HERE

BENCH = HERE.parents[1] / "benchmarks/tier"
PLAY = """
import json, sys
from pathlib import Path
from bench import Player
from playing.machine import SEED, WAIT, Machine
folder, trace, launches, *ways = sys.argv[1:]
machine, bus = Machine(Path(folder)), {}
for way in ways:
    with machine.room() as room:
        bus[way] = room.play(trace, 200, int(launches), way).bus
print(json.dumps([bus, Player(Path(folder)).play(trace, 200, int(launches), SEED, WAIT).bus]))
"""


def played(folder: Path, trace: str, launches: int, *ways: str) -> tuple[dict[str, float], dict[str, int]]:
    """Bus time of real programs by way, and the time that the bench of the policy computes, in units."""
    done = subprocess.run(
        [sys.executable, "-c", PLAY, folder, trace, str(launches), *ways],
        cwd=BENCH,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bus, reckoned = json.loads(done.stdout)
    return bus, reckoned


def test_a_sweep_moves_nothing_and_takes_what_was_reckoned(tmp_path: Path) -> None:
    """Faults take their own time besides: 30 us for each of the four groups of a block, here 0.36 units."""
    bus, reckoned = played(tmp_path, "cyclic", 320, "card", "never", "movable", "managed")
    assert [round(bus[way], 1) for way in ("card", "never", "movable")] == [0, 40 * 32, 40 * 32]
    assert reckoned["never"] == 40 * 32
    came = reckoned["managed"] / 2
    assert 0.95 < bus["managed"] / (reckoned["managed"] + came * 0.36) < 1.05


def test_another_working_set_comes_in_as_fast_as_safe_points_allow(tmp_path: Path) -> None:
    bus, reckoned = played(tmp_path, "phases-100", 8000, "movable")
    assert bus["movable"] < 1.25 * reckoned["policy"] < 0.05 * reckoned["never"]


def test_a_full_queue_gives_a_loan_back(tmp_path: Path) -> None:
    """A thousand launches that have not ended, while a neighbour has half of the card's time."""
    code = (
        "import sys; from pathlib import Path; from playing.loans import Machine, taken_back; "
        "back = taken_back(Machine(Path(sys.argv[1])), 0, False); "
        "print(back.given_s is not None, back.taken_s is not None)"
    )
    command = [sys.executable, "-c", code, tmp_path]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "True True\n", done.stderr


def test_what_fits_no_trace_is_refused() -> None:
    command = [sys.executable, str(BENCH / "live.py"), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing: no trace has this in its name" in done.stderr


BARS = """
import sys
import bench, live
for bar in (1.02, 0.98):
    bench.CASES[:] = [bench.Case("cyclic", "sweep", 320, "bus/never", bar), bench.Case("zipf", "Zipf", 320)]
    sys.argv[1:] = ["--only", "sweep", "--seeds", "1"]
    print("status", bench.main())
for taken in (1.0, 1.1, None):
    live.taken_back = lambda *_: live.Return(0.1, taken)
    sys.argv[1:] = ["--only", "two tenants"]
    print("status", live.main())
"""


def test_both_benches_fail_where_a_bar_is_missed() -> None:
    done = subprocess.run([sys.executable, "-c", BARS], cwd=BENCH, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("status") or "bars are met" in line]
    statuses = [line for line in said if line.startswith("status")]
    assert statuses == ["status 0", "status 1", "status 0", "status 1", "status 1"], done
    for line, met in zip(said[::2], ("2 of 2", "0 of 2", "6 of 6", "0 of 6", "0 of 6"), strict=True):
        assert line.endswith(f" {met} bars are met.")
