"""What the library adds to driver calls, by the program of `make bench-hooks` on this driver."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from vgpu.native import paths

from .children import Broken
from .machine import ROOT, Command, Machine, Tier
from .rows import Row, broken

FAMILY: Final = "driver calls"
#: ns that may be added, or RELATIVE of what the call takes by itself if that is more: a real driver's calls take µs
BARS: Final = {
    "cuMemAlloc+cuMemFree": 100,
    "...with 10000 live blocks": 120,
    "cuMemAllocAsync+cuMemFreeAsync": 100,
    "cuMemGetInfo": 20,
    "cuLaunchKernel": 20,
    "...of four large blocks": 20,
    "cuMemcpyHtoD": 2,
    "not hooked: cuCtxGetCurrent": 2,
}
#: the same where blocks may move: what is handed in passes a gate, and what kernels use is noted
MOVING: Final = BARS | {
    "cuMemAlloc+cuMemFree": 150,
    "...with 10000 live blocks": 170,
    "cuMemAllocAsync+cuMemFreeAsync": 150,
    "cuLaunchKernel": 50,
    "...of four large blocks": 50,
    "cuMemcpyHtoD": 30,
}
RELATIVE: Final = 0.05
SECONDS: Final = 60.0  #: for one run of all calls
CORES: Final = 90


def compiled() -> Path:
    """The program; linked against the simulator's libcuda.so.1, whose names are the driver's. Raises Broken."""
    sys.path.insert(0, str(ROOT / "libvgpu"))
    try:
        import build
    finally:
        sys.path.pop(0)
    folder = ROOT / "build/gpu-check"  # not among the regions: what is in /dev/shm may not be executed everywhere
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "calls"
    includes = [f"-I{directory}" for directory in build.header_dirs()]
    link = [f"-L{paths.simulator()}", "-l:libcuda.so.1"]
    compiler = os.environ.get("CC", "cc").split()
    command: Command = [*compiler, "-O2", *includes, "-o", program, ROOT / "benchmarks/hooks/calls.c", *link]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"calls.c does not compile: {done.stderr[-300:]}")
    return program


def figures(text: str) -> dict[str, float]:
    """Call → ns, of the program's output."""
    return {name: float(value) for name, value in (line.rsplit(maxsplit=1) for line in text.splitlines())}


def judged(
    variant: str, native: Mapping[str, float], ours: Mapping[str, float], bars: Mapping[str, int] = BARS
) -> list[Row]:
    """A row per call; `native`, `ours`: ns without the library and with it; `bars`: ns that may be added."""
    rows = []
    for call, cost in native.items():
        added, bar = ours[call] - cost, max(float(bars[call]), RELATIVE * cost)
        told = f"{cost:.1f} ns", f"{ours[call]:.1f} ns", f"{added:+.1f} ns"
        rows.append(Row(FAMILY, f"{call}, {variant}", *told, f"<= +{bar:.0f} ns", added <= bar))
    return rows


def check(machine: Machine) -> list[Row]:
    """All calls without the library, in a slice, in one with a core limit, and in one whose blocks may move."""
    try:
        program = compiled()
        # the simulated driver takes longer for launches of mapped blocks, as they are where they can move
        variables = {"MAPPED": "1"} if machine.simulate else {}
        with machine.native([program], seconds=SECONDS, variables=variables) as child:
            native = figures(child.text())
        rows = []
        memory = machine.slice_mib()
        for variant, cores in (("memory limit", 0), ("memory and core limit", CORES)):
            with machine.limited([program], memory=memory, cores=cores, seconds=SECONDS, variables=variables) as child:
                rows += judged(variant, native, figures(child.text()))
        moving = Tier(memory, memory // 2 + machine.context_mib, memory // 2, movable=True)
        with machine.tiered([program], moving, seconds=SECONDS) as child:
            rows += judged("memory that moves", native, figures(child.text()), MOVING)
    except Broken as error:
        return [broken(FAMILY, "benchmarks/hooks/calls.c", str(error))]
    return rows
