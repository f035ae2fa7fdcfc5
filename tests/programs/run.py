"""Real third-party programs under the library on a simulated card (`make programs`).

Each program reports the memory that it sees; this must be the slice's limit and use, and the card's own count must
agree. The packages go into a separate virtual environment: VGPU_PROGRAMS, by default in the user's cache folder.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vgpu.native import CardLimit, Limits, Region, paths, simulator

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
LIMIT = 1000 * MIB
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
HOME = Path(os.environ.get("VGPU_PROGRAMS") or CACHE / "vgpu-programs")
PYTHON = HOME / "bin/python"
RUNTIMES = [line for line in (HERE / "runtimes.txt").read_text().splitlines() if not line.startswith("#")]
#: prefixes of variables that would limit, simulate or preload in the caller's environment
OURS = ("CUDA_", "VGPU_", "LD_", "GPU_CORE", "ACTIVE_OOM", "LIBCUDA", "NVIDIA_", "PYTHON")


@dataclass(frozen=True)
class Slice:
    """One slice of LIMIT bytes on a card of its own."""

    folder: Path
    driver: str = "13.0"

    @property
    def cards(self) -> Path:
        return self.folder / "cards"

    def make(self) -> None:
        simulator.create(self.cards, f"T4@{self.driver}")
        card = simulator.cards(self.cards)[0]
        (self.folder / "region").mkdir()
        limits = Limits((CardLimit(card.uuid, LIMIT, context_bytes=card.context_bytes),))
        Region.create(self.folder / "region", limits).close()
        # some programs open the driver by a name that only development packages have
        (self.folder / "lib").mkdir()
        (self.folder / "lib/libcuda.so").symlink_to(paths.simulator() / "libcuda.so.1")

    def environment(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if not k.startswith(OURS)} | {
            "LD_LIBRARY_PATH": f"{paths.simulator()}:{self.folder / 'lib'}",
            "LD_PRELOAD": str(paths.libvgpu()),
            "VGPU_DIR": str(self.folder / "region"),
            "VGPU_SIM_DIR": str(self.cards),
            "PYTHONPATH": str(HERE),
            "CUPY_CACHE_DIR": str(self.folder / "compiled"),
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def used(self) -> tuple[int, int]:
        """Bytes by the ledger and by the card's own count."""
        with Region.open(self.folder / "region") as region:
            return region.usage().cards[0].used, simulator.cards(self.cards)[0].used


def check(held: bool, sentence: str) -> None:
    if not held:
        raise AssertionError(sentence)


def followed(script: str, slice_: Slice, *arguments: str, modules: int = 0) -> str:
    """Follows a script step by step.

    `modules`: the most modules that it loads (their memory is the driver's, and not charged).
    """
    process = slice_.start(str(PYTHON), str(HERE / script), *arguments)
    assert process.stdin
    assert process.stdout
    seen, other = [], []
    for line in process.stdout:
        if not line.startswith('{"step"'):
            other.append(line)
            continue
        step = json.loads(line)
        ledger, truth = slice_.used()
        own = step["total"] - step["free"]
        place = f"{script} at {step['step']}"
        check(step["total"] == LIMIT, f"{place}: {step['total']} bytes in all instead of {LIMIT}")
        check(own == ledger, f"{place}: told {own} bytes used, the ledger has {ledger}")
        spare = modules * simulator.cards(slice_.cards)[0].module_bytes
        check(ledger <= truth <= ledger + spare, f"{place}: ledger {ledger}, card {truth}")
        check(ledger <= LIMIT, f"{place}: {ledger} of {LIMIT}")
        seen.append(f"{step['step']} {own // MIB}")
        process.stdin.write("\n")
        process.stdin.flush()
    check(process.wait() == 0, f"{script}: exit {process.returncode}\n{''.join(other)}")
    return ", ".join(seen) + " MiB"


