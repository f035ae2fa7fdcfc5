"""The core limit with real kernels: shares that the kernels themselves count, next to NVML's figures."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import pynvml

from .children import Broken
from .machine import PROGRAMS, ROOT, Command, Machine
from .rows import Row, broken, not_run

FAMILY: Final = "core limit"
LENGTHS: Final = ("100us", "2ms", "50ms")
SHORT: Final = ("5us", "10us", "20us")  #: lengths for which a pair of events is not short
LIMITS: Final = (20, 50, 80)
PAIR: Final = (30, 70)
BAR: Final = 1.0  #: percentage points
#: percentage points by which a program without a limit must exceed a limit; else its share is its own
FILLS: Final = 5.0
ROOM_MIB: Final = 256  #: in addition to the context
LENGTH: Final = 0.2  #: largest deviation of a kernel's time from its length
EVERY_S: Final = 0.1  #: NVML renews its sample every 1/6 to 1 s (nvml.h, nvmlUtilization_t)


class Plan(msgspec.Struct, frozen=True):
    """Seconds."""

    #: until then, the credit of an idle time is used up, and NVML's sample covers only our own time
    warm_s: float = 1.5
    measured_s: float = 4.0
    settle_s: float = 5.0  #: instead of `warm_s` for two containers: the arbiter must learn how they overlap


class Share(msgspec.Struct, frozen=True):
    """The results of one program."""

    length_ms: float  #: of one kernel, by its own count
    single_ms: float  #: the shortest pair of events around one kernel
    each_ms: float  #: from end to end of launches in a row, on the card; valid only without limit and neighbours
    launches: int
    seconds: float
    process: float | None = None  #: NVML's utilisation of the process, %

    def of(self, each_ms: float) -> float:
        """Percent of the time that its launches take at `each_ms` of the card's time."""
        return 100 * self.launches * each_ms / 1000 / self.seconds


def judged(what: str, limit: int, share: Share, whole: Share, card: float | None) -> Row:
    """The row of one limit (%). `whole`: the same program without a limit; `card`: NVML's utilisation of the card, %.

    A launch counts as its time in a row of launches without a limit, because its kernel must also begin and end.
    """
    got = share.of(whole.each_ms)
    error, alone = got - limit, whole.of(whole.each_ms)
    fills = alone >= min(limit + FILLS, 95.0)
    notes = [] if fills else [f"not judged: without a limit the program fills {alone:.0f} % of the card, no more"]
    notes += [
        f"{share.of(share.length_ms):.2f} % by the kernels alone",
        f"{100 * got / whole.of(whole.each_ms):.1f} % of the rate without limit",
    ]
    if card is not None:
        notes.append(f"NVML: card {card:.0f} %")
    if share.process is not None:
        notes.append(f"NVML: process {share.process:.0f} % ({share.process - limit:+.0f})")
    return Row(
        FAMILY, what, f"{limit} %", f"{got:.2f} %", f"{error:+.2f}", f"±{BAR:g} point" if fills else "",
        abs(error) <= BAR if fills else None, "; ".join(notes), timed=True,
    )  # fmt: skip


def unlimited(what: str, whole: Share, card: float | None) -> Row:
    """The row without a limit. Its kernels must have their nominal length, or no share means anything."""
    told = f"one takes {whole.each_ms:.4g} ms in a row, {whole.single_ms:.4g} ms alone"
    if card is not None:
        told += f"; NVML: card {card:.0f} %"
    met = whole.length_ms * (1 - LENGTH) <= whole.each_ms <= whole.length_ms * (1 + LENGTH)
    bar = f"a kernel takes its length ±{LENGTH:.0%}"
    error = f"{100 * (whole.each_ms / whole.length_ms - 1):+.1f} %"
    return Row(
        FAMILY,
        f"{what}, no limit",
        f"{whole.length_ms:g} ms",
        f"{whole.of(whole.each_ms):.2f} %",
        error,
        bar,
        met,
        told,
        timed=True,
    )


