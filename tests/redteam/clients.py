"""Compiles the intruder's programs."""

import os
import subprocess
from pathlib import Path

from vgpu.native import paths

HERE = Path(__file__).resolve().parent


def compile_into(folder: Path) -> Path:
    """Compiles grab, libraries and, where it can be linked, static, into a folder that every user may read."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    compiler = [*os.environ.get("CC", "cc").split(), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    for source, output, flags in (
        ("grab.c", "grab", ()),
        ("interposer.c", "libinterposer.so", ("-shared", "-fPIC")),
        ("namesake.c", "libnamesake.so", ("-shared", "-fPIC", "-Wl,-soname,/run/lib/libvgpu.so")),
        ("bound.c", "libbound.so", ("-shared", "-fPIC", f"-L{paths.simulator()}", "-l:libcuda.so.1")),
    ):
        subprocess.run([*compiler, "-o", folder / output, HERE / source, *flags, "-ldl"], check=True)
    # needs the static C library, which not every machine has
    static = [*compiler, "-static", "-w", "-o", folder / "static", HERE / "grab.c", "-ldl"]
    subprocess.run(static, check=False, stderr=subprocess.DEVNULL)
    return folder
