"""What share of a simulated card a limited container really gets, against its limit; and what the pacer costs.

`make bench-pacer` prints the tables of docs/core-limit.md (three runs, about 20 minutes), `make bench-pacer QUICK=1`
one short run. Shares are the simulator's own books, never what the library believes. A missed bar is marked, not an
error: the exit status is 1 only when a run broke.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rig import cost, plots, single, tenants
from rig.machine import Machine, Trace, compiled
from rig.report import FULL, QUICK, Plan, Reading, Series, Trial, lines, markdown, replace_part, show, write_json

MEMORY = Path("/dev/shm")  # regions are in memory where a node agent makes them

WIDTH = 150  # of the tables, also where the output is a file


def processor_times() -> tuple[int, int]:
    """Ticks of all processors that were idle, and all ticks, since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


class Bench:
    """Runs trials and stores their readings."""

    def __init__(self, folder: Path, plan: Plan, console: Console) -> None:
        self._folder, self._plan, self._console = folder, plan, console
        self._program = compiled(folder)
        self._lock = threading.Lock()
        self._started = 0
        self.runs = 0  #: number of complete runs
        self.results: dict[tuple[str, str], list[Reading]] = {}
        self.series: list[Series] = []
        self.broken: list[str] = []

    def one(self, trial: Trial) -> tuple[list[Reading], Trace | None]:
        """Runs a trial once, on a machine of its own; returns nothing when the trial broke."""
        with self._lock:
            self._started += 1
            folder = self._folder / str(self._started)
        folder.mkdir()
        try:
            with Machine(folder, self._program) as machine:
                return trial.run(machine, self._plan)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.broken.append(f"{trial.name}: {error}")
            return [], None

    def all(self, trials: Sequence[Trial], jobs: int) -> None:
        """Runs every trial as often as the plan says.

        Trials that must be alone run one by one, the others `jobs` at a time. An interrupt ends this; complete runs
        count.
        """
        for run in range(self._plan.runs):
            try:
                self._run(run, trials, jobs)
            except KeyboardInterrupt:
                self._console.print(f"interrupted in run {run + 1}")
                return

    def _run(self, run: int, trials: Sequence[Trial], jobs: int) -> None:
        due = [trial for trial in trials if run == 0 or not trial.once]
        beside, alone = [t for t in due if not t.alone], [t for t in due if t.alone]
        begun = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            done = list(pool.map(self.one, beside))
        done += map(self.one, alone)
        for trial, (readings, trace) in zip(beside + alone, done, strict=True):
            self._keep(run, trial, readings, trace)
        self.runs += 1
        self._console.print(f"run {run + 1} of {self._plan.runs}: {time.monotonic() - begun:.0f} s", style="dim")

    def _keep(self, run: int, trial: Trial, readings: list[Reading], trace: Trace | None) -> None:
        for reading in readings:
            self.results.setdefault((trial.table, reading.row or trial.row), []).append(reading)
        if trace is not None and run == 0:
            self.series.append(Series.of(trial, readings[0].column, trace))


def chosen(pattern: str) -> list[Trial]:
    """Trials with the pattern in their name."""
    makers: list[Callable[[], list[Trial]]] = [single.trials, tenants.trials, cost.trials]
    return [trial for make in makers for trial in make() if pattern.lower() in trial.name.lower()]


def main() -> int:
    """Runs the trials, prints the tables, and writes the requested files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="three runs of 5 s warm-up and 6 s; else one short run")
    parser.add_argument("--jobs", type=int, default=2, help="simulated machines at work at a time (default 2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows in whose name TEXT occurs")
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="write tables and plots into DIR/core-limit.md",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all readings and traces there")
    options = parser.parse_args()
    plan, console = FULL if options.full else QUICK, Console(width=WIDTH)
    trials = chosen(options.only)
    if not trials:
        parser.error(f"--only {options.only}: no row has this in its name")
    idle, whole = processor_times()
    with tempfile.TemporaryDirectory(prefix="vgpu-pacer-", dir=MEMORY if MEMORY.is_dir() else None) as name:
        bench = Bench(Path(name), plan, console)
        bench.all(trials, options.jobs)
    idle_now, whole_now = processor_times()
    found = lines(bench.results)
    verdicts = [line.met for table in found for line in table.lines if line.met is not None]
    remark = (
        f"Simulated card; {bench.runs} run(s) of {plan.warm_s:g} s warm-up and {plan.measured_s:g} s, the reading"
        f" furthest from its limit; {options.jobs} machine(s) at a time on {os.cpu_count()} processors, which were busy"
        f" {100 - 100 * (idle_now - idle) / (whole_now - whole):.0f} % of the time, load {os.getloadavg()[1]:.1f}."
        f" {sum(verdicts)} rows met their bars, {len(verdicts) - sum(verdicts)} missed."
    )
    show(found, console)
    console.print(remark)
    if options.json:
        write_json(options.json, bench.results, bench.series)
    if options.docs:
        plots.draw(bench.series, options.docs / "images")
        replace_part(options.docs / "core-limit.md", markdown(found, remark))
    for line in bench.broken:
        console.print(f"BROKEN {line}", style="red")
    return 1 if bench.broken or not bench.runs else 0


if __name__ == "__main__":
    sys.exit(main())
