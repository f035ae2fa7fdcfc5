"""Size of contexts and their charge, also when a program resets the card or executes itself."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

from .children import Broken
from .machine import PROGRAMS, Command, Machine
from .memory import ALLOWANCE, from_outside
from .rows import MIB, Row, broken, exact, mib, not_run

FAMILY: Final = "contexts"
SIZES: Final = "sizes"
RUNTIME: Final = "the CUDA runtime"
AGAIN: Final = "execv with open device files"
MODES: Final = ("EAGER", "LAZY")
HELD_MIB: Final = 256
ROUNDS: Final = 4  #: executions of itself, where two images fill the slice
ROOM_MIB: Final = 1024  #: in addition to the contexts


def size(what: str, charged: int, seen: int | None, how: str) -> Row:
    """Bytes of one more context on the card. `charged`: what a slice pays for it, 0: not known."""
    if seen is None:
        return not_run(FAMILY, what, how)
    if not charged:
        return Row(FAMILY, what, "not charged", f"{how} {mib(seen)}")
    more = seen - charged
    return Row(
        FAMILY, what, f"charged {mib(charged)}", f"{how} {mib(seen)}", f"{more / MIB:+.1f} MiB",
        f"<= +{mib(ALLOWANCE)}", more <= ALLOWANCE,
    )  # fmt: skip


def sizes(machine: Machine) -> list[Row]:
    """The first context, eager and lazy, and a second one in the same process."""
    rows: list[Row] = []
    command: Command = [sys.executable, PROGRAMS / "context.py"]
    for mode in MODES:
        what = f"a context, {mode}"
        before = machine.free()
        try:
            with machine.native(command, variables={"CUDA_MODULE_LOADING": mode}) as child:
                pid = child.answer()["pid"]
                first, how = from_outside(machine, [pid], before)
                rows.append(size(what, machine.context, first, how))
                child.tell()
                child.answer()
                both, how = from_outside(machine, [pid], before)
                more = None if both is None or first is None else both - first
                rows.append(size(f"a second context, {mode}", machine.context, more, how))
                child.tell()
        except Broken as error:
            rows.append(broken(FAMILY, what, str(error)))
    return rows


def library() -> Path | None:
    """libcudart.so of the wheel nvidia-cuda-runtime, which `make venv` installs for its headers."""
    found = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("**/libcudart.so.*"))
    return found[-1] if found else None


def books(context: int, answer: dict[str, Any]) -> list[Row]:
    """Rows for `answer` of runtime.py; `context`: charge of one context in bytes."""
    what = answer["what"]
    rows = [
        exact(FAMILY, f"{what}: its context", context, answer["context"])
        if context
        else Row(FAMILY, f"{what}: its context", "not charged", mib(answer["context"]))
    ]
    rows.append(exact(FAMILY, f"{what}: after cudaDeviceReset", 0, answer["after"], f"before {mib(answer['full'])}"))
    rows.append(exact(FAMILY, f"{what}: a context again", answer["context"], answer["again"]))
    return rows


def runtime(machine: Machine, python: str) -> list[Row]:
    """PyTorch's runtime where `python` has it, else the wheel's."""
    memory = ROOM_MIB + machine.context_mib
    path = None if machine.simulate else shutil.which(os.path.expanduser(python))
    cudart = library()
    tries: list[Command] = [[path, PROGRAMS / "runtime.py", machine.uuid, "torch"]] if path else []
    if cudart is not None:
        tries.append([sys.executable, PROGRAMS / "runtime.py", machine.uuid, cudart])
    why = ["nvidia-cuda-runtime is not installed"] if cudart is None else []
    for command in tries:
        try:
            with machine.limited(command, memory=memory) as child:
                answer = child.answer()
        except Broken as error:
            if not machine.simulate:
                return [broken(FAMILY, RUNTIME, str(error))]
            why.append(f"simulated: {error}")
            continue
        if "missing" not in answer:
            return books(machine.context, answer)
        why.append(("simulated: " * bool(machine.simulate)) + answer["missing"])
    return [not_run(FAMILY, RUNTIME, "; ".join(why))]


def replaced(before: int | None, after: int | None, how: str, left: int) -> Row:
    """What the card still holds for a program that has executed itself and not started CUDA again; bytes, files."""
    what = f"{AGAIN}: the old memory"
    if before is None or after is None:
        return not_run(FAMILY, what, how)
    remark = f"{left} files of the driver were still open"
    return Row(FAMILY, what, f"held {mib(before)}", f"{how} {mib(after)}", remark=remark)


def charged(answer: dict[str, Any], seen: int | None, how: str, context: int) -> Row:
    """The ledger of a slice whose program has executed itself until its limit, against the real use; bytes.

    `answer`: the last one of again.py. The charge must contain everything that the driver still holds; it may be
    larger.
    """
    what = f"{AGAIN}: the books"
    if seen is None or not context:
        return not_run(FAMILY, what, how if seen is None else "what a context takes is not known")
    used = answer["used"]
    ended = "then it held memory again" if answer["held"] else "then it was refused"
    return Row(
        FAMILY, what, f"ledger {mib(used)}", f"{how} {mib(seen)}", f"{(seen - used) / MIB:+.1f} MiB",
        f"<= +{mib(ALLOWANCE)}", seen - used <= ALLOWANCE,
        f"real less charged, in a slice; executed {answer['rounds']} times, {ended}",
    )  # fmt: skip


def again(machine: Machine) -> list[Row]:
    """Without the library: what the driver keeps. In a slice that two such programs fill: whether that is charged."""
    rows: list[Row] = []
    command: Command = [sys.executable, PROGRAMS / "again.py", str(HELD_MIB)]
    try:
        free = machine.free()
        with machine.native([*command, "1"]) as child:
            pid = child.answer()["pid"]
            before, how = from_outside(machine, [pid], free)
            child.tell()
            left = len(child.answer()["files"])
            after = _now(machine, pid, free, how)
            rows.append(replaced(before, after, how, left))
        free = machine.free()
        memory = 2 * (HELD_MIB + machine.context_mib) + HELD_MIB // 2
        with machine.limited([*command, str(ROUNDS)], memory=memory) as child:
            child.answer()
            child.tell()
            child.answer()
            child.tell()
            last = child.answer()
            if last["used"] is None:
                return [*rows, not_run(FAMILY, f"{AGAIN}: the books", "the slice has no ledger to look into")]
            rows.append(charged(last, *from_outside(machine, [last["pid"]], free), machine.context))
            child.tell()
    except Broken as error:
        rows.append(broken(FAMILY, AGAIN, str(error)))
    return rows


def _now(machine: Machine, pid: int, free: int, how: str) -> int | None:
    """The figure that `how` names; a process that NVML does not list holds nothing."""
    seen, way = from_outside(machine, [pid], free)
    return 0 if how == "process" and way != "process" else seen


def check(machine: Machine, what: str, python: str) -> list[Row]:
    """One of SIZES, RUNTIME and AGAIN."""
    if what == RUNTIME:
        return runtime(machine, python)
    return sizes(machine) if what == SIZES else again(machine)
