"""Frameworks of a Python on this machine, at the limit of their slice: their errors, and right results."""

import os
import shutil
from typing import Any, Final

from .children import Broken
from .core import BAR
from .machine import PROGRAMS, Command, Machine
from .rows import MIB, Row, broken, mib, not_run

FAMILY: Final = "frameworks"
#: row → (program of framework.py, variables)
ROWS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "PyTorch": ("torch", {}),
    "PyTorch, cudaMallocAsync": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "PyTorch, expandable segments": ("torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "CuPy": ("cupy", {}),
    "JAX": ("jax", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    "Triton": ("triton", {}),
}
SHARE: Final = "PyTorch, products of matrices"
CORES: Final = 50
MEMORY_MIB: Final = 2048  #: in addition to the context
FILLED: Final = 64 * MIB  #: less than this must be left when a framework is refused: its own chunks
SECONDS: Final = 60.0
WARM_S, MEASURED_S = 2.0, 5.0


def judged(what: str, limit: int, answer: dict[str, Any]) -> Row:
    """The row for `answer` of framework.py, in a slice of `limit` bytes.

    The total must be the limit. The framework must get at most the limit, and at least the bytes that were free at
    first less FILLED. The refusal must be the framework's own out-of-memory error, after which it goes on. The product
    must be right.
    """
    faults = []
    if answer["total"] != limit:
        faults.append(f"total {mib(answer['total'])}")
    if not answer["right"]:
        faults.append("a wrong result")
    if not answer["again"]:
        faults.append("nothing to be had after everything was freed")
    got = answer.get("got")
    if got is None:
        told = f"total {mib(answer['total'])}, result {'right' if answer['right'] else 'wrong'}"
    else:
        told = f"{mib(got)}, then {answer['kind']}"
        if not answer["free"] - FILLED <= got <= limit:
            faults.append(f"{mib(answer['free'])} were free")
    bar = "total = limit, right" + ("" if got is None else ", filled")
    remark = "; ".join([f"version {answer['version']}", *faults])
    return Row(
        FAMILY, what, mib(limit), told, "" if got is None else f"{mib(limit - got)} others'", bar, not faults, remark
    )


def shared(native: dict[str, Any], ours: dict[str, Any]) -> Row:
    """The rate (products per second) under a core limit against the rate without one."""
    got = 100 * ours["rate"] / native["rate"]
    error = got - CORES
    remark = f"version {ours['version']}; {native['rate']:.1f} products/s without limit, {ours['rate']:.1f} with it"
    return Row(
        FAMILY, SHARE, f"{CORES} %", f"{got:.2f} %", f"{error:+.2f}", f"±{BAR:g} point", abs(error) <= BAR, remark,
        timed=True,
    )  # fmt: skip


def check(machine: Machine, what: str, python: str) -> list[Row]:
    """One row; `python`: the interpreter whose frameworks are tested."""
    if machine.simulate:
        return [not_run(FAMILY, what, "simulated: kernels compute nothing there")]
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        return [not_run(FAMILY, what, f"{python} is not found")]
    try:
        return [share(machine, path) if what == SHARE else full(machine, what, path)]
    except Broken as error:
        return [broken(FAMILY, what, str(error))]


def full(machine: Machine, what: str, python: str) -> Row:
    program, variables = ROWS[what]
    memory = MEMORY_MIB + machine.context_mib
    command: Command = [python, PROGRAMS / "framework.py", program]
    with machine.limited(command, memory=memory, seconds=SECONDS, variables=variables) as child:
        answer = child.answer()
    if "missing" in answer:
        return not_run(FAMILY, what, f"not installed: {answer['missing']}")
    return judged(what, memory * MIB, answer)


def share(machine: Machine, python: str) -> Row:
    command: Command = [python, PROGRAMS / "framework.py", "torch-rate", str(WARM_S), str(MEASURED_S)]
    with machine.native(command, seconds=SECONDS) as child:
        native = child.answer()
    if "missing" in native:
        return not_run(FAMILY, SHARE, f"not installed: {native['missing']}")
    memory = MEMORY_MIB + machine.context_mib
    with machine.limited(command, memory=memory, cores=CORES, seconds=SECONDS) as child:
        return shared(native, child.answer())
