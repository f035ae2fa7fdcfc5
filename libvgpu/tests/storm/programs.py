"""Compiles the storms and runs them on simulated cards, with the library preloaded or without."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBVGPU = HERE.parents[1]
sys.path.insert(0, str(LIBVGPU))
import build  # noqa: E402  (of libvgpu, which is no package)
from vgpu.native import paths  # noqa: E402  (behind the path above)


def compiled(name: str, folder: Path, *flags: str) -> Path:
    """HERE/NAME.c with what it needs, as a program in `folder`."""
    sources = [HERE / f"{name}.c", HERE / "arena.c", *build.agent_sources()]
    includes = [f"-I{d}" for d in (LIBVGPU / "include", LIBVGPU / "src", LIBVGPU / "simulator", *build.header_dirs())]
    command = [
        *os.environ.get("CC", "cc").split(),
        "-std=gnu11",
        "-O2",
        "-g",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        *flags,
    ]
    command += [*includes, "-o", str(folder / name), *map(str, sources + build.sources_of("simulator/common"))]
    subprocess.run([*command, f"-L{paths.simulator()}", "-l:libcuda.so.1"], check=True)
    return folder / name


def run(
    program: Path, *arguments: str | int, preload: bool = True, cards: str = "T4"
) -> tuple[int, dict[str, float], str]:
    """Exit status, the figures that the program printed, and what it complained about."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "VGPU_", "LD_", "NVIDIA_", "GPU_CORE"))}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="vgpu-storm-", dir=memory if memory.is_dir() else None) as folder:
        variables = clean | {
            "LD_LIBRARY_PATH": str(paths.simulator()),
            "VGPU_SIMULATE": cards,
            "VGPU_SIM_DIR": f"{folder}/cards",
        }
        variables |= {"LD_PRELOAD": str(paths.libvgpu())} if preload else {}
        command = [str(program), folder, *map(str, arguments)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return done.returncode, dict(zip(words[::2], map(float, words[1::2]), strict=True)), done.stderr
