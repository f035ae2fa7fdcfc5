"""Time that the library adds to driver calls, measured by the program of `make bench-hooks` on this driver."""

import sys
from collections.abc import Mapping
from typing import Final

from .children import Broken
from .machine import ROOT, Machine, Tier
from .rows import Row, broken, not_run

sys.path.insert(0, str(ROOT / "benchmarks/hooks"))
from calls import Call, compiled, read

FAMILY: Final = "driver calls"
#: share of a call's own time that may be added where the call's own bar is less. A real driver's calls take µs
RELATIVE: Final = 0.05
SECONDS: Final = 60.0  #: for one run of all calls
CORES: Final = 90
VARIANTS: Final = {"memory limit": 0, "memory and core limit": CORES}
MOVES: Final = "memory that moves"


def judged(variant: str, native: Mapping[str, Call], ours: Mapping[str, Call]) -> list[Row]:
    """A row per call; `native`, `ours`: without and with the library. The bar is the program's own."""
    rows = []
    for name, call in native.items():
        own = call.moving if variant == MOVES else call.bar
        added, bar = ours[name].ns - call.ns, max(float(own), RELATIVE * call.ns)
        times = f"{call.ns:.1f} ns", f"{ours[name].ns:.1f} ns", f"{added:+.1f} ns"
        rows.append(Row(FAMILY, f"{name}, {variant}", *times, f"<= +{bar:.0f} ns", added <= bar, timed=True))
    return rows


def check(machine: Machine, quick: bool = False) -> list[Row]:
    """All calls without the library, and in three slices.

    The slices are one without more limits, one with a core limit, and one whose blocks may move.
    """
    try:
        folder = ROOT / "build/gpu-check"  # not next to the regions: /dev/shm may be mounted noexec
        folder.mkdir(parents=True, exist_ok=True)
        command = [compiled(folder), *(["quick"] if quick else [])]
        # large blocks cost the driver the same in all variants: they are mapped, as where they can move
        variables = {"MAPPED": "1"}
        with machine.native(command, seconds=SECONDS, variables=variables) as child:
            native = read(child.text())
        rows = []
        memory = machine.slice_mib()
        for variant, cores in VARIANTS.items():
            with machine.limited(command, memory=memory, cores=cores, seconds=SECONDS, variables=variables) as child:
                rows += judged(variant, native, read(child.text()))
        moving = Tier(memory, memory // 2 + machine.context_mib, memory // 2, movable=True)
        with machine.tiered(command, moving, seconds=SECONDS) as child:
            rows += judged(MOVES, native, read(child.text()))
    except FileNotFoundError as error:
        return [not_run(FAMILY, "benchmarks/hooks/calls.c", f"it needs a C compiler: {error.filename} is not found")]
    except (Broken, ValueError) as error:
        return [broken(FAMILY, "benchmarks/hooks/calls.c", str(error))]
    return rows
