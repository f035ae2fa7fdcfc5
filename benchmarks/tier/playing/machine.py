"""Programs that play the bench's traces on a simulated card with a bus, with or without the library."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vgpu.native import CardLimit, Limits, Region, paths, simulator

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent
ROOT = HERE.parents[2]
CARD = "A100-40"
BUS = 25_000  #: bytes per us of this card (libvgpu/simulator/README.md)
BLOCKS, BLOCK_MIB = 256, 8  #: BLOCKS is as in trace.h
BLOCK = BLOCK_MIB << 20
UNIT = BLOCK * 1000 // BUS  #: ns that a block takes over the bus, and that a launch computes
WAIT = 8  #: launches between two waits for the card
SEED = 1
LIMIT = 2 * BLOCKS * BLOCK  #: enough for all blocks, and for the program's other memory
GRANULE = 2 << 20
#: Part of a guarantee that large blocks leave free
TIER = (ROOT / "libvgpu/src/tier/tier.c").read_text()
HEADROOM_PART = int(re.findall(r"^#define HEADROOM_PART (\d+)u\b", TIER, re.M)[0])
OURS = ("CUDA_", "VGPU_", "LD_", "GPU_CORE", "ACTIVE_OOM", "LIBCUDA", "NVIDIA_")


def guarantee(blocks: int) -> int:
    """Bytes of a guarantee in which this many blocks fit in addition to the headroom."""
    least = blocks * BLOCK * HEADROOM_PART // (HEADROOM_PART - 1)
    return -(-least // GRANULE) * GRANULE


def compiled(folder: Path) -> Path:
    """The program, compiled into `folder`; raises CalledProcessError when it does not compile."""
    sys.path.insert(0, str(ROOT / "libvgpu"))
    try:
        import build
    finally:
        sys.path.pop(0)
    program = folder / "play"
    build.client(program, [HERE / "play.c", TRACES / "trace.c"], paths.simulator(), f"-I{TRACES}")
    return program


class Played(msgspec.Struct, frozen=True):
    """The times of a trace."""

    launches: int
    busy_ns: int  #: time in which its kernels ran on the card, including their waits for the bus
    clock_ns: int
    moves: int

    @property
    def bus(self) -> float:
        """Units: waits of launches for the bus, and moves."""
        return self.busy_ns / UNIT - self.launches + self.moves

    @property
    def total(self) -> float:
        """Units, including computation."""
        return self.launches + self.bus


class Program:
    """A started program. It prints a word and waits for an answer."""

    def __init__(self, process: subprocess.Popen[str], log: Path, cards: Path) -> None:
        self._process = process
        self._log = log
        self._cards = cards

    def heard(self) -> list[str]:
        """Words of its next line; raises RuntimeError with its log when it ended instead."""
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if not words:
            code = self._process.wait()
            raise RuntimeError(f"{self._process.args}: exit {code}\n{self._log.read_text()[-2000:]}")
        return words

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def played(self) -> Played:
        """Waits for its end; raises RuntimeError when it used memory that did not exist."""
        launches, clock_ns = map(int, self.heard())
        self._process.wait()
        truth = next(one for one in reversed(simulator.processes(self._cards)) if one.pid == self._process.pid)
        if sum(truth.faults):
            raise RuntimeError(f"{self._process.args}: {sum(truth.faults)} launches named memory that was not there")
        moves = len(re.findall("moved .* card", self._log.read_text()))
        return Played(launches, truth.busy_ns[0], clock_ns, moves)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Room:
    """A folder with a card of its own, and regions."""

    def __init__(self, folder: Path, program: Path) -> None:
        self._folder = folder
        self._program = program
        self._cards = folder / "cards"
        simulator.create(self._cards, CARD)

    def card(self) -> simulator.SimCard:
        return simulator.cards(self._cards)[0]

    @contextmanager
    def region(self, name: str, capacity: int, movable: bool) -> Iterator[Region]:
        """Limits for all blocks, of which `capacity` are guaranteed on the card; all of them: no tier."""
        tier = capacity < BLOCKS
        card = CardLimit(self.card().uuid, LIMIT, guarantee(capacity) if tier else None)
        (self._folder / name).mkdir()
        limits = Limits((card,), host_memory=LIMIT, oversubscribe=tier, movable=tier and movable)
        with Region.create(self._folder / name, limits) as made:
            yield made

    @contextmanager
    def program(self, *arguments: object, region: str = "", migrate: bool = False) -> Iterator[Program]:
        """A program that has printed "ready"; without a region: without the library."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(OURS)}
        env |= {
            "LD_LIBRARY_PATH": str(paths.simulator()),
            "VGPU_SIMULATE": CARD,
            "VGPU_SIM_DIR": str(self._cards),
            "VGPU_SIM_TIME": f"bus=profile,managed={'migrate' if migrate else 'resident'}",
        }
        if region:
            env |= {
                "LD_PRELOAD": str(paths.libvgpu()),
                "VGPU_DIR": str(self._folder / region),
                "LIBCUDA_LOG_LEVEL": "4",
            }
        log = self._folder / f"log-{region}"
        with log.open("w") as file:
            process = subprocess.Popen(
                [self._program, *map(str, arguments)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        program = Program(process, log, self._cards)
        try:
            program.heard()
            yield program
        finally:
            program.kill()

    def play(self, trace: str, percent: int, launches: int, way: str) -> Played:
        """Plays a whole trace; `way`: card (all is there), never (static), movable or managed."""
        capacity = BLOCKS * 100 // percent
        memory = "managed" if way == "managed" else "alloc"
        arguments = (trace, capacity, launches, SEED, memory, BLOCK_MIB, WAIT, UNIT)
        if way == "managed":
            with self.program(*arguments, migrate=True) as program:
                return _through(program)
        region = self.region(way, BLOCKS if way == "card" else capacity, way == "movable")
        with region, self.program(*arguments, region=way) as program:
            return _through(program)


def _through(program: Program) -> Played:
    program.tell()
    program.heard()
    program.tell()
    return program.played()


class Machine:
    """Makes rooms, each with a fresh card; several may exist at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = compiled(folder)

    @contextmanager
    def room(self) -> Iterator[Room]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            yield Room(folder, self._program)
        finally:
            shutil.rmtree(folder)