def look_on(slice_: Slice, look: Callable[[Slice, int, int], str]) -> str:
    """Runs a tool on a slice with a process that uses some of it; `look` gets the process's pid and the bytes used."""
    holder = slice_.start(str(PYTHON), str(HERE / "holder.py"))
    assert holder.stdout
    step = json.loads(holder.stdout.readline())
    try:
        return look(slice_, holder.pid, step["total"] - step["free"])
    finally:
        holder.communicate("\n")


def tool(slice_: Slice, *words: str) -> str:
    done = subprocess.run(
        [HOME / "bin" / words[0], *words[1:]], env=slice_.environment(), capture_output=True, text=True, check=False
    )
    check(done.returncode == 0, f"{words[0]}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


def gpustat(slice_: Slice, pid: int, used: int) -> str:
    (card,) = json.loads(tool(slice_, "gpustat", "--json"))["gpus"]
    told = card["memory.used"], card["memory.total"], [process["pid"] for process in card["processes"]]
    check(told == (used // MIB, LIMIT // MIB, [pid]), f"gpustat tells {told}")
    return f"{told[0]} of {told[1]} MiB, its own process"


def nvitop(slice_: Slice, pid: int, used: int) -> str:
    told = f"{used / MIB:.1f}MiB / {LIMIT // MIB}MiB"
    text = tool(slice_, "nvitop", "-1")
    check(told in text, f"nvitop does not tell {told}:\n{text}")
    check(str(pid) in text, f"nvitop does not show process {pid}:\n{text}")
    return f"{told}, its own process"


def runtime(slice_: Slice, wheel: str) -> str:
    """A program on a plain CUDA runtime of any version; its kernel's module is the only one."""
    (library,) = (HOME / "runtimes" / wheel).rglob("libcudart.so.*")
    return followed("with_cudart.py", slice_, str(library), modules=1)


PROGRAMS: dict[str, Callable[[Slice], str]] = {
    "cuda-core": lambda slice_: followed("with_cuda_core.py", slice_),
    "cupy": lambda slice_: followed("with_cupy.py", slice_, modules=4),
    "numba-cuda": lambda slice_: followed("with_numba.py", slice_),
    "taichi": lambda slice_: followed("with_taichi.py", slice_, modules=16),
    "gpustat": lambda slice_: look_on(slice_, gpustat),
    "nvitop": lambda slice_: look_on(slice_, nvitop),
}
#: drivers with which a runtime starts: drivers that are not older than its major version
DRIVERS = {"11": ("11.8", "12.4", "13.0"), "12": ("12.4", "13.0"), "13": ("13.0",)}


def runs() -> Iterator[tuple[str, str, Callable[[Slice], str]]]:
    """Name of each run, its driver, and the run."""
    for name, program in PROGRAMS.items():
        yield name, "13.0", program
    for wheel in RUNTIMES:
        version = wheel.partition("==")[2]
        for driver in DRIVERS[version.partition(".")[0]]:
            yield f"cudart {version} on {driver}", driver, partial(runtime, wheel=wheel)


def install() -> None:
    """Installs the packages of requirements.txt."""
    stamp, wanted = HOME / "requirements.txt", (HERE / "requirements.txt").read_text() + "\n".join(RUNTIMES)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    venv.create(HOME, with_pip=True, symlinks=True)
    pip = [PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
    for wheel in RUNTIMES:
        folder = HOME / "runtimes" / wheel
        if not folder.exists():
            subprocess.run([*pip, "--no-deps", "--target", folder, wheel], check=True)
    stamp.write_text(wanted)


def main() -> int:
    install()
    failed = 0
    for name, driver, program in runs():
        with tempfile.TemporaryDirectory(prefix="vgpu-programs-") as folder:
            slice_ = Slice(Path(folder), driver)
            slice_.make()
            try:
                print(f"{name:26} {program(slice_)}", flush=True)
            except AssertionError as e:
                failed += 1
                print(f"{name:26} FAILED: {e}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
