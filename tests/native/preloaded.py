"""Runs programs under the preloaded library on the simulated driver."""

import os
import subprocess
import sys
import tempfile
from atexit import register
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import rmtree

from vgpu.native import paths

HERE = Path(__file__).resolve().parent
CLIENTS = HERE.parents[1] / "libvgpu" / "tests" / "clients"
MIB = 1 << 20
#: prefixes of variables that would limit, simulate or preload in the environment of the test run itself
OURS = ("CUDA_", "VGPU_", "LD_", "GPU_CORE", "ACTIVE_OOM", "LIBCUDA", "NVIDIA_")


def environment(folder: Path, *, cards: str = "T4", preload: bool = True, **variables: str) -> dict[str, str]:
    """Environment of a program that sees simulated `cards` (state in `folder`/cards) through the library."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    clean |= {
        "LD_LIBRARY_PATH": str(paths.simulator()),
        "VGPU_SIMULATE": cards,
        "VGPU_SIM_DIR": str(folder / "cards"),
        "PYTHONPATH": str(HERE),
    }
    if preload:
        clean["LD_PRELOAD"] = str(paths.libvgpu())
    if any(name.startswith("CUDA_DEVICE_") for name in variables):
        clean["VGPU_DIR"] = ""  # each process alone, as the test wants it
    return clean | variables


def run(
    command: Sequence[str | Path], env: Mapping[str, str], *, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; `code`: the exit status it must have (None: any)."""
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=60, check=False)
    assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def python(script: str, env: Mapping[str, str]) -> list[str]:
    """Output lines of a Python script that may `from driver_client import *`."""
    done = run([sys.executable, "-c", script], env)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@cache
def workshop() -> Path:
    """A folder for compiled clients; it is removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="vgpu-clients-"))
    register(rmtree, folder, ignore_errors=True)
    return folder


@cache
def header_dirs() -> tuple[str, ...]:
    """Where cuda.h and nvml.h are."""
    sys.path.insert(0, str(HERE.parents[1] / "libvgpu"))
    try:
        import build
    finally:
        sys.path.pop(0)
    return tuple(map(str, build.header_dirs()))


@cache
def compiled(source: str, *flags: str, output: str = "", driver: bool = False) -> Path:
    """A program (or with -shared a library) from libvgpu/tests/clients; `driver`: linked with the simulated libcuda."""
    target = workshop() / (output or Path(source).stem)
    link = [f"-L{paths.simulator()}", "-l:libcuda.so.1"] if driver else []
    subprocess.run(
        [
            *os.environ.get("CC", "cc").split(), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread",
            *(f"-I{folder}" for folder in header_dirs()), "-o", target, CLIENTS / source, *flags, *link, "-ldl",
        ],
        check=True,
    )  # fmt: skip
    return target
