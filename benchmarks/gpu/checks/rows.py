"""Rows of the table: the requirement, the result, and whether the result meets its bar. Pure."""

import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final, Literal

import msgspec

MIB: Final = 1 << 20
COLUMNS: Final = ("verdict", "what", "native or asked", "got", "error", "bar", "remark")
WIDTHS: Final = (7, 31, 18, 18, 10, 11)  #: of the printed columns, one blank between them; remarks stand below
WIDTH: Final = sum(WIDTHS) + len(WIDTHS) - 1  #: 100, so that it reads in a pipe, a log and a narrow terminal


class Row(msgspec.Struct, frozen=True):
    """One line of the table; texts carry their units."""

    family: str
    what: str
    asked: str = ""  #: the limit, or the figure without the library
    got: str = ""
    error: str = ""
    bar: str = ""  #: empty: the figure is only shown
    met: bool | None = None  #: None: there is no bar, or it was not run
    remark: str = ""
    ran: bool = True
    broke: bool = False  #: the program ended in a wrong way
    timed: bool = False  #: it compares a time or a rate
    simulated: bool = False  #: the times are from a simulated card, on a machine that also does other work

    @property
    def verdict(self) -> Literal["met", "missed", "off", "not run", ""]:
        """The verdict; "off": a time of a simulated card is outside the bar, which says nothing about a real card."""
        if not self.ran:
            return "not run"
        if self.met is None:
            return ""
        return "met" if self.met else "off" if self.timed and self.simulated else "missed"

    def cells(self) -> tuple[str, ...]:
        """Texts in the order of COLUMNS."""
        return self.verdict, self.what, self.asked, self.got, self.error, self.bar, self.remark


def not_run(family: str, what: str, why: str) -> Row:
    """A row that could not be tried here; it does not count as missed."""
    return Row(family, what, remark=why, ran=False)


def broken(family: str, what: str, why: str) -> Row:
    """A row whose program ended in a wrong way; it counts as missed."""
    return Row(family, what, bar="runs", met=False, remark=why, broke=True)


def exact(family: str, what: str, asked: int, got: int, remark: str = "") -> Row:
    """Two numbers of bytes that must be the same."""
    return Row(family, what, mib(asked), mib(got), f"{got - asked} B", "0 B", got == asked, remark)


def status(rows: Iterable[Row]) -> int:
    """The exit status of the whole command: 0 only when something ran and no row misses its bar."""
    verdicts = {row.verdict for row in rows}
    return 0 if verdicts & {"met", "off"} and "missed" not in verdicts else 1


def printed(rows: Sequence[Row], mark: str) -> list[str]:
    """The table as lines of at most WIDTH characters: a title for each family, its rows, a remark below its row."""
    lines = []
    for family, members in families(rows).items():
        lines += ["", f"{family}{mark}", *_row(COLUMNS[:-1]), *_row(tuple("-" * width for width in WIDTHS))]
        for row in members:
            *cells, remark = row.cells()
            lines += _row(cells)
            indent = " " * (WIDTHS[0] + 1)
            lines += textwrap.wrap(remark, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines


def _row(cells: Sequence[str]) -> list[str]:
    """One row; a cell that is wider than its column continues on the next line."""
    parts = [textwrap.wrap(cell, width) for cell, width in zip(cells, WIDTHS, strict=True)]
    return [
        " ".join(part.ljust(width) for part, width in zip(line, WIDTHS, strict=True)).rstrip()
        for line in zip_longest(*parts, fillvalue="")
    ]


def mib(size: int) -> str:
    """A number of bytes in MiB, exactly: a rest below one MiB is given in bytes."""
    whole, rest = divmod(abs(size), MIB)
    parts = [f"{whole} MiB"] * bool(whole) + [f"{rest} B"] * bool(rest)
    return "-" * (size < 0) + (" ".join(parts) or "0 B")


def families(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by family, in their original order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.family, []).append(row)
    return found


def markdown(title: str, facts: Sequence[tuple[str, str]], rows: Sequence[Row], simulated: bool) -> str:
    """A page of the documentation.

    A page for a simulated card says so in its title, in each table and at the top.
    """
    mark = " (simulated)" if simulated else ""
    text = [f"# {title}{mark}", ""]
    if simulated:
        text += [
            "**Simulated**: the driver and the card are the simulator's. Nothing here was found on a real card.",
            "",
        ]
    text += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]
    for family, members in families(rows).items():
        text += ["", f"## {family[0].upper()}{family[1:]}{mark}", "", f"| {' | '.join(COLUMNS)} |"]
        text += ["|---" * len(COLUMNS) + "|"]
        text += ["| " + " | ".join(_bold(cell).replace("\n", " ") for cell in row.cells()) + " |" for row in members]
    return "\n".join(text) + "\n"


def _bold(cell: str) -> str:
    return f"**{cell}**" if cell == "missed" else cell.replace("|", "\\|")
