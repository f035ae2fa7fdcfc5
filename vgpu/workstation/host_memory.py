"""How much memory of this machine a command may have behind its cards: the machine can keep all of its promises."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from vgpu.devices import GpuSlice
from vgpu.native import Region
from vgpu.workstation.place import Demand, NoRoom
from vgpu.workstation.slices import Run, SliceStore

MIB: Final = 1 << 20
_RESERVE: Final = (256, 4096)  #: MiB, minimum and maximum, as in libvgpu/src/tier/memory.c; between them …
_RESERVE_PART: Final = 20  #: … one part in this many


class HostMemory(msgspec.Struct, frozen=True):
    """The memory of this machine, MiB."""

    total: int
    available: int  #: memory that programs can have now without swapping
    promised: int = 0  #: promised to commands that run
    unused: int = 0  #: part of `promised` that the commands have not taken yet

    @property
    def reserve(self) -> int:
        """Memory that the library leaves to the machine in any case."""
        least, most = _RESERVE
        return min(max(self.total // _RESERVE_PART, least), most)

    @property
    def most(self) -> int:
        """The largest amount that all commands together can be promised."""
        return max(0, self.total - self.reserve)

    @property
    def idle(self) -> "HostMemory":
        """The same machine when nothing runs."""
        return HostMemory(self.total, self.total)


def read(file: Path = Path("/proc/meminfo")) -> HostMemory:
    """MemTotal and MemAvailable of proc(5); 0: not known."""
    text = file.read_text()

    def line(name: str) -> int:
        match = re.search(rf"^{name}: +([0-9]+) kB$", text, re.MULTILINE)
        return int(match[1]) // 1024 if match else 0

    return HostMemory(line("MemTotal"), line("MemAvailable"))


def now(store: SliceStore, runs: Sequence[Run]) -> HostMemory:
    """The machine's memory now, with the promises to `runs` (all living commands). Needs the store's lock."""
    return msgspec.structs.replace(
        read(),
        promised=sum(run.host_memory for run in runs),
        unused=sum(max(0, run.host_memory - _used(store, run)) for run in runs if run.host_memory),
    )


def _used(store: SliceStore, run: Run) -> int:
    """MiB of host memory that a command has behind its cards."""
    try:
        with Region.open(store.directory(run)) as region:
            return sum(card.host_used for card in region.usage().cards) // MIB
    except OSError:
        return 0  # claimed a moment ago, or damaged by the command itself


def bounded(demand: Demand, machine: HostMemory) -> Demand | NoRoom:
    """`demand` with the host memory that it may have: the amount it asks for, if available, or half of what is left."""
    if not demand.memory_mode:
        return demand
    left = max(0, machine.most - machine.promised)
    asked = demand.host_memory
    if asked is None:
        half = max(0, machine.available - machine.unused) // 2
        rule = "half of the available memory that is not promised to other commands; --host-memory sets another limit"
        return msgspec.structs.replace(demand, host_memory=min(half, left), host_rule=rule)
    if asked <= left:
        return demand
    taken = f", of which {machine.promised} MiB are promised to running commands" if machine.promised else ""
    return NoRoom(
        f"--host-memory asks for {asked} MiB, but this machine can promise {machine.most} MiB{taken} "
        f"({machine.total} MiB less a reserve of {machine.reserve} MiB)"
    )


def promised(asked: int | None, found: Demand, slices: Sequence[GpuSlice]) -> int:
    """MiB of host memory that a command gets.

    A command that did not ask for an amount gets no more than all of its memory.
    """
    budget = found.host_memory or 0
    return budget if asked is not None else min(budget, sum(piece.mem for piece in slices))
