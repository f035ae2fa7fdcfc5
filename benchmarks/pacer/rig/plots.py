"""Shares over time, against the limits, as SVG."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rig.report import Series
from rig.single import SINGLE
from rig.tenants import PAIRS, PRIORITY, THREE

COLUMNS = 4
#: text stays text, and the same figures give the same file
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "vgpu", "font.size": 7, "path.simplify_threshold": 0.5}
COLOURS = ("tab:blue", "tab:orange", "tab:green")
FILES = {"one-process": SINGLE, "two-containers": PAIRS, "three-containers": THREE, "priority": PRIORITY}
PROGRAMS = {
    PAIRS: ("first", "second"),
    THREE: ("20 %", "30 %", "50 %"),
    PRIORITY: ("high", "low"),
}


def _levels(title: str, row: str, labels: list[str]) -> list[float]:
    """The limits in a panel."""
    if title == SINGLE:
        return [float(label.split()[0]) for label in labels]
    if title == PAIRS:
        return [float(part.split(",")[0]) for part in row.split("/")]
    return [20, 30, 50] if title == THREE else []


def _panel(axes: Axes, title: str, row: str, traces: list[Series]) -> None:
    lines = [(one.column, one.step_s, shares) for one in traces for shares in one.shares]
    names = PROGRAMS.get(title) or [column for column, _, _ in lines]
    for (_, step, shares), name, colour in zip(lines, names, COLOURS, strict=False):
        axes.plot((np.arange(len(shares)) + 0.5) * step, shares, color=colour, linewidth=0.8, label=name)
    for level, colour in zip(_levels(title, row, [one.column for one in traces]), COLOURS, strict=False):
        axes.axhline(level, color=colour, linewidth=0.5, linestyle="--")
    axes.set_title(row, fontsize=7)
    axes.set_ylim(0, 105)
    axes.margins(x=0)


def draw(series: Iterable[Series], folder: Path) -> None:
    """Writes one file per table of shares: a panel for each row, limits dashed."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {title: list(group) for title, group in groupby(series, key=lambda one: one.table)}
    with matplotlib.rc_context(STYLE):
        for file, title in FILES.items():
            panels = [(row, list(traces)) for row, traces in groupby(tables.get(title, []), key=lambda one: one.row)]
            if not panels:
                continue
            height = -(-len(panels) // COLUMNS)
            figure = Figure(figsize=(10, 1.6 * height + 0.8), layout="constrained")
            grid = figure.subplots(height, min(COLUMNS, len(panels)), squeeze=False, sharey=True)
            for axes, (row, traces) in zip(grid.flat, panels, strict=False):
                _panel(axes, title, row, traces)
            for axes in grid.flat[len(panels) :]:
                axes.set_axis_off()
            figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)
            figure.supxlabel("seconds")
            figure.suptitle(f"{title} (simulated card)")
            figure.savefig(folder / f"{file}.svg", metadata={"Date": None, "Creator": None})
