"""Tables that fit their terminal without losing a figure: only columns of free text shrink."""

import sys
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

LEAST: Final = 8  #: characters that a shrinking column keeps
LONGEST: Final = 2000  #: characters of one cell, also in files: a command line may have two million
_GAP: Final = "  "
_ENDLESS: Final = 1_000_000  #: width of a file


class Columns:
    """Lines of texts under headings; a heading that begins with ">" aligns its column to the right.

    `shrinking`: headings of columns that may lose their ends, in this order, each down to LEAST characters. A table
    that is still wider than the terminal is printed unchanged, and the terminal breaks the lines.
    """

    def __init__(self, *headings: str, shrinking: Sequence[str] = ()) -> None:
        self._right = [heading.startswith(">") for heading in headings]
        self._headings = tuple(heading.removeprefix(">") for heading in headings)
        self._shrinking = [self._headings.index(heading) for heading in shrinking if heading in self._headings]
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Appends a line with one text for each heading."""
        if len(cells) != len(self._headings):
            raise ValueError(f"{len(cells)} cells for {len(self._headings)} columns")
        self._rows.append(tuple(_cut(cell, LONGEST) for cell in cells))

    def _fitted(self, room: int) -> tuple[list[int], str]:
        """Widths of the columns, and the text between them."""
        widths = [max(map(cell_len, column)) for column in zip(self._headings, *self._rows, strict=True)]
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - room
        for at in self._shrinking:
            spared = min(max(excess, 0), max(widths[at] - LEAST, 0))
            widths[at] -= spared
            excess -= spared
        return widths, _GAP if excess <= 0 else _GAP[1:]

    def _line(self, cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
        shown = []
        for cell, width, right in zip(cells, widths, self._right, strict=True):
            text = _cut(cell, width)
            blanks = " " * (width - cell_len(text))
            shown.append(blanks + text if right else text + blanks)
        return gap.join(shown).rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths, gap = self._fitted(options.max_width)
        # A full-screen view must break lines itself; for scrolling text, the terminal does that.
        whole = not console.is_alt_screen
        for at, row in enumerate((self._headings, *self._rows)):
            style = "" if at else "bold"
            yield Text(self._line(row, widths, gap), style=style, no_wrap=whole, overflow="ignore" if whole else "fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least, most = (sum(widths) + len(gap) * (len(widths) - 1) for widths, gap in map(self._fitted, (0, _ENDLESS)))
        return Measurement(least, most)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def console(*, soft_wrap: bool = False) -> Console:
    """A console on stdout; `soft_wrap`: the terminal breaks long lines.

    Without a terminal, the text is plain and lines have no maximum length, for grep and files, even against
    FORCE_COLOR.
    """
    if sys.stdout.isatty():
        return Console(soft_wrap=soft_wrap)
    return Console(color_system=None, force_terminal=False, width=_ENDLESS, soft_wrap=soft_wrap)


def show(console: Console, thing: RenderableType) -> None:
    """Prints tables without losing a figure, even where the terminal is too narrow for them."""
    console.print(thing, crop=False)
