"""What placing blocks costs the bus, by the tier's policy and by other ways, on traces of what programs do.

`make bench-tier` prints the tables of docs/oversubscription.md (half a minute). Nothing here touches a card: a
program in C plays the policy of libvgpu and its peers on the same launches. The exit status is 1
when a bar is missed, or the player broke.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Column, Table

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "libvgpu/src"
BEGIN, END = "<!-- make bench-tier DOCS=1: begin -->", "<!-- make bench-tier DOCS=1: end -->"
WIDTH = 160  # of the tables, also where the output is a file
PERCENTS = (150, 200)  #: memory in use, relative to the card's
BUDGET = 8  #: units that may be moved at a safe point
WAYS = ("hindsight", "policy", "never", "managed")
LABELS = {"hindsight": "hindsight", "policy": "the policy", "never": "never move", "managed": "page faults (LRU)"}


class Case(msgspec.Struct, frozen=True):
    """A trace, and the reference for the policy on it."""

    trace: str
    name: str
    launches: int
    bar: str = ""  #: bus or total time, and the way for comparison
    most: float = 0


CASES = [
    Case("zipf", "Zipf", 20_000, "bus/hindsight", 1.2),
    Case("drift", "Zipf, ranks that drift", 20_000),
    Case("random", "random", 20_000, "bus/hindsight", 1.1),
    Case("cyclic", "cyclic sweep", 20_000, "bus/never", 1.02),
    Case("phases-64", "phases, sets of 64", 25_600, "total/hindsight", 1.1),
    Case("phases-100", "phases, sets of 100", 40_000, "total/hindsight", 1.1),
    Case("phases-120", "phases, sets of 120", 48_000, "total/hindsight", 1.1),
    Case("overlap-100", "phases, sets of 100 that overlap", 40_000, "total/hindsight", 1.1),
    Case("flicker", "sets of 100 for 10 to 60 launches", 20_000),
    Case("training", "training loop", 20_000, "bus/never", 1.02),
    Case("training-validation", "training loop, validation between", 20_000, "bus/never", 1.02),
    Case("training-bursts", "training loop, 20 kernels a layer", 60_000, "bus/never", 1.02),
    Case("training-random", "training loop, placed at random", 20_000, "bus/never", 1.02),
    Case("inference", "inference, KV cache that grows", 20_000),
    Case("tenants", "two tenants", 20_000),
]
LENGTHS = (2_500, 5_000, 10_000, 20_000, 50_000, 100_000)
#: blocks, the largest block in units, launches
SIZES = (
    (256, 1, 20_000),
    (256, 8, 20_000),
    (256, 256, 20_000),
    (1024, 16, 50_000),
    (4096, 1, 50_000),
    (4096, 1, 200_000),
)
SAFE_POINTS = (1, 8, 32, 128)


class Run(msgspec.Struct, frozen=True):
    """One trace, played in all ways."""

    launches: int
    bus: dict[str, int]
    moves: dict[str, int]
    points: dict[str, list[int]]

    def ratio(self, bar: str, way: str = "policy") -> float:
        """Bus or total time of `way`, divided by that of another way: `bar` is like total/hindsight."""
        what, other = bar.split("/")
        base = self.launches if what == "total" else 0
        return (base + self.bus[way]) / max(base + self.bus[other], 1)


class Player:
    """The compiled player."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "player"
        sources = [*sorted(HERE.glob("*.c")), SOURCES / "tier/policy.c"]
        compiler = os.environ.get("CC", "cc").split()
        flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
        subprocess.run([*compiler, *flags, "-o", self._program, *sources], check=True)

    def _ask(self, *arguments: object) -> dict[str, object]:
        command = [str(self._program), *map(str, arguments)]
        answer: dict[str, object] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return answer

    def play(self, trace: str, percent: int, launches: int, seed: int, every: int = 1) -> Run:
        answer = self._ask(trace, percent, launches, seed, every, BUDGET)
        ways = msgspec.convert(answer["ways"], dict[str, dict[str, int | list[int]]])
        columns = {key: {way: ways[way][key] for way in WAYS} for key in ("bus", "moves", "points")}
        return msgspec.convert({"launches": answer["launches"], **columns}, Run)

    def sizes(self, blocks: int, largest: int, launches: int, seed: int) -> dict[str, int]:
        return msgspec.convert(self._ask("sizes", blocks, largest, launches, seed), dict[str, int])

    def cost(self, blocks: int) -> dict[str, object]:
        return self._ask("cost", blocks)


