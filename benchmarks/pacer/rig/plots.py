"""Shares over time, against the limits, as SVG."""

from collections.abc import Mapping
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


def _panels(series: Mapping[str, Series], title: str) -> list[tuple[str, list[tuple[str, Series]]]]:
    """Rows of a table, each with its traces and what they are called."""
    own = [(name.removeprefix(f"{title}: "), one) for name, one in series.items() if name.startswith(f"{title}: ")]
    named = [(*name.rsplit(", ", 1), one) for name, one in own]
    return [(row, [(label, one) for _, label, one in group]) for row, group in groupby(named, key=lambda item: item[0])]


def _levels(title: str, row: str, labels: list[str]) -> list[float]:
    """The limits that a panel shows as lines."""
    if title == SINGLE:
        return [float(label.split()[0]) for label in labels]
    if title == PAIRS:
        return [float(part.split(",")[0]) for part in row.split("/")]
    return [20, 30, 50] if title == THREE else []


def _panel(axes: Axes, title: str, row: str, traces: list[tuple[str, Series]]) -> None:
    lines = [(label, one.step_s, shares) for label, one in traces for shares in one.shares]
    names = PROGRAMS.get(title)
    for index, (label, step, shares) in enumerate(lines):
        at = (np.arange(len(shares)) + 0.5) * step
        shown = names[index] if names else label
        axes.plot(at, shares, color=COLOURS[index % len(COLOURS)], linewidth=0.8, label=shown)
    for index, level in enumerate(_levels(title, row, [label for label, _ in traces])):
        axes.axhline(level, color=COLOURS[index % len(COLOURS)], linewidth=0.5, linestyle="--")
    axes.set_title(row, fontsize=7)
    axes.set_ylim(0, 105)
    axes.margins(x=0)


def draw(series: Mapping[str, Series], folder: Path) -> None:
    """Writes one file per table of shares: a panel for each row, limits dashed. `series`: of the benchmark's rows."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for file, title in FILES.items():
            panels = _panels(series, title)
            if not panels:
                continue
            height = -(-len(panels) // COLUMNS)
            figure = Figure(figsize=(10, 1.7 * height + 0.6), layout="constrained")
            grid = figure.subplots(height, min(COLUMNS, len(panels)), squeeze=False, sharey=True)
            for axes, (row, traces) in zip(grid.flat, panels, strict=False):
                _panel(axes, title, row, traces)
            for axes in grid.flat[len(panels) :]:
                axes.set_axis_off()
            grid.flat[0].legend(loc="upper right", ncols=3, fontsize=6, frameon=False)
            figure.supxlabel("seconds")
            figure.suptitle(f"{title} (simulated card)")
            figure.savefig(folder / f"{file}.svg", metadata={"Date": None, "Creator": None})