def unlimited_short(what: str, whole: Share) -> Row:
    """The same for a kernel that ends before the next one can begin: the row shows its length."""
    each = f"{1000 * whole.each_ms:.2f} us in a row"
    return Row(FAMILY, f"{what}, no limit", f"{1000 * whole.length_ms:g} us", each, remark="so a launch counts as that")


class Observer:
    """Samples NVML while the programs run."""

    def __init__(self, machine: Machine, warm_s: float) -> None:
        self._machine, self._warm_s = machine, warm_s
        self._rates: list[int] = []
        self._over = threading.Event()
        self._begun_us = time.time_ns() // 1000
        self._thread = threading.Thread(target=self._sample, name="observer", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        if self._over.wait(self._warm_s):
            return
        while not self._over.wait(EVERY_S):
            try:
                self._rates.append(pynvml.nvmlDeviceGetUtilizationRates(self._machine.handle).gpu)
            except pynvml.NVMLError:
                return  # a MIG instance has none

    def end(self) -> float | None:
        """Percent of the time in which any kernel ran; None: NVML does not report it."""
        self._over.set()
        self._thread.join()
        return sum(self._rates) / len(self._rates) if self._rates else None

    def process(self, pid: int) -> float | None:
        """The same for one process."""
        since = self._begun_us + int(self._warm_s * 1e6)
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._machine.handle, since)
        except pynvml.NVMLError:
            return None
        found = [sample.smUtil for sample in samples if sample.pid == pid]
        return sum(found) / len(found) if found else None


@cache
def launcher() -> tuple[Path, ...]:
    """launch.c as a library; empty without a C compiler: then Python launches."""
    made = ROOT / "build/gpu-check/launch.so"  # not among the regions: /dev/shm may be mounted noexec
    made.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc").split()
    try:
        command = [*compiler, "-O2", "-shared", "-fPIC", "-o", made, PROGRAMS / "launch.c"]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return (made,)


def run(
    machine: Machine, length: str, limits: Sequence[int], warm_s: float, measured_s: float
) -> tuple[list[Share], float | None]:
    """Runs programs at once; returns their shares, with NVML's figures for the card.

    Each program has its limit in percent (0: without the library).
    """
    command: Command = [sys.executable, PROGRAMS / "share.py", length, str(warm_s), str(measured_s), *launcher()]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                machine.limited(command, memory=machine.context_mib + ROOM_MIB, cores=limit)
                if limit
                else machine.native(command)
            )
            for limit in limits
        ]
        ready = [child.answer() for child in children]
        observer = Observer(machine, warm_s)
        try:
            for child in children:
                child.tell()
            ran = [child.answer() for child in children]
        finally:
            card = observer.end()
        return [
            Share(**at_first, **then, process=observer.process(child.pid))
            for child, at_first, then in zip(children, ready, ran, strict=True)
        ], card


def check(
    machine: Machine, length: str, plan: Plan, limits: Sequence[int] = LIMITS, pair: Sequence[int] = PAIR
) -> list[Row]:
    """All rows of kernels of one length: one program at each of `limits`, then two containers with `pair`."""
    what = f"kernels of {length}"
    rows = []
    try:
        (whole,), card = run(machine, length, [0], plan.warm_s, plan.measured_s)
        rows.append(unlimited_short(what, whole) if length in SHORT else unlimited(what, whole, card))
        for limit in limits:
            (share,), card = run(machine, length, [limit], plan.warm_s, plan.measured_s)
            rows.append(judged(f"{what}, one process", limit, share, whole, card))
        why = machine.alone() or "slices on a MIG instance are made directly and have no arbiter" * machine.mig
        names = [f"{what}, container {number} of {len(pair)}" for number in range(1, len(pair) + 1)]
        if why or not pair:
            return rows + [not_run(FAMILY, name, why) for name in names]
        shares, card = run(machine, length, pair, plan.settle_s, plan.measured_s)
        for name, limit, share in zip(names, pair, shares, strict=True):
            rows.append(judged(name, limit, share, whole, card))
    except Broken as error:
        rows.append(broken(FAMILY, what, str(error)))
    return rows
