"""Cost of a launch, and cost of a limited program while it does nothing."""

import time
from operator import itemgetter

from rig.machine import Machine, Trace
from rig.report import Plan, Reading, Trial
from vgpu.native import paths

COST = "Cost"
TURNS, QUICK_TURNS = 5, 2
IDLE_S = 5
#: variant → (cores of its container, None: no container; ns that a launch may cost more than without the library)
VARIANTS: dict[str, tuple[int | None, float]] = {
    "library, no region": (None, 5),
    "accounting only": (0, 8),
    "with a limit": (90, 20),
}


def launches(machine: Machine, plan: Plan) -> tuple[list[Reading], Trace | None]:
    """Mean and 99.9th percentile of launches without a wait: the smallest of several turns; the variants take turns."""
    environments: dict[str, dict[str, str]] = {"driver alone": {}}
    for name, (cores, _) in VARIANTS.items():
        preload = {"LD_PRELOAD": str(paths.libvgpu())}
        region = {} if cores is None else {"VGPU_DIR": str(machine.container(cores).region.directory)}
        environments[name] = preload | region
    found: dict[str, list[dict[str, float]]] = {name: [] for name in environments}
    for _ in range(TURNS if plan.runs > 1 else QUICK_TURNS):
        for name, variables in environments.items():
            printed = (line.split() for line in machine.output("cost", **variables).splitlines())
            found[name].append({figure: float(value) for figure, value in printed})
    native = min(turn["mean"] for turn in found["driver alone"])
    readings = []
    for name, turns in found.items():
        row, mean, quietest = f"launch, {name}", min(turn["mean"] for turn in turns), min(turns, key=itemgetter("p999"))
        bars = VARIANTS.get(name)
        readings += [
            Reading("mean ns", mean, row=row),
            Reading("added ns", mean - native, bars and bars[1], 0, "at most", row),
            Reading("p99.9 ns", quietest["p999"], 2000 if bars else None, 0, "at most", row),
            Reading("over 2 us, of 1000", quietest["slow"], row=row),
        ]
    return readings, None


def idle(machine: Machine, _: Plan) -> tuple[list[Reading], Trace | None]:
    """Processor time of a limited program that has worked and now waits for its user."""
    program = machine.container(30).start("wide")
    machine.record(1)
    program.toggle()
    machine.record(1)  # queued work ends
    before = program.cpu_seconds()
    time.sleep(IDLE_S)
    used = program.cpu_seconds() - before
    return [Reading("CPU ms in 5 s", used * 1000, 0, 0, "at most")], None


def trials() -> list[Trial]:
    return [
        Trial(COST, "launch", launches, alone=True, once=True),
        Trial(COST, "an idle limited process", idle, alone=True, once=True),
    ]
