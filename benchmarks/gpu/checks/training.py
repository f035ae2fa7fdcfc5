"""PyTorch training in a slice that guarantees only a part of its memory, against the same training without a limit."""

import os
import shutil
from collections.abc import Sequence
from typing import Any, Final

from .children import Broken, Child
from .machine import PROGRAMS, Command, Machine, Tier
from .rows import MIB, Row, broken, mib, not_run
from .tier import FAMILY, MODES

TRAINING: Final = "PyTorch training"
BASE_MIB: Final = 1024  #: guarantee of the slice in addition to the context
RATIOS: Final = (0.9, 1.5, 2.0)
LIMIT: Final = 2.6  #: times BASE_MIB: the largest training, with a framework's rounding, modules and work spaces
STEPS: Final = 8
SECONDS: Final = 60.0
SAME: Final = 1e-3  #: largest relative difference of two equal figures: sums in another order
BAR: Final = "losses and sums the same"


def sizes() -> list[int]:
    """Bytes of each training."""
    return [int(ratio * BASE_MIB * MIB) for ratio in RATIOS]


def slice_of(machine: Machine, mode: str) -> Tier:
    memory = int(LIMIT * BASE_MIB)
    return Tier(machine.context_mib + memory, machine.context_mib + BASE_MIB, memory, mode == "movable")


def title(ratio: float, mode: str) -> str:
    return f"{TRAINING} at {ratio:g} x the guarantee, {mode}"


def same(figures: Sequence[float], native: Sequence[float]) -> bool:
    """Whether all figures equal those of the same training without a limit; NaN never does."""
    return len(figures) == len(native) > 0 and all(
        abs(one - other) <= SAME * abs(other) for one, other in zip(figures, native, strict=True)
    )


def judged(ratio: float, mode: str, native: dict[str, Any], ours: dict[str, Any]) -> Row:
    """The row for one size; `native`, `ours`: answers of tier_train.py.

    The time of a step is only shown. Losses and sums must be equal.
    """
    what = title(ratio, mode)
    if "refused" in native:
        return not_run(FAMILY, what, f"without a limit: {native['refused']}")
    asked = f"{1000 * native['step_s']:.1f} ms a step"
    if "refused" in ours:
        return Row(FAMILY, what, asked, "out of memory", "", BAR, False, ours["refused"])
    got = f"{1000 * ours['step_s']:.1f} ms a step"
    learned = ours["losses"][-1] < ours["losses"][0]
    met = learned and all(same(ours[name], native[name]) for name in ("losses", "sums"))
    remark = (
        f"version {ours['version']}, {ours['layers']} layers, {mib(ours['reserved'])} of the driver; "
        f"loss {ours['losses'][0]:.4g} to {ours['losses'][-1]:.4g}, without a limit {native['losses'][-1]:.4g}"
    )
    return Row(FAMILY, what, asked, got, f"x {ours['step_s'] / native['step_s']:.2f}", BAR, met, remark)


def rows_of(native: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], mode: str) -> list[Row]:
    return [judged(ratio, mode, *pair) for ratio, *pair in zip(RATIOS, native, ours, strict=True)]


def check(machine: Machine, python: str) -> list[Row]:
    """A row for each mode and size; `python`: the interpreter whose PyTorch is tested."""
    if machine.simulate:
        return [not_run(FAMILY, TRAINING, "simulated: kernels compute nothing there")]
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        return [not_run(FAMILY, TRAINING, f"{python} is not found")]
    command: Command = [path, PROGRAMS / "tier_train.py", "cuda", str(STEPS), *map(str, sizes())]
    try:
        with machine.native(command, seconds=SECONDS) as child:
            first = child.answer()
            if "missing" in first:
                return [not_run(FAMILY, TRAINING, f"not installed: {first['missing']}")]
            native = [first, *rest(child)]
    except Broken as error:
        return [broken(FAMILY, TRAINING, f"without a limit: {error}")]
    rows: list[Row] = []
    for mode in MODES:
        try:
            with machine.tiered(command, slice_of(machine, mode), seconds=SECONDS) as child:
                rows += rows_of(native, [child.answer(), *rest(child)], mode)
        except Broken as error:
            rows.append(broken(FAMILY, f"{TRAINING}, {mode}", str(error)))
    return rows


def rest(child: Child) -> list[dict[str, Any]]:
    """The answers for the sizes after the first."""
    return [child.answer() for _ in RATIOS[1:]]
