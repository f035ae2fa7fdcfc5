"""Readings of all runs, and the printed tables."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from rig.machine import EDGE_S, Machine, Trace

BEGIN, END = "<!-- make bench-pacer DOCS=1: begin -->", "<!-- make bench-pacer DOCS=1: end -->"
LONG_S = 4  # traces up to here show milliseconds


class Plan(msgspec.Struct, frozen=True):
    """Duration and number of the measurements."""

    warm_s: float
    measured_s: float
    runs: int

    @property
    def whole_s(self) -> float:
        """Length of a trace in which at least `measured_s` can be measured."""
        return self.warm_s + self.measured_s + 2 * EDGE_S


FULL = Plan(warm_s=5, measured_s=6, runs=3)
QUICK = Plan(warm_s=2, measured_s=3, runs=1)


class Reading(msgspec.Struct, frozen=True):
    """One figure of one run, and its expected value."""

    column: str
    value: float
    expected: float | None = None  #: None: the figure is only shown
    bar: float = 0  #: how far it may be from `expected`
    sense: Literal["within", "at most", "at least"] = "within"
    row: str = ""  #: row of the table, where one trial fills several rows; else the trial's own row
    most: float | None = None  #: values from `expected` up to this one are no error

    @property
    def error(self) -> float:
        """Distance from `expected` in the directions that count; 0 where no value is expected."""
        if self.expected is None:
            return 0
        error = self.value - self.expected
        if (self.sense == "at most" and error < 0) or (self.sense == "at least" and error > 0):
            return 0
        return max(0, self.value - self.most) if self.most is not None and error > 0 else error

    @property
    def met(self) -> bool:
        return self.expected is None or abs(self.error) <= self.bar


class Trial(msgspec.Struct, frozen=True):
    """A measurement that runs on its own machine, several times."""

    table: str
    row: str
    run: Callable[[Machine, Plan], tuple[list[Reading], Trace | None]]
    alone: bool = False  #: its figures are milliseconds or less: no other trial may run at the same time
    once: bool = False  #: a reference for other trials; measured in the first run only

    @property
    def name(self) -> str:
        return f"{self.table}: {self.row}"


def _cell(readings: list[Reading]) -> str:
    """The reading of all runs that is furthest from its expected value."""
    worst = max(readings, key=lambda reading: abs(reading.error))
    text = f"{worst.value:.1f}" if abs(worst.value) < 1000 else f"{worst.value:.0f}"
    if worst.expected is None:
        return text
    if worst.sense == "at most":
        return text
    return f"{text} ({worst.error if worst.sense == 'within' else worst.value - worst.expected:+.2f})"


def _bar(readings: Iterable[Reading]) -> str:
    """All bars of a row in words."""
    words = {
        f"±{r.bar:g}" if r.sense == "within" else f"{'≤' if r.sense == 'at most' else '≥'} {(r.expected or 0):.4g}"
        for r in readings
        if r.expected is not None
    }
    return ", ".join(sorted(words))


class Line(msgspec.Struct, frozen=True):
    """A row as it is printed."""

    row: str
    cells: list[str]
    worst: str
    bar: str
    met: bool | None  #: None: no value was expected

    def verdict(self, met: str, missed: str) -> str:
        return "" if self.met is None else met if self.met else missed


class Lines(msgspec.Struct, frozen=True):
    """A table as it is printed."""

    title: str
    columns: list[str]
    lines: list[Line]


Results = Mapping[tuple[str, str], list[Reading]]  # by table and row


def _line(row: str, columns: list[str], readings: list[Reading]) -> Line:
    cells = [[r for r in readings if r.column == column] for column in columns]
    judged = [r for r in readings if r.expected is not None]
    worst = f"{max(abs(r.error) for r in judged):.2f}" if judged else ""
    met = all(r.met for r in judged) if judged else None
    return Line(row, [_cell(cell) if cell else "" for cell in cells], worst, _bar(judged), met)


def lines(results: Results) -> list[Lines]:
    """All tables; each cell has the reading of all runs that is furthest from its expected value."""
    found = []
    for title in dict.fromkeys(table for table, _ in results):
        rows = {row: readings for (table, row), readings in results.items() if table == title}
        columns = list(dict.fromkeys(reading.column for readings in rows.values() for reading in readings))
        found.append(Lines(title, columns, [_line(row, columns, readings) for row, readings in rows.items()]))
    return found


def show(tables: Iterable[Lines], console: Console) -> None:
    """Prints them."""
    for one in tables:
        first = Column("", no_wrap=True)
        table = Table(first, *one.columns, "max error", "bar", "", title=one.title, title_justify="left")
        for line in one.lines:
            table.add_row(line.row, *line.cells, line.worst, line.bar, line.verdict("met", "[bold]missed[/]"))
        console.print(table)


def markdown(tables: Iterable[Lines], remark: str) -> str:
    """The same as Markdown for a page of the documentation."""
    text = []
    for one in tables:
        heads = ["", *one.columns, "max error", "bar", ""]
        text += ["", f"### {one.title}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for line in one.lines:
            cells = [line.row, *line.cells, line.worst, line.bar, line.verdict("met", "**missed**")]
            text.append("| " + " | ".join(cells) + " |")
    return "\n".join([*text, "", remark]) + "\n"


def replace_part(page: Path, text: str) -> None:
    """Puts `text` between the two marks of a page; raises ValueError when the page has no marks."""
    whole = page.read_text()
    if BEGIN not in whole or END not in whole:
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    before, after = whole.partition(BEGIN)[0], whole.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


class Series(msgspec.Struct, frozen=True):
    """A trace in the form for plots: shares in percent, one value per `step_s`."""

    table: str
    row: str
    column: str  #: the first column that the trial filled
    step_s: float
    shares: list[list[float]]  #: per program

    @classmethod
    def of(cls, trial: Trial, column: str, trace: Trace) -> "Series":
        """Averages over 0.2 s, or over 20 ms of a short trace."""
        step_s = 0.2 if trace.at[-1] > LONG_S else 0.02
        ends = np.arange(0, trace.at[-1], step_s)
        sums = [np.interp(ends, trace.at, busy) for busy in trace.busy.T]
        return cls(
            trial.table,
            trial.row,
            column,
            step_s,
            [[round(float(x), 1) for x in np.diff(column) / step_s * 100] for column in sums],
        )


def write_json(file: Path, results: Results, series: list[Series]) -> None:
    """All readings and the traces of the first run."""
    rows = [{"table": table, "row": row, "readings": readings} for (table, row), readings in results.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.format(msgspec.json.encode({"rows": rows, "series": series}), indent=1))
