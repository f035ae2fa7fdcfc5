"""Whether fills and copies within the card take multiprocessor time from a neighbour that launches kernels."""

import sys
from typing import Any, Final

from .children import Broken
from .core import ROOM_MIB, Plan, Share
from .machine import PROGRAMS, Command, Machine
from .rows import Row, broken, not_run

FAMILY: Final = "fills and copies"
KINDS: Final = ("fill", "copy")
LENGTH: Final = "2ms"  #: of the neighbour's kernels
BYTES: Final = 64 << 20
CORES: Final = 10
LOOPS: Final = "loops of fills and copies"
MARGIN_S: Final = 0.5  #: the loops go on for this time after the neighbour has ended
NOTICED: Final = 90.0  #: % of the card's time that a neighbour keeps if fills take none of it
SHARED: Final = 75.0  #: % below which fills and the neighbour take turns
BAR: Final = 100 - CORES - 3.0  #: % that a neighbour keeps next to a slice of CORES; switching costs, too


def kept(share: Share, alone: Share) -> float:
    """Percent of what the neighbour had alone."""
    return 100 * (share.launches / share.seconds) / (alone.launches / alone.seconds)


def native(kind: str, left: float, rate: float) -> Row:
    """The driver's own behaviour: a row without a bar."""
    if left >= NOTICED:
        got = "not on the SMs"
    elif left <= SHARED:
        got = "on the SMs"
    else:
        got = "partly on the SMs"
    remark = f"{rate:.4g} GB/s; kernels of {LENGTH} of another process kept their rate to so much"
    return Row(FAMILY, f"a loop of {_plural(kind)}, no limit", "", got, f"{left:.1f} %", remark=remark)


def limited(kind: str, left: float, rate: float) -> Row:
    """The same loop in a slice."""
    what = f"a loop of {_plural(kind)} at {CORES} %"
    remark = f"{rate:.4g} GB/s; what the neighbour without a limit keeps"
    return Row(
        FAMILY, what, f"{100 - CORES} % left", f"{left:.1f} %", f"{left - (100 - CORES):+.1f}", f">= {BAR:g} %",
        left >= BAR, remark, timed=True,
    )  # fmt: skip


def _plural(kind: str) -> str:
    return {"fill": "fills", "copy": "copies"}[kind]


def next_to(machine: Machine, plan: Plan, command: Command | None, cores: int) -> tuple[Share, dict[str, Any]]:
    """What a neighbour gets next to `command` (None: alone), which has a slice of `cores` % (0: no limit)."""
    share: Command = [sys.executable, PROGRAMS / "share.py", LENGTH, str(plan.warm_s), str(plan.measured_s)]
    with machine.native(share) as neighbour:
        ready = neighbour.answer()
        if command is None:
            neighbour.tell()
            return Share(**ready, **neighbour.answer()), {}
        memory = machine.context_mib + ROOM_MIB
        slice_ = machine.limited(command, memory=memory, cores=cores) if cores else machine.native(command)
        with slice_ as child:
            child.answer()
            child.tell()
            neighbour.tell()
            got = Share(**ready, **neighbour.answer())
            return got, child.answer()


def check(machine: Machine, plan: Plan) -> list[Row]:
    """Both rows of each kind."""
    if machine.alone():
        return [not_run(FAMILY, f"a loop of {_plural(kind)}", machine.alone()) for kind in KINDS]
    seconds = plan.warm_s + plan.measured_s + MARGIN_S
    rows: list[Row] = []
    try:
        alone, _ = next_to(machine, plan, None, 0)
    except Broken as error:
        return [broken(FAMILY, "the neighbour alone", str(error))]
    for kind in KINDS:
        command: Command = [sys.executable, PROGRAMS / "engines.py", kind, str(seconds), str(BYTES)]
        try:
            share, work = next_to(machine, plan, command, 0)
            rows.append(native(kind, kept(share, alone), work["rate"]))
            share, work = next_to(machine, plan, command, CORES)
            rows.append(limited(kind, kept(share, alone), work["rate"]))
        except Broken as error:
            rows.append(broken(FAMILY, f"a loop of {_plural(kind)}", str(error)))
    return rows
