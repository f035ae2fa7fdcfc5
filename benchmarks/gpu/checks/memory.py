"""The memory limit by every route: filled until refused, compared with all figures, and given back."""

import sys
from typing import Any, Final

import msgspec
import pynvml

from .children import Broken
from .machine import PROGRAMS, Command, Machine
from .rows import MIB, Row, broken, mib

FAMILY: Final = "memory limit"
ROUTES: Final = (
    "cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged", "cuArray3DCreate", "cuMemAllocAsync",
    "cuMemAllocFromPoolAsync", "cuMemCreate", "graph memory", "IPC import",
)  # fmt: skip
PIECES: Final = 8  #: a slice is filled in about this many large steps, then in smaller and smaller ones
#: in addition to the context; managed memory is kept small, because too much of it can hang a card
MANAGED_MIB: Final = 256
ALLOWANCE: Final = 64 * MIB  #: modules, stacks and rounding beyond the charges; the agent's backstop has the same value
UNKNOWN_CONTEXT: Final = 1024 * MIB  #: largest size of a context where its size cannot be measured


class Full(msgspec.Struct, frozen=True):
    """A full slice, seen from inside; bytes."""

    used: int  #: by the ledger
    context: int  #: of `used`: contexts
    refused: int  #: allocations that the library has refused so far
    told: dict[str, tuple[int, int, int]]  #: by CUDA and NVML: total, used, free
    asked: int  #: granted by the route
    unit: int  #: smallest step of the route
    status: int  #: status of the last step
    pid: int
    pieces: int


def judged(route: str, limit: int, full: Full) -> Row:
    """Whether the slice was filled to the last step that fits, and the library (not the driver) refused the next step.

    `limit` in bytes. Exact to the byte where the route allocates single bytes, else less than one of its steps is left.
    """
    left = limit - full.used
    faults = []
    if full.status != 2:
        faults.append(f"the last step was answered {full.status} instead of 2 (out of memory)")
    if not full.refused:
        faults.append("the driver refused, not the library")
    for who, (total, used, free) in full.told.items():
        if (total, used, free) != (limit, full.used, left):
            faults.append(f"{who} tells {mib(total)}, used {mib(used)}, free {mib(free)}; ledger: {mib(full.used)}")
    met = 0 <= left < full.unit and not faults
    got = f"{mib(full.asked)} in {full.pieces} + contexts {mib(full.context)}"
    remark = "; ".join(faults) or "cuMemGetInfo and NVML v1, v2 the same"
    bar = "0 B left" if full.unit == 1 else f"0 to {mib(full.unit)} left"
    return Row(FAMILY, route, mib(limit), got, f"{mib(left)} left", bar, met, remark)


def observed(route: str, limit: int, full: Full, seen: int | None, how: str, context: int) -> Row:
    """What NVML reports about the real process without the library, against the limit; bytes.

    `context`: size of one context, if that is known and therefore in the ledger. The process may hold its limit and
    ALLOWANCE; where the context is not charged, the context as well.
    """
    what = f"{route}: seen from outside"
    if seen is None:
        return Row(FAMILY, what, ran=False, remark=how)
    allowed = limit + ALLOWANCE + (0 if context else UNKNOWN_CONTEXT)
    return Row(
        FAMILY, what, f"ledger {mib(full.used)}", f"{how} {mib(seen)}", f"{(seen - full.used) / MIB:+.1f} MiB",
        f"<= {mib(allowed)}", seen <= allowed, "real less charged",
    )  # fmt: skip


def emptied(route: str, picture: dict[str, Any]) -> Row:
    """Whether the ledger has only the contexts after everything was freed."""
    rest = picture["used"] - picture["context"]
    what = f"{route}: freed"
    return Row(FAMILY, what, mib(picture["context"]), mib(picture["used"]), f"{rest} B", "0 B", rest == 0)


def from_outside(machine: Machine, pids: list[int], before: int) -> tuple[int | None, str]:
    """Bytes that NVML counts for these processes, or that the card lost; and which of the two.

    `before`: free bytes of the card before the processes.
    """
    try:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(machine.handle)
    except pynvml.NVMLError as error:
        return None, f"NVML does not list processes: {error}"
    held = [process.usedGpuMemory for process in listed if process.pid in pids]
    if held and all(size is not None for size in held):
        return sum(held), "process"
    if machine.others:
        return None, "NVML does not list our processes (another pid namespace?), and others use the card"
    return before - machine.free(), "card"


def route(machine: Machine, name: str) -> list[Row]:
    """Fills a slice by one route; three rows."""
    shared = name == "IPC import"
    if shared and machine.alone():
        return [Row(FAMILY, name, ran=False, remark=machine.alone())]
    memory = machine.slice_mib()
    if name == "cuMemAllocManaged":
        memory = min(memory, machine.context_mib + MANAGED_MIB)
    limit = memory * MIB
    first = (limit - machine.context * (2 if shared else 1)) // PIECES // (32 * MIB) * 32 * MIB
    before = machine.free()
    command: Command = [sys.executable, PROGRAMS / "fill.py", name, str(max(first, 32 * MIB))]
    with machine.limited(command, memory=memory) as child:
        answer = child.answer()
        full = msgspec.convert(answer, Full)
        rows = [judged(name, limit, full)]
        if not shared:
            rows.append(observed(name, limit, full, *from_outside(machine, [full.pid], before), machine.context))
        child.tell()
        rows.append(emptied(name, child.answer()))
        child.tell()
    return rows


def check(machine: Machine, name: str) -> list[Row]:
    """The rows of one route; a program that broke is a row."""
    try:
        return route(machine, name)
    except Broken as error:
        return [broken(FAMILY, name, str(error))]
