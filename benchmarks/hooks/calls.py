"""The program calls.c: how to compile it, and its output. Only calls.c lists the calls and their bars."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from vgpu.native import paths

HERE = Path(__file__).resolve().parent


class Call(msgspec.Struct, frozen=True):
    """The time of one call, and the time that the library may add; ns."""

    ns: float
    bar: int
    moving: int  #: the bar in a slice whose blocks may move


def compiled(folder: Path) -> Path:
    """The program, linked with the simulator's libcuda.so.1, whose names are the driver's.

    Raises ValueError with the end of the compiler's output, OSError where there is no compiler.
    """
    sys.path.insert(0, str(HERE.parents[1] / "libvgpu"))
    try:
        import build
    finally:
        sys.path.pop(0)
    program = folder / "calls"
    includes = [f"-I{directory}" for directory in build.header_dirs()]
    link = [f"-L{paths.simulator()}", "-l:libcuda.so.1"]
    compiler = os.environ.get("CC", "cc").split()
    command = [*compiler, "-O2", *includes, "-o", program, HERE / "calls.c", *link]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"calls.c does not compile: {done.stderr[-300:]}")
    return program


def read(text: str) -> dict[str, Call]:
    """Calls by name, in the order of the program's output. Raises ValueError for an invalid line."""
    return {
        name: Call(float(ns), int(bar), int(moving))
        for name, ns, bar, moving in (line.split("\t") for line in text.splitlines())
    }
