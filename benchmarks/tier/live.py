"""The traces of the tier's bench as real programs under the real library, on a simulated card with a bus.

`make bench-tier LIVE=1` prints the tables (some minutes, more on a busy machine). What the card did is exact in any
case: the simulator counts the time in which its kernels ran, the library's log tells what moved. The exit status is 1
when a bar is missed, or a program broke.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from bench import CASES, PERCENTS, Case, Player, Run, Sheet, markdown, replace_part, show
from playing.loans import HALF, LEAST_S, MANNERS, MODES, PATIENCE_S, Return, taken_back
from playing.machine import BLOCK_MIB, SEED, WAIT, Machine, Played
from rich.console import Console

BEGIN, END = (f"<!-- make bench-tier LIVE=1 DOCS=1: {word} -->" for word in ("begin", "end"))
MEMORY = Path("/dev/shm")  # regions are in memory where a node agent makes them
LAUNCHES = {
    "zipf": 20_000, "random": 10_000, "cyclic": 5_000, "phases-100": 16_000, "training": 10_000,
    "training-bursts": 20_000, "training-random": 10_000, "inference": 10_000,
}  # fmt: skip
TRACES = [case for case in CASES if case.trace in LAUNCHES]
WAYS = ("card", "never", "movable", "managed")
WIDTH = 190  # of the tables, also where the output is a file
LOANS = "two tenants"
BAR_S = 1.0  #: longest time until a neighbour has its guarantee


class Live(msgspec.Struct, frozen=True):
    """One trace in all ways, and the computed figures of the policy's bench for it."""

    case: Case
    ways: dict[str, Played]
    reckoned: Run

    def value(self, what: str, way: str) -> float:
        """Units of bus or total time."""
        if way == "hindsight":
            return self.reckoned.bus[way] + (self.reckoned.launches if what == "total" else 0)
        played = self.ways[way]
        return played.bus if what == "bus" else played.total

    def over_never(self, what: str, way: str) -> str:
        return f"{self.value(what, way) / self.value(what, 'never'):.2f}"

    def bar(self) -> list[str]:
        """The bar as a sentence, the figure of the policy's bench, and whether the bar is met."""
        if not self.case.bar:
            return ["", "", ""]
        what, other = self.case.bar.split("/")
        value = self.value(what, "movable") / self.value(what, other)
        verdict = "met" if value <= self.case.most else "**missed**"
        return [
            f"{what} {value:.3f} × {other} ≤ {self.case.most:g}",
            f"{self.reckoned.ratio(self.case.bar):.3f}",
            verdict,
        ]

    def cells(self) -> list[str]:
        totals = [self.over_never("total", way) for way in ("card", "hindsight", "movable", "managed")]
        buses = [self.over_never("bus", way) for way in ("hindsight", "movable", "managed")]
        clock = f"{self.ways['movable'].clock_ns / self.ways['never'].clock_ns:.2f}"
        return [
            self.case.name,
            f"{self.reckoned.launches:,}",
            *totals,
            clock,
            *buses,
            str(self.ways["movable"].moves),
            *self.bar(),
        ]


def play(machine: Machine, player: Player, case: Case, percent: int) -> Live:
    launches = LAUNCHES[case.trace]
    reckoned = player.play(case.trace, percent, launches, SEED, WAIT)
    ways = {}
    for way in WAYS:
        with machine.room() as room:
            ways[way] = room.play(case.trace, percent, launches, way)
    return Live(case, ways, reckoned)


def traces(lives: Iterable[Live], percent: int) -> Sheet:
    columns = [
        "", "launches", "card total", "hindsight total", "movable total", "faults total", "movable clock",
        "hindsight bus", "movable bus", "faults bus", "moves", "bar", "reckoned", "",
    ]  # fmt: skip
    title = f"Under the library, blocks are {percent / 100:g} times the guarantee (never moving = 1)"
    return Sheet(title, columns, [live.cells() for live in lives])


def _seconds(value: float | None) -> str:
    return f"over {PATIENCE_S:.0f}" if value is None else f"{value:.2f}"


def loans(machine: Machine) -> Sheet:
    rows = []
    for manner, wait in MANNERS.items():
        for mode, movable in MODES.items():
            back: Return = taken_back(machine, wait, movable)
            verdict = "met" if back.taken_s is not None and back.taken_s <= BAR_S else "**missed**"
            rows.append([manner, mode, _seconds(back.given_s), _seconds(back.taken_s), f"≤ {BAR_S:g} s", verdict])
    size = HALF * BLOCK_MIB
    what = f"{size} MiB on loan go back, {size} MiB of the neighbour come"
    title = f"Two tenants: {what}; the bus alone takes {LEAST_S:.2f} s"
    columns = ["who has the loan", "the neighbour", "given back, s", "neighbour has its guarantee, s", "bar", ""]
    return Sheet(title, columns, rows)


def main() -> int:
    """Plays the traces, prints the tables, and writes the requested files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only traces in whose name TEXT occurs")
    parser.add_argument("--jobs", type=int, default=2, help="traces at a time (default 2)")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write into DIR/oversubscription.md")
    options = parser.parse_args()
    only = options.only.lower()
    cases = [case for case in TRACES if only in f"{case.trace} {case.name}".lower()]
    if not cases and only not in LOANS:
        parser.error(f"--only {options.only}: no trace has this in its name")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    with tempfile.TemporaryDirectory(prefix="vgpu-tier-", dir=MEMORY) as name, ThreadPoolExecutor(options.jobs) as pool:
        machine, player = Machine(Path(name)), Player(Path(name))
        begun = [[pool.submit(play, machine, player, case, percent) for case in cases] for percent in PERCENTS]
        lives = [[one.result() for one in column] for column in begun]
        sheets = [traces(column, percent) for column, percent in zip(lives, PERCENTS, strict=True) if column]
        if only in LOANS:
            sheets.append(loans(machine))
    judged = [row[-1] for sheet in sheets for row in sheet.rows if row[-1]]
    remark = f"One run. {judged.count('met')} of {len(judged)} bars are met."
    console = Console(width=WIDTH)
    show(sheets, console)
    console.print(remark)
    if options.docs:
        replace_part(options.docs / "oversubscription.md", markdown(sheets, remark), BEGIN, END)
    return int(judged.count("met") < len(judged))


if __name__ == "__main__":
    sys.exit(main())
