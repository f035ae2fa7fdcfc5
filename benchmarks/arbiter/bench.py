"""Cost of the arbiter for a node: CPU time with 8 cards and 10 containers on each.

`make bench` prints the table; the bar is 1 % of one CPU. The containers are simulated: one program writes what the
library would write into their usage files. So the figure contains only the arbiter's work.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vgpu.native import CardLimit, Limits, Region, paths
from vgpu.native.arbiter import Arbiter

HERE = Path(__file__).resolve().parent
MEMORY = Path("/dev/shm")  # where a node's regions are
CARDS, CONTAINERS = 8, 10
SECONDS = 5.0
BAR = 1.0
CASES = {"idle": "", "busy, short launches": "SHORT", "busy, long launches that overlap": "LONG"}


def compile_load(folder: Path) -> Path:
    program = folder / "load"
    command = [*os.environ.get("CC", "cc").split(), "-O2", f"-I{paths.include()}", "-o", str(program)]
    subprocess.run([*command, str(HERE / "load.c")], check=True)
    return program


def make_regions(folder: Path) -> list[Path]:
    made = []
    for card in range(CARDS):
        for number in range(CONTAINERS):
            directory = folder / f"{card}-{number}"
            directory.mkdir()
            limit = CardLimit(f"GPU-{card:08}-0000-0000-0000-000000000000", None, cores=10)
            Region.create(directory, Limits((limit,), core_policy="elastic")).close()
            made.append(directory)
    return made


def measure(arbiter: Arbiter) -> tuple[float, float]:
    """(% of one CPU, looks per second) over some seconds."""
    before, begun = arbiter.state(), time.monotonic()
    time.sleep(SECONDS)
    after, passed = arbiter.state(), time.monotonic() - begun
    return (after.cpu_ns - before.cpu_ns) / passed / 1e7, (after.passes - before.passes) / passed


def main() -> None:
    title = f"The arbiter with {CARDS} cards x {CONTAINERS} containers (bar: < {BAR:g} % of one CPU)"
    table = Table("containers", "% of a CPU", "looks/s", title=title)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        program = compile_load(folder)
        directories = make_regions(folder)
        arbiter = Arbiter()
        arbiter.follow(directories)
        arbiter.start()
        for what, kind in CASES.items():
            load = None
            if kind:
                command = [program, kind, *directories]
                load = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                assert load.stdout
                load.stdout.readline()
            percent, looks = measure(arbiter)
            if load:
                load.communicate()
            table.add_row(what, f"{percent:.2f}", f"{looks:.0f}")
        arbiter.stop()
    Console().print(table)


if __name__ == "__main__":
    main()
