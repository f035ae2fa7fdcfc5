"""Memory that the driver took for a container's processes and that they have not charged: modules, stacks, heaps.

A process cannot measure this memory; by NVML, the driver tells the node how much memory each process has. The agent
charges the excess over the process's own charges to the container, in a slot of the agent's own.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pynvml

from device_plugin.sandbox import Entry
from vgpu.inventory import InventoryError, session
from vgpu.native import Limits, ProcessUsage, Region

log = logging.getLogger(__name__)

PROC: Final = Path("/proc")
_START_TIME: Final = 19  #: index among the fields after the name in /proc/PID/stat (proc(5): field 22)


class Identity(msgspec.Struct, frozen=True):
    """A process as its own pid namespace knows it."""

    pid: int
    pid_namespace: int  #: inode of /proc/PID/ns/pid
    start_time: int  #: clock ticks since boot


Memory = Mapping[str, Mapping[Identity, int]]  #: UUID of a card → process → bytes that the driver has given it


def identity_of(pid: int, proc: Path = PROC) -> Identity | None:
    """Identity of a process of this node inside its container.

    None: the process is gone, or cannot be seen from here.
    """
    folder = proc / str(pid)
    try:
        # Read as bytes: both files contain a name that the process chose (PR_SET_NAME), and only a newline in it is
        # escaped.
        status = (folder / "status").read_bytes()
        inner = next(line.split()[-1] for line in status.split(b"\n") if line.startswith(b"NSpid:"))
        started = (folder / "stat").read_bytes().rpartition(b")")[2].split()[_START_TIME]
        return Identity(int(inner), (folder / "ns" / "pid").stat().st_ino, int(started))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def memory_by_process() -> Memory:
    """The memory per process that NVML reports; cards and processes without a report are missing.

    Raises InventoryError.
    """
    found: dict[str, dict[Identity, int]] = {}
    with session():
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            raise InventoryError(f"the NVIDIA driver does not answer: {error}") from None
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except pynvml.NVMLError as error:
                log.debug("card %d does not list its processes: %s", index, error)
                continue
            found[uuid] = {}
            for process in listed:
                who = identity_of(process.pid)
                if who is not None and process.usedGpuMemory is not None:
                    found[uuid][who] = process.usedGpuMemory
    return found


def overheads(
    limits: Limits, before: Iterable[ProcessUsage], memory: Memory, after: Iterable[ProcessUsage]
) -> list[int]:
    """Bytes per card of `limits` that the driver has given beyond the charges.

    `before` and `after`: charges read before and after `memory`. The larger of the two counts, because a process
    charges an allocation before it makes it, and uncharges memory after it frees it.
    """
    charged: dict[Identity, list[int]] = {}
    for usage in (*before, *after):
        who = Identity(usage.pid, usage.pid_namespace, usage.start_time)
        known = charged.setdefault(who, [0] * len(limits.cards))
        own = usage.resident if limits.oversubscribe else usage.used  # the driver counts only what is on the card
        charged[who] = [max(pair) for pair in zip(known, own, strict=True)]
    found = []
    for index, card in enumerate(limits.cards):
        given = memory.get(card.uuid, {})
        found.append(sum(max(0, given.get(who, 0) - paid[index]) for who, paid in charged.items()))
    return found


class _Container:
    """One container's region, open as long as the container has its folder: closing the region would end the charge."""

    def __init__(self, path: Path) -> None:
        self.made = (path / "usage").stat().st_ino
        self.region = Region.open(path, writable=True)
        self.last: list[int] = []

    def settle(self, before: tuple[ProcessUsage, ...], memory: Memory) -> None:
        now = overheads(self.region.limits(), before, memory, self.region.usage().processes)
        # An allocation that came and went between the readings looks like overhead once: so two turns must agree.
        for card, pair in enumerate(zip(now, self.last or [0] * len(now), strict=False)):
            self.region.charge_overhead(card, min(pair))
        self.last = now


class Settler:
    """Settles all containers of the node; one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, _Container] = {}

    def once(self, entries: Iterable[Entry]) -> None:
        """One turn: asks NVML once for all containers.

        Raises InventoryError when NVML does not answer; then charges stay.
        """
        paths = {entry.path for entry in entries}
        for path in self._open.keys() - paths:
            self._open.pop(path).region.close()
        before = {}
        for path in paths:
            try:
                before[path] = self._container(path).region.usage().processes
            except OSError as error:
                log.debug("%s: %s", path, error)
        memory = memory_by_process() if any(before.values()) else {}
        for path, processes in before.items():
            try:
                self._open[path].settle(processes, memory)
            except OSError as error:
                log.debug("%s: %s", path, error)

    def _container(self, path: Path) -> _Container:
        known = self._open.get(path)
        if known is not None and known.made != (path / "usage").stat().st_ino:
            self._open.pop(path).region.close()  # recreated for a container of the same name
            known = None
        return known or self._open.setdefault(path, _Container(path))