class Sheet(msgspec.Struct, frozen=True):
    """A table as it is printed."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def comparison(runs: dict[tuple[str, int], list[Run]], cases: Iterable[Case], percent: int) -> Sheet:
    """Each case by its worst run: the run furthest from its bar, or from hindsight."""
    rows = []
    for case in cases:
        bar = case.bar or "total/hindsight"
        worst = max(runs[case.trace, percent], key=lambda run: run.ratio(bar))
        cells = [f"{worst.ratio(f'{what}/hindsight', way):.2f}" for way in WAYS[1:] for what in ("bus", "total")]
        value = worst.ratio(bar)
        verdict = ("met" if value <= case.most else "**missed**") if case.bar else ""
        what, other = bar.split("/")
        limit = f"{what} {value:.3f} × {other} ≤ {case.most:g}" if case.bar else ""
        rows.append([case.name, f"{worst.launches:,}", *cells, str(worst.moves["policy"]), limit, verdict])
    columns = [f"{way} {what}" for way in ("policy", "never", "faults") for what in ("bus", "total")]
    title = f"Blocks are {percent / 100:g} times the card (hindsight = 1)"
    return Sheet(title, ["", "launches", *columns, "moves", "bar", ""], rows)


def lengths(player: Player, seeds: Sequence[int]) -> Sheet:
    rows = []
    for length in LENGTHS:
        played = [[player.play("zipf", percent, length, seed) for seed in seeds] for percent in PERCENTS]
        rows.append([f"{length:,}", *(f"{max(run.ratio('bus/hindsight') for run in runs):.3f}" for runs in played)])
    columns = ["launches", *(f"{percent / 100:g} times the card" for percent in PERCENTS)]
    return Sheet("Zipf, bus time over hindsight's, by the length of the trace", columns, rows)


def safe_points(player: Player, cases: Iterable[Case], seeds: Sequence[int]) -> Sheet:
    rows = []
    for case in cases:
        cells = [
            f"{max(player.play(case.trace, 200, case.launches, s, every).ratio('total/hindsight') for s in seeds):.2f}"
            for every in SAFE_POINTS
        ]
        rows.append([case.name, *cells])
    title = (
        f"Total time over hindsight's at 2 times the card, with safe points of {BUDGET} units after every … launches"
    )
    return Sheet(title, ["", *map(str, SAFE_POINTS)], rows)


def sizes(player: Player, seeds: Sequence[int]) -> Sheet:
    rows = []
    for blocks, largest, launches in SIZES:
        played = [player.sizes(blocks, largest, launches, seed) for seed in seeds]
        ratios = (max(bus[way] / bus["hindsight"] for bus in played) for way in ("policy", "never"))
        cells = [f"1 to {largest}" if largest > 1 else "1", f"{launches:,}", *(f"{ratio:.3f}" for ratio in ratios)]
        rows.append([f"{blocks:,}", *cells])
    title = "Zipf with other numbers and sizes of blocks, 2 times the card: bus time over hindsight's"
    return Sheet(title, ["blocks", "sizes", "launches", "policy", "never"], rows)


def costs(player: Player) -> Sheet:
    rows = []
    for blocks in (256, 1024, 4096):
        cost = player.cost(blocks)
        rows.append([f"{blocks:,}", f"{cost['launch_ns']:.0f}", f"{cost['plan_ns']:.0f}"])
    title = "What the policy takes, ns (best of twenty rounds)"
    return Sheet(title, ["blocks", "launch that touches 8", "look for moves"], rows)


def show(sheets: Iterable[Sheet], console: Console) -> None:
    for sheet in sheets:
        columns = [Column(name, no_wrap=name in ("", "bar")) for name in sheet.columns]
        table = Table(*columns, title=sheet.title, title_justify="left")
        for row in sheet.rows:
            table.add_row(*(cell.replace("**missed**", "[bold]missed[/]") for cell in row))
        console.print(table)


def markdown(sheets: Iterable[Sheet], remark: str) -> str:
    text = []
    for sheet in sheets:
        text += ["", f"### {sheet.title}", "", f"| {' | '.join(sheet.columns)} |", "|---" * len(sheet.columns) + "|"]
        text += [f"| {' | '.join(row)} |" for row in sheet.rows]
    return "\n".join([*text, "", remark]) + "\n"


def replace_part(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Puts `text` between the two marks of a page; raises ValueError when the page has no marks."""
    whole = page.read_text()
    if begin not in whole or end not in whole:
        raise ValueError(f"{page} has no lines {begin} and {end}")
    page.write_text(f"{whole.partition(begin)[0]}{begin}\n{text}{end}{whole.partition(end)[2]}")


