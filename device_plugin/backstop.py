"""Compares what containers really have with what they are charged: a container can tamper with a preloaded library.

Pure. The backstop compares NVML's figures with the charges turn by turn. Only a lasting difference counts: memory that
the driver took by itself is charged two turns later.
"""

from collections import deque
from typing import Final

import msgspec

from device_plugin.foreign import Picture, Real, Regions
from device_plugin.sandbox import Entry, on_card

MIB: Final = 1 << 20
TURNS: Final = 10  #: turns in a row that must show a difference; a turn takes about a second
TOLERANCE: Final = 64 * MIB  #: bytes that NVML may count beyond all charges
OVER: Final = 512 * MIB  #: beyond the limit: modules, stacks and heaps ignore the limit
WINDOW: Final = 60  #: turns over which GPU time is compared
TIME: Final = 0.25  #: share of the window's time that was used and not charged
#: Share of the time between two turns by which NVML may be off, and the seconds beyond that share that are charged. The
#: library has the same numbers for nodes without agent (libvgpu/src/pacer/contention.c)
NOISE: Final = 0.06
MISSED: Final = 0.5
AHEAD: Final = 1.0  #: seconds charged and not used that make up for later use

Key = tuple[Entry, str]


class Excess(msgspec.Struct, frozen=True):
    """What a container has of a card beyond what it was charged."""

    entry: Entry
    card: str
    sentence: str
    again: bool  #: the backstop reported this excess before, and it continues


class Backstop:
    """Remembers the earlier turns; one object for all containers."""

    def __init__(self) -> None:
        self._turns: dict[Key, int] = {}
        self._times: dict[Key, deque[tuple[float, float, float]]] = {}  # (now, charged, observed), seconds
        self._told: set[Key] = set()
        self._missed: dict[Key, float] = {}  # seconds used beyond those charged
        self._debited: dict[Key, float] = {}  # of the charged seconds: those that our debits charged
        self.debits: dict[Key, float] = {}  #: seconds of GPU time to charge after the last turn; then call `debited`
        self.observed: dict[Key, float] = {}  #: seconds of GPU time by NVML since the container's folder was first seen
        self.untracked: dict[Key, int] = {}  #: bytes by NVML beyond the charges, in the last turn
        self._absent: dict[Key, deque[int]] = {}  # bytes charged beyond those by NVML, in the last turns
        self.absent: dict[Key, int] = {}  #: the smallest of `_absent`: bytes that no process has

    def once(self, picture: Picture, regions: Regions, now: float) -> list[Excess]:
        """One turn: returns each excess that has lasted long enough, and again each time it lasts as long again.

        `now`: seconds, monotonic.
        """
        keys = {(entry, piece.uuid) for entry, (slices, _) in regions.items() for piece in slices}
        keys |= picture.containers.keys()
        self._told &= keys
        self.observed = {key: self.observed.get(key, 0.0) for key in keys}
        self._missed = {key: self._missed.get(key, 0.0) for key in keys}
        self._debited = {key: self._debited.get(key, 0.0) for key in keys}
        self.debits = {}
        self.untracked = {}
        turns, times, absent = {}, {}, {}
        found = []
        for key in sorted(keys, key=lambda key: (str(key[0].path), key[1])):
            entry, card = key
            real = picture.containers.get(key, Real())
            used, gpu_ns, limit = _charges(regions, key)
            self.observed[key] += real.seconds
            self.untracked[key] = max(0, real.bytes - used)
            absent[key] = self._absent.get(key) or deque(maxlen=TURNS)
            absent[key].append(max(0, used - real.bytes) if real.bytes else 0)  # only where NVML counts bytes at all
            sentences = []
            if self.untracked[key] > TOLERANCE:
                sentences.append(f"it uses {real.bytes // MIB} MiB, but vgpu charged only {used // MIB} MiB")
            elif real.bytes > limit + OVER:
                sentences.append(f"it uses {real.bytes // MIB} MiB, but its slice has {limit // MIB} MiB")
            turns[key] = self._turns.get(key, 0) + 1 if sentences else 0
            times[key] = self._times.get(key) or deque(maxlen=WINDOW)
            times[key].append((now, gpu_ns / 1e9 - self._debited[key], self.observed[key]))
            self._compare(key, times[key])
            late = _untimed(times[key])
            if turns[key] >= TURNS or late:
                found.append(Excess(entry, card, late or sentences[0], key in self._told))
                self._told.add(key)
                turns[key] = 0
                if late:
                    times[key].clear()
        self._turns, self._times, self._absent = turns, times, absent
        self.absent = {key: min(sizes) for key, sizes in absent.items() if len(sizes) == TURNS and min(sizes)}
        return found

    def _compare(self, key: Key, times: deque[tuple[float, float, float]]) -> None:
        """The time that the container used since the last turn without a charge, beyond NVML's possible error.

        NVML's first sample after an idle time may cover time in which nothing ran. Such a sample only makes up for
        charges.
        """
        if len(times) < 3:
            return
        span, charged, observed = (last - before for before, last in zip(times[-2], times[-1], strict=True))
        more = observed - NOISE * span - charged
        was_idle = times[-2][2] == times[-3][2]
        missed = self._missed[key] + (min(more, 0.0) if was_idle else more)
        self._missed[key] = max(missed, -AHEAD)
        if missed > MISSED:
            self.debits[key] = missed

    def debited(self, key: Key) -> None:
        """The container has been charged for the time in `debits`."""
        self._debited[key] += self.debits[key]
        self._missed[key] -= self.debits[key]


def larger(before: Regions, after: Regions) -> Regions:
    """The larger of the charges read before and after the question to NVML.

    A process charges an allocation before it makes it, and uncharges memory after it frees it.
    """
    found = dict(before)
    for entry, (slices, new) in after.items():
        known, old = before[entry]
        if known == slices:
            cards = tuple(
                msgspec.structs.replace(
                    late,
                    used=max(early.used, late.used),
                    resident=max(early.resident, late.resident),
                    gpu_ns=max(early.gpu_ns, late.gpu_ns),
                )
                for early, late in zip(old.cards, new.cards, strict=False)
            )
            found[entry] = slices, msgspec.structs.replace(new, cards=cards, processes=(*old.processes, *new.processes))
    return found


def _charges(regions: Regions, key: Key) -> tuple[int, int, int]:
    """(bytes of the card charged, ns charged, limit in bytes) of a container.

    All are 0 for a card that the container does not hold.
    """
    slices, usage = regions[key[0]]
    for piece, card in zip(slices, usage.cards, strict=False):
        if piece.uuid == key[1]:
            return on_card(slices, card), card.gpu_ns, piece.mem * MIB
    return 0, 0, 0


def _untimed(times: deque[tuple[float, float, float]]) -> str:
    if len(times) < WINDOW:
        return ""
    span, charged, observed = (last - first for first, last in zip(times[0], times[-1], strict=True))
    if observed - charged <= TIME * span:
        return ""
    return f"it used {observed:.0f} s of GPU time within {span:.0f} s, but vgpu charged only {max(charged, 0):.0f} s"
