"""Cost of the preloaded library: start of programs without a driver, and driver calls on the simulator.

`make bench-hooks` prints two tables: medians of starts, and means of calls. Of several runs, the smallest mean counts,
because other work on the machine only adds time. For 16 processes at once, the mean of all runs counts: it is chance in
each run whether two of them disturb each other, and this disturbance is measured. The tables compare variants on one
machine at one time. They say nothing about another machine, nor about a real driver, whose own calls take longer than
the simulator's.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from calls import Call, compiled, read
from rich.console import Console
from rich.table import Table

from vgpu.native import CardLimit, Limits, Region, paths

STARTS = 500
TURNS = 3
CROWD_TURNS = 12
CROWD = "...in each of 16 processes"
# The agent keeps regions in memory, so this benchmark does, too. On a disk, write-backs would disturb the measurement.
MEMORY = Path("/dev/shm")
OURS = ("CUDA_", "VGPU_", "LD_", "GPU_CORE", "ACTIVE_OOM", "LIBCUDA", "NVIDIA_")
VARIANTS: dict[str, dict[str, str]] = {
    "no limits": {},
    "memory limit": {"CUDA_DEVICE_MEMORY_LIMIT": "8g"},
    "memory and core limit": {"CUDA_DEVICE_MEMORY_LIMIT": "8g", "CUDA_DEVICE_SM_LIMIT": "90"},
    "memory that moves": {},
}
MOVES = "memory that moves"
#: limits that the environment cannot express: half of the memory is guaranteed on the card, and blocks move
MOVABLE = Limits((CardLimit("", 8 << 30, 4 << 30),), host_memory=4 << 30, oversubscribe=True, movable=True)


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(OURS)}


def start_us(command: list[str], env: dict[str, str]) -> float:
    """Time to run a command once, microseconds."""
    begun = time.perf_counter()
    subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - begun) * 1e6


def starts(console: Console) -> None:
    table = Table("program", "bare µs", "preloaded µs", "added µs", title="Start without a driver (bar: < 1000 added)")
    for command in (["/bin/true"], ["bash", "-c", ":"], [sys.executable, "-S", "-c", "pass"]):
        bare, loaded = clean(), clean() | {"LD_PRELOAD": str(paths.libvgpu())}
        # in turns, so that other work on the machine affects both variants alike
        pairs = [(start_us(command, bare), start_us(command, loaded)) for _ in range(STARTS)]
        without, with_it = median(p[0] for p in pairs), median(p[1] for p in pairs)
        table.add_row(Path(command[0]).name, f"{without:.0f}", f"{with_it:.0f}", f"{with_it - without:+.0f}")
    console.print(table)


def run(program: Path, *arguments: str, **variables: str) -> str:
    """Output of the program, on new cards: the records of a card grow with the processes that used the card."""
    with tempfile.TemporaryDirectory(dir=program.parent) as cards:
        env = clean() | {"LD_LIBRARY_PATH": str(paths.simulator()), "VGPU_SIMULATE": "T4", "VGPU_SIM_DIR": cards}
        command = [program, *arguments]
        return subprocess.run(command, env=env | variables, check=True, capture_output=True, text=True).stdout


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """The smallest figure of each call, for the crowd the mean; ns."""
    times = {call: [run[call] for run in runs if call in run] for call in runs[0]}
    return {call: fmean(found) if call == CROWD else min(found) for call, found in times.items()}


def bar(call: Call) -> str:
    """The bar as the table shows it, with the bar of moving memory where that is different."""
    return f"+{call.bar}" + (f" (moves: +{call.moving})" if call.moving != call.bar else "")


def driver_calls(console: Console) -> None:
    table = Table("call", "native ns", *VARIANTS, "bar", title="Driver calls on the simulator: native, then ns added")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("native", *VARIANTS)}
    bars = {CROWD: "2 x native"}
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        folder = Path(name)
        program = compiled(folder)
        for turn in range(CROWD_TURNS):  # in turns, so that other work on the machine affects all variants alike
            for variant in runs:
                region = folder / f"region{turn}{variant}"
                region.mkdir()
                if variant == MOVES:
                    Region.create(region, MOVABLE).close()
                limits = VARIANTS.get(variant)
                variables = {} if limits is None else limits | {"LD_PRELOAD": str(paths.libvgpu())}
                variables |= {"VGPU_DIR": str(region)} if limits or variant == MOVES else {}
                variables |= {"MAPPED": "1"} if variant != MOVES else {}
                one = read(run(program, **variables)) if turn < TURNS else {}
                bars |= {name: bar(call) for name, call in one.items()}
                times = {name: call.ns for name, call in one.items()}
                runs[variant].append(times | {CROWD: float(run(program, "crowd", **variables))})
    native = summary(runs.pop("native"))
    columns = [summary(column) for column in runs.values()]
    for call, cost in native.items():
        table.add_row(call, f"{cost:.1f}", *(f"{column[call] - cost:+.1f}" for column in columns), bars[call])
    console.print(table)


if __name__ == "__main__":
    console = Console()
    starts(console)
    driver_calls(console)
