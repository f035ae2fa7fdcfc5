"""A simulated machine with one card, containers on it and programs in them.

The simulator records which program really used the card.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from vgpu.native import CardLimit, Limits, Region, paths, simulator
from vgpu.native.arbiter import Arbiter
from vgpu.native.region import CorePolicy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CARD = "T4"
#: prefixes of variables that would limit, simulate or preload in the benchmark's own environment
OURS = ("CUDA_", "VGPU_", "LD_", "GPU_CORE", "ACTIVE_OOM", "LIBCUDA", "NVIDIA_")
STEP_S = 0.02  # between two looks at the simulator's records
EDGE_S = 0.5  # at both ends of a window, which may cut off this much


def compiled(folder: Path) -> Path:
    """The program with all shapes, compiled into `folder`; raises CalledProcessError when it does not compile."""
    sys.path.insert(0, str(ROOT / "libvgpu"))
    try:
        import build
    finally:
        sys.path.pop(0)
    program = folder / "shapes"
    build.client(program, [HERE.parent / "shapes.c"], paths.simulator())
    return program


@cache
def clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(OURS)}


class Trace(msgspec.Struct, frozen=True):
    """The simulator's records over time: times of the looks, and the GPU time of each program until then.

    Shape of `busy`: looks x programs.
    """

    begun: float  #: CLOCK_MONOTONIC seconds
    at: NDArray[np.float64]  #: seconds since the trace began
    busy: NDArray[np.float64]  #: seconds

    def whole(self) -> NDArray[np.float64]:
        """GPU time of all programs together."""
        return self.busy.sum(axis=1)

    def between(self, begin: float, end: float) -> "Trace":
        inside = (self.at >= begin) & (self.at <= end)
        return Trace(self.begun, self.at[inside], self.busy[inside])

    def then(self, other: "Trace") -> "Trace":
        """This trace and a later one as one trace."""
        at = np.concatenate([self.at, other.at + other.begun - self.begun])
        return Trace(self.begun, at, np.concatenate([self.busy, other.busy]))


def share(at: NDArray[np.float64], busy: NDArray[np.float64]) -> float:
    """Percent of the time in which the card was busy.

    Where pieces of work are longer than the time between two looks, the window goes from one beginning of work to
    another: half a 50 ms kernel at its edge would already be 0.4 points of six seconds.
    """
    rising = np.diff(busy) > 0
    starts = np.flatnonzero(rising[1:] & ~rising[:-1]) + 1
    first, last = 0, len(at) - 1
    if len(starts) > 1 and at[starts[0]] <= at[0] + EDGE_S and at[starts[-1]] >= at[-1] - EDGE_S:
        first, last = int(starts[0]), int(starts[-1])
    return float((busy[last] - busy[first]) / (at[last] - at[first]) * 100)


class Program:
    """A running program of one shape."""

    def __init__(self, command: Sequence[str | Path], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        if self._process.stdout.readline() != "ready\n":
            self._process.kill()
            raise RuntimeError(f"{command[1]} did not start: {self._process.communicate()[1]}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def toggle(self) -> None:
        """Makes the program pause, or go on."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def cpu_seconds(self) -> float:
        """Processor time that the program has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        """Raises RuntimeError when the program has ended by itself."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a program ended with {self._process.returncode}: {self._process.communicate()[1]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Container:
    """A region and the programs that use it."""

    def __init__(self, machine: "Machine", directory: Path, limits: Limits) -> None:
        self._machine = machine
        directory.mkdir()
        self.region = Region.create(directory, limits)

    def start(self, shape: str, *, held: bool = False) -> Program:
        """Starts a limited program, which is one column of the machine's traces. `held`: it waits for its `toggle`."""
        variables = {"LD_PRELOAD": str(paths.libvgpu()), "VGPU_DIR": str(self.region.directory)}
        return self._machine.start(shape, held=held, **variables)


class Machine:
    """One simulated card in a folder of its own; ends its programs on exit."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._folder, self._program = folder, program
        self._closing = ExitStack()
        self._time = ""
        self._arbiter: Arbiter | None = None
        self.programs: list[Program] = []
        self.containers: list[Container] = []
        simulator.create(folder / "cards", CARD)
        self.uuid = simulator.cards(folder / "cards")[0].uuid

    def environment(self, **variables: str) -> dict[str, str]:
        simulated = {
            "LD_LIBRARY_PATH": str(paths.simulator()),
            "VGPU_SIMULATE": CARD,
            "VGPU_SIM_DIR": str(self._folder / "cards"),
            "VGPU_SIM_TIME": self._time,
        }
        return clean_environment() | simulated | variables

    def container(self, cores: int, *, policy: CorePolicy = "fixed", ceiling: int = 0, priority: int = 0) -> Container:
        """A container that may use `cores` percent of the card; 0: accounting only."""
        card = CardLimit(self.uuid, None, cores=cores, cores_ceiling=ceiling)
        limits = Limits((card,), core_policy=policy, priority=priority)
        made = Container(self, self._folder / f"container{len(self.containers)}", limits)
        self._closing.callback(made.region.close)
        self.containers.append(made)
        if self._arbiter:
            self._arbiter.follow(container.region.directory for container in self.containers)
        return made

    def start(self, shape: str, *, held: bool = False, **variables: str) -> Program:
        """Starts a program without limits."""
        command = [self._program, shape, *(["held"] if held else [])]
        program = Program(command, self.environment(**variables))
        self._closing.callback(program.kill)
        self.programs.append(program)
        return program

    def stop(self, program: Program) -> None:
        """Ends a program and removes its column from later traces."""
        program.kill()
        self.programs.remove(program)

    def output(self, shape: str, **variables: str) -> str:
        """Output of a program that ends by itself; raises CalledProcessError."""
        command = [self._program, shape]
        environment = self.environment(**variables)
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def simulate(self, time: str) -> None:
        """Sets VGPU_SIM_TIME of the simulator: how the card behaves for programs that start from now on."""
        self._time = time

    def arbitrate(self) -> None:
        """Makes an arbiter follow the containers, as the node agent does."""
        self._arbiter = Arbiter()
        self._arbiter.start()
        self._closing.callback(self._arbiter.stop)

    def look(self) -> tuple[float, list[int]]:
        """CLOCK_MONOTONIC seconds, and the GPU time (ns) of every program until then."""
        before = time.monotonic()
        busy = {process.pid: process.busy_ns[0] for process in simulator.processes(self._folder / "cards")}
        return (before + time.monotonic()) / 2, [busy.get(program.pid, 0) for program in self.programs]

    def waited(self, program: Program) -> float:
        """Seconds in which a program had work for the card that did not run, because other programs had their turn."""
        return {p.pid: p.waited_ns[0] for p in simulator.processes(self._folder / "cards")}[program.pid] / 1e9

    def record(self, seconds: float, step: float = STEP_S) -> Trace:
        """The trace of the next `seconds`; raises RuntimeError when a program ends meanwhile."""
        looks = [self.look()]
        begun = looks[0][0]
        while looks[-1][0] < begun + seconds:
            time.sleep(step)
            looks.append(self.look())
        for program in self.programs:
            program.check()
        return Trace(
            begun,
            np.array([at for at, _ in looks]) - begun,
            np.array([busy for _, busy in looks], dtype=np.float64) / 1e9,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
