"""Prints what share of a simulated card programs get whose work is hard to measure, at a limit of 20 %.

    python benchmarks/pacer/escapes.py [TEXT]     # rows with TEXT in their name

Each row is a manner of libvgpu/tests/clients/escapes.c, without an arbiter and with one. `share`: busy time in the
simulator's books over the time that passed, percent. `metered`: GPU time in the region, less that of the books, percent
of the latter. Nothing is asserted; tests/native/test_pacer_escapes.py does, with room for a busy machine.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/native")]

import test_pacer_escapes as escapes  # noqa: E402 the path comes first
from core_share import make_region, within  # noqa: E402
from preloaded import compiled  # noqa: E402

from vgpu.native import Region  # noqa: E402

BAR, BAR_ONCE = 21.0, 25.0  #: percent of the card
PROCESSES = 30
LATE = {"VGPU_SIM_LAUNCH_QUEUE_MS": "20"}

Run = Callable[[Path, Region], escapes.Books]


def repeating(manner: str, kernel: str, count: int, **env: str) -> Run:
    def run(folder: Path, region: Region) -> escapes.Books:
        with escapes.repeating(within(folder, region, **env), manner, kernel, count):
            escapes.measured(folder, region)
            return escapes.measured(folder, region)

    return run


def one_by_one(manner: str, kernel: str) -> Run:
    def run(folder: Path, region: Region) -> escapes.Books:
        program = compiled("escapes.c", driver=True)
        with escapes.watched(folder, region) as books:
            for _ in range(PROCESSES):
                subprocess.run([program, manner, kernel], env=within(folder, region), check=False)
        return books

    return run


def rows() -> dict[str, tuple[Run, float]]:
    """Name → the run, and its bar in percent of the card."""
    found = {name: (repeating(name, kernel, count), BAR) for name, (kernel, count) in escapes.MANNERS.items()}
    for kernel, (manner, count) in escapes.LATE.items():
        found[f"late launches, {kernel}"] = repeating(manner, kernel, count, **LATE), BAR
    for manner, kernel in (
        ("once-exits", "spin_200ms"),
        ("once-returns", "spin_60ms"),
        ("once-is-killed", "spin_20ms"),
        ("once-exits", "spin_20ms"),
        ("long-at-last", "spin_arg_us"),
    ):
        found[f"{PROCESSES} processes, {manner}, {kernel}"] = one_by_one(manner, kernel), BAR_ONCE
    return found


def main(text: str = "") -> int:
    table = Table("program", "share", "metered", "share, arbiter", "metered, arbiter", "bar", "")
    missed = 0
    for name, (run, bar) in rows().items():
        if text not in name:
            continue
        cells, shares = [], []
        for arbitrated in (False, True):
            with (
                tempfile.TemporaryDirectory() as folder,
                make_region(Path(folder), cores=escapes.LIMIT) as region,
                escapes.arbiter_of(region) if arbitrated else nullcontext(),
            ):
                books = run(Path(folder), region)
            shares.append(books.share)
            cells += [f"{books.share:.1f}", f"{(books.metered / books.busy - 1) * 100:+.1f}"]
        verdict = "met" if max(shares) <= bar else "missed"
        missed += verdict == "missed"
        table.add_row(name, *cells, f"≤ {bar:g}", verdict)
        print(f"{name}: {' '.join(cells)} {verdict}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    print(f"Simulated card, limit {escapes.LIMIT} %. {table.row_count - missed} rows met their bars, {missed} missed.")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
