"""Which processes really use the cards, according to NVML: processes of our containers, and foreign ones.

A process belongs to a container when it is in the container's ledger, or when it shares a pid namespace with a process
of the ledger. It also belongs to a container when its cgroup names a pod that holds a slice here. The last two rules
find processes that stay out of the ledger.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pynvml

from device_plugin import cgroups
from device_plugin.overhead import PROC, Identity, identity_of
from device_plugin.sandbox import Entry
from vgpu.devices import GpuSlice
from vgpu.inventory import session
from vgpu.native import Usage

log = logging.getLogger(__name__)

TURNS: Final = 3  #: looks in a row that must show a foreign process: a new process may not be in its ledger yet
#: Longest time (seconds) that a sample of utilization may stand for. NVML samples every 1/6 to 1 s (nvml.h), so a look
#: each second may find two samples. After an idle time, or a late look, the newest sample says nothing about the time
#: before
_LONGEST: Final = 2.0

Region = tuple[tuple[GpuSlice, ...], Usage]  #: of a container: its slices, and its charges
Regions = Mapping[Entry, Region]


class Observed(msgspec.Struct, frozen=True):
    """One process on one card."""

    card: str  #: UUID
    pid: int  #: on the host
    bytes: int = 0
    seconds: float = 0.0  #: GPU time since the last look


class Process(msgspec.Struct, frozen=True):
    name: str
    identity: Identity
    pod_uid: str = ""  #: by its cgroup; empty: the process belongs to no pod


class Real(msgspec.Struct, frozen=True):
    """What a container has of a card, according to NVML."""

    bytes: int = 0
    seconds: float = 0.0  #: GPU time since the last look


class Outside(msgspec.Struct, frozen=True):
    """A process of a container that uses a card and is in no ledger."""

    pid: int  #: on the host
    identity: Identity
    name: str
    what: str  #: what the process uses of a card, in words


class Picture(msgspec.Struct, frozen=True):
    containers: dict[tuple[Entry, str], Real]  #: by folder and card
    foreign: dict[str, dict[int, int]]  #: card → host pid → bytes
    strange: Mapping[str, Mapping[str, int]] = {}  #: of pods with containers of another version: card → uid → bytes
    outside: tuple[tuple[Entry, Outside], ...] = ()  #: processes of containers that are in no ledger


class Observer:
    """Asks NVML; remembers up to when it knows the utilization."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # card → µs of the newest sample, on NVML's clock

    def look(self) -> list[Observed]:
        """All processes on all cards, without the cards that do not answer. Raises InventoryError, NVMLError."""
        found = []
        with session():
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
                    listed += pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
                except pynvml.NVMLError as error:
                    log.debug("card %d does not list its processes: %s", index, error)
                    continue
                times = self._times(uuid, handle)
                used: dict[int, int] = {}
                for process in listed:
                    used[process.pid] = max(used.get(process.pid, 0), process.usedGpuMemory or 0)
                found += [Observed(uuid, pid, size, times.get(pid, 0.0)) for pid, size in used.items()]
        return found

    def _times(self, uuid: str, handle: object) -> dict[int, float]:
        last = self._seen.get(uuid, 0)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(handle, last)
        except pynvml.NVMLError:
            return {}  # nothing ran, or the card reports no utilization
        newest = max((int(sample.timeStamp) for sample in samples), default=last)
        self._seen[uuid] = newest
        if not last:
            return {}  # it is not known when the first sample began
        span = min((newest - last) / 1e6, _LONGEST)
        return {int(sample.pid): sample.smUtil / 100 * span for sample in samples}


def process_of(pid: int, proc: Path = PROC) -> Process | None:
    """The process with this pid; None: it is gone, or cannot be seen from here."""
    identity = identity_of(pid, proc)
    if identity is None:
        return None
    try:
        # A process chooses its own name, which may be any bytes.
        name = (proc / str(pid) / "comm").read_text(errors="replace").strip()
        cgroup = (proc / str(pid) / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    return Process(name, identity, cgroups.pod_of(cgroup))


def attribute(
    observed: Iterable[Observed],
    regions: Regions,
    who: Callable[[int], Process | None] = process_of,
    own_namespace: int | None = None,
    strangers: Collection[str] = (),
) -> Picture:
    """Finds the container of each process.

    `own_namespace`: pid namespace of the host's processes, which identifies no container. `strangers`: UIDs of pods
    with containers whose regions are of another version. A process of such a pod that no region of this version names
    belongs to these containers.
    """
    if own_namespace is None:
        own_namespace = os.stat("/proc/self/ns/pid").st_ino
    by_identity: dict[Identity, Entry] = {}
    by_namespace: dict[int, Entry] = {}
    for entry, (_, usage) in regions.items():
        for known in usage.processes:
            by_identity[Identity(known.pid, known.pid_namespace, known.start_time)] = entry
            if known.pid_namespace != own_namespace:
                by_namespace[known.pid_namespace] = entry
    containers: dict[tuple[Entry, str], Real] = {}
    foreign: dict[str, dict[int, int]] = {}
    strange: dict[str, dict[str, int]] = {}
    outside: list[tuple[Entry, Outside]] = []
    for one in observed:
        process = who(one.pid)
        uid = process.pod_uid if process else ""
        entry_of = process and (by_identity.get(process.identity) or by_namespace.get(process.identity.pid_namespace))
        if not entry_of and uid not in strangers:
            entry_of = of_pod(uid, one.card, regions)
        if entry_of:
            if process and process.identity not in by_identity:
                outside.append((entry_of, Outside(one.pid, process.identity, process.name, f"card {one.card}")))
            before = containers.get((entry_of, one.card), Real())
            containers[entry_of, one.card] = Real(before.bytes + one.bytes, before.seconds + one.seconds)
        elif uid in strangers:
            of_card = strange.setdefault(one.card, {})
            of_card[uid] = of_card.get(uid, 0) + one.bytes
        else:
            foreign.setdefault(one.card, {})[one.pid] = one.bytes
    return Picture(containers, foreign, strange, tuple(outside))


def known_processes(regions: Regions) -> frozenset[Identity]:
    """All processes that are in a ledger."""
    return frozenset(
        Identity(one.pid, one.pid_namespace, one.start_time) for _, usage in regions.values() for one in usage.processes
    )


def of_pod(uid: str, card: str, regions: Regions) -> Entry | None:
    """A container of the pod that holds a slice of the card, else any container of the pod."""
    entries = sorted((entry for entry in regions if uid and entry.pod_uid == uid), key=lambda entry: entry.container)
    holding = [entry for entry in entries if any(piece.uuid == card for piece in regions[entry][0])]
    return next(iter(holding or entries), None)


class Foreign:
    """Decides which processes have been foreign for long enough to report them."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, int], int] = {}

    def once(self, seen: Mapping[str, Collection[int]]) -> tuple[dict[str, set[int]], list[tuple[str, int]]]:
        """One more look, card → pids: returns (card → foreign pids, the new ones among them)."""
        now = {(card, pid) for card, pids in seen.items() for pid in pids}
        self._turns = {key: self._turns.get(key, 0) + 1 for key in now}
        found: dict[str, set[int]] = {}
        for (card, pid), turns in self._turns.items():
            if turns >= TURNS:
                found.setdefault(card, set()).add(pid)
        return found, sorted(key for key, turns in self._turns.items() if turns == TURNS)