#: text stays text, and the same figures give the same file
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "vgpu", "font.size": 7, "path.simplify_threshold": 0.5}
COLOURS = dict(zip(WAYS, ("black", "tab:blue", "tab:orange", "tab:red"), strict=True))
CLIP = 6.0  # of the bars: a longer bar has its figure next to it


def draw_totals(runs: dict[tuple[str, int], list[Run]], cases: Sequence[Case], file: Path) -> None:
    """Total time of each way, relative to hindsight's."""
    figure = Figure(figsize=(10, 0.32 * len(cases) + 1.2), layout="constrained")
    panels = figure.subplots(1, len(PERCENTS), sharey=True)
    at = np.arange(len(cases))
    for axes, percent in zip(panels, PERCENTS, strict=True):
        for number, way in enumerate(WAYS[1:]):
            values = [max(run.ratio("total/hindsight", way) for run in runs[case.trace, percent]) for case in cases]
            rows = at + 0.25 * (number - 1)
            axes.barh(rows, np.minimum(values, CLIP), 0.23, color=COLOURS[way], label=LABELS[way])
            for row, value in zip(rows, values, strict=True):
                if value > CLIP:
                    axes.text(CLIP, row, f" {value:.0f}", va="center", fontsize=6)
        axes.axvline(1, color=COLOURS["hindsight"], linewidth=0.6)
        axes.set_title(f"blocks are {percent / 100:g} times the card", fontsize=7)
        axes.set_yticks(at, [case.name for case in cases])
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)
    figure.supxlabel("total time, hindsight = 1 (worst seed)")
    figure.savefig(file, metadata={"Date": None, "Creator": None})


def draw_over_time(runs: dict[tuple[str, int], list[Run]], cases: Sequence[Case], file: Path) -> None:
    """Bus time per launch along the first seed's trace, at the larger of the percentages."""
    columns = 3
    height = -(-len(cases) // columns)
    figure = Figure(figsize=(10, 1.5 * height + 0.8), layout="constrained")
    grid = figure.subplots(height, columns, squeeze=False)
    for axes, case in zip(grid.flat, cases, strict=False):
        run = runs[case.trace, PERCENTS[-1]][0]
        for way in reversed(WAYS):
            points = np.diff(run.points[way], prepend=0) / (run.launches / len(run.points[way]))
            middles = (np.arange(len(points)) + 0.5) * run.launches / len(points)
            axes.plot(middles, points, color=COLOURS[way], linewidth=0.8, label=LABELS[way])
        axes.set_title(case.name, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower right", ncols=4, frameon=False)
    figure.supxlabel("launches")
    figure.supylabel("bus time per launch, units")
    figure.savefig(file, metadata={"Date": None, "Creator": None})


def main() -> int:
    """Plays the traces, prints the tables, and writes the requested files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only traces in whose name TEXT occurs")
    parser.add_argument("--seeds", type=int, default=5, help="of each trace (default 5): the worst is shown")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write into DIR/oversubscription.md and DIR/images")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only.lower() in f"{case.trace} {case.name}".lower()]
    if not cases:
        parser.error(f"--only {options.only}: no trace has this in its name")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1")
    seeds = range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory(prefix="vgpu-tier-") as name:
        player = Player(Path(name))
        runs = {
            (case.trace, percent): [player.play(case.trace, percent, case.launches, seed) for seed in seeds]
            for case in cases
            for percent in PERCENTS
        }
        sheets = [comparison(runs, cases, percent) for percent in PERCENTS]
        if len(cases) == len(CASES):
            some = [case for case in CASES if case.trace in ("zipf", "phases-100", "training", "inference")]
            sheets += [lengths(player, seeds), sizes(player, seeds), safe_points(player, some, seeds), costs(player)]
    judged = [row for sheet in sheets[: len(PERCENTS)] for row in sheet.rows if row[-1]]
    met = sum(row[-1] == "met" for row in judged)
    remark = f"The worst of {len(seeds)} seeds. {met} of {len(judged)} bars are met."
    console = Console(width=WIDTH)
    show(sheets, console)
    console.print(remark)
    if options.docs:
        (options.docs / "images").mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(STYLE):
            draw_totals(runs, cases, options.docs / "images/tier-total.svg")
            draw_over_time(runs, cases, options.docs / "images/tier-over-time.svg")
        replace_part(options.docs / "oversubscription.md", markdown(sheets, remark))
    return int(met < len(judged))


if __name__ == "__main__":
    sys.exit(main())
