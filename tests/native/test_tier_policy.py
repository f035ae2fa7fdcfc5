"""Which blocks the tier would keep on a card: its arithmetic, its bars on traces of programs, and the bench."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from preloaded import HERE, compiled, run

ROOT = HERE.parents[1]
POLICY = ROOT / "libvgpu/src/tier/policy.c"
BENCH = ROOT / "benchmarks/tier"
SEED = 101  #: not one of those that the bench shows


def test_arithmetic() -> None:
    sanitizers = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run([compiled("../tier_policy_units.c", f"-I{POLICY.parents[1]}", *sanitizers, str(POLICY), "-lm")], {})


def play(*arguments: object) -> subprocess.CompletedProcess[str]:
    parts = (*(str(BENCH / f"{name}.c") for name in ("trace", "ways", "sizes")), str(POLICY))
    program = compiled(str(BENCH / "player.c"), "-O2", f"-I{POLICY.parents[1]}", *parts, output="tier-player")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def played(trace: str, percent: int, launches: int) -> tuple[int, Mapping[str, int]]:
    """Number of launches, and the bus time of every way."""
    done = play(trace, percent, launches, SEED, 1, 8)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer["launches"], {way: one["bus"] for way, one in answer["ways"].items()}


@pytest.mark.parametrize("percent", [150, 200])
@pytest.mark.parametrize(
    ("trace", "launches", "other", "most"),
    [
        ("zipf", 20_000, "hindsight", 1.2),
        ("random", 10_000, "hindsight", 1.1),
        ("cyclic", 10_000, "never", 1.02),
        ("training", 10_000, "never", 1.02),
        ("training-validation", 10_000, "never", 1.02),
        ("training-bursts", 30_000, "never", 1.02),
    ],
)
def test_bus_time_is_within_its_bar(trace: str, launches: int, percent: int, other: str, most: float) -> None:
    _, bus = played(trace, percent, launches)
    assert bus["policy"] <= most * bus[other]


@pytest.mark.parametrize("percent", [150, 200])
@pytest.mark.parametrize(("trace", "launches"), [("phases-100", 16_000), ("phases-120", 19_200), ("tenants", 20_000)])
def test_total_time_is_near_that_of_hindsight(trace: str, launches: int, percent: int) -> None:
    total, bus = played(trace, percent, launches)
    assert total + bus["policy"] <= 1.1 * (total + bus["hindsight"])
    assert total + bus["policy"] <= 0.5 * (total + bus["never"])


@pytest.mark.parametrize("largest", [1, 64])
def test_blocks_of_mixed_sizes_are_placed_as_well(largest: int) -> None:
    done = play("sizes", 256, largest, 20_000, SEED)
    assert done.returncode == 0, done.stderr
    bus = json.loads(done.stdout)
    assert bus["policy"] <= 1.2 * bus["hindsight"] < bus["never"]


def test_what_the_player_is_compared_with_is_known() -> None:
    """A sweep over 256 blocks takes 32 launches, and 128 are on the card: "least recently used" misses all of them."""
    launches, bus = played("cyclic", 200, 3200)
    assert launches == 3200
    assert bus["never"] == bus["hindsight"] == 100 * 128
    first = bus["managed"] - 99 * 256 * 2  # in the first round some are there still
    assert 128 * 2 <= first <= 256 * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing", 150, 1000, 1, 1, 8), "no trace nothing"),
        (("zipf", 99, 1000, 1, 1, 8), "PERCENT is 99; allowed is a number from 100 to 1000"),
        (("zipf", 150, 1000, 1, 0, 8), "EVERY is 0"),
        ((), "traces: zipf"),
    ],
)
def test_the_player_says_what_is_wrong(arguments: tuple[object, ...], said: str) -> None:
    done = play(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_bench_writes_its_page(tmp_path: Path) -> None:
    page = tmp_path / "oversubscription.md"
    page.write_text((ROOT / "docs/oversubscription.md").read_text())
    command = [sys.executable, str(BENCH / "bench.py"), "--only", "training loop, validation", "--seeds", "1"]
    done = subprocess.run([*command, "--docs", str(tmp_path)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert page.read_text().count("| training loop, validation between |") == 2
    assert "The worst of 1 seeds. 2 of 2 bars are met." in page.read_text()
    for name in ("tier-total", "tier-over-time"):
        assert "training loop, validation between" in (tmp_path / f"images/{name}.svg").read_text()


def test_the_bench_refuses_what_fits_no_trace() -> None:
    command = [sys.executable, str(BENCH / "bench.py"), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing: no trace has this in its name" in done.stderr
