"""One container with a fixed share, for every way to launch: which share of the card does the container get?"""

from functools import partial
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from rig.machine import Container, Machine, Trace, share
from rig.report import Plan, Reading, Trial

LIMITS = (20, 50, 80)  # percent
SHAPES = {
    "wide": "async 0.1 ms, grid 1024",
    "narrow": "async 0.1 ms, grid 64",
    "tiny": "async 10 us, grid 1024",
    "2ms": "async 2 ms",
    "sync": "sync 0.1 ms",
    "long": "sync 50 ms",
    "extended": "cuLaunchKernelEx",
    "cooperative": "cooperative",
    "graph": "graph of 20 x 0.1 ms",
    "bursts": "bursts of 20 x 0.5 ms every 30 ms",
    "lognormal": "log-normal 0.1 ms, sigma 0.2",
    "alternating": "one key, 10 us and 10 ms in turn",
    "streams": "4 streams of 1 ms, overlapping",
    "persistent": "persistent, 0.2 to 20 ms of work",
}
#: programs that need a card with several kernels at a time
OVERLAPPING = ("streams",)
#: programs that rest by themselves: their use without a limit is measured next to every limit
RESTING = ("sync", "bursts")
SINGLE = "One process: share of the card in percent"
CROWD = "More launchers in one container: share in percent"
PROCESSES = 4
STREAMS = 4  # of shapes.c
TENTH_S = 0.1
CREDIT_S = 0.05  # largest credit for idle time; DEFAULT_BURST_MS of libvgpu/src/pacer/core_share.c


def shares(trace: Trace, plan: Plan) -> tuple[float, list[float]]:
    """Percent of all programs together and of each, after the warm-up."""
    window = trace.between(plan.warm_s, trace.at[-1])
    return share(window.at, window.whole()), [share(window.at, column) for column in window.busy.T]


def tenths(trace: Trace, column: NDArray[np.float64]) -> NDArray[np.float64]:
    """Percent of the card in each tenth of a second of a trace."""
    ends = np.arange(trace.at[0], trace.at[-1], TENTH_S)
    return np.diff(np.interp(ends, trace.at, column)) / TENTH_S * 100


def served(parts: NDArray[np.float64], limit: float) -> float:
    """The share that a limit gives a program, percent.

    `parts`: what the program could take of the card in successive tenths of a second. It may make up for unused time as
    far as there is credit.
    """
    credit = given = 0.0  # seconds of GPU time
    for part in parts / 100 * TENTH_S:
        there = credit + limit / 100 * TENTH_S
        used = min(float(part), there)
        credit = min(there - used, limit / 100 * CREDIT_S)
        given += used
    return given / (len(parts) * TENTH_S) * 100


def demand(machine: Machine, container: Container, shape: str, plan: Plan, limit: int) -> tuple[float, float]:
    """What a program takes of the card without a limit, and what the limit would give it then; percent.

    The program has its region and the library as usual. On a busy machine, a program that takes 82 % on average may
    take 60 for half a second and then 95. Then no limit of 80 can give it 80.
    """
    program = container.start(shape)
    machine.record(1)
    trace = machine.record(plan.measured_s / 2)
    column = trace.busy[:, machine.programs.index(program)]
    machine.stop(program)
    return share(trace.at, column), served(tenths(trace, column), limit)


def single(shape: str, limit: int, machine: Machine, plan: Plan) -> tuple[list[Reading], Trace | None]:
    """One program with one limit.

    A program that rests is also measured without a limit, before and after, because its use varies.
    """
    if shape in OVERLAPPING:
        machine.simulate(f"kernels={STREAMS}")
    unlimited = machine.container(0)
    rests = shape in RESTING
    taken = [demand(machine, unlimited, shape, plan, limit)] if rests else []
    program = machine.container(limit).start(shape)
    trace = machine.record(plan.whole_s)
    machine.stop(program)
    taken += [demand(machine, unlimited, shape, plan, limit)] if rests else []
    expected = mean(cut for _, cut in taken) if taken else limit
    bar = 2 if shape == "alternating" else 1
    return [
        Reading(f"{limit} %", shares(trace, plan)[0], expected, bar, most=limit),
        *(Reading("no limit", whole) for whole, _ in taken),
    ], trace


def processes(limit: int, machine: Machine, plan: Plan) -> tuple[list[Reading], Trace | None]:
    """Several processes of one container.

    The limit is for all together, and each process gets as much as the others.
    """
    container = machine.container(limit)
    for _ in range(PROCESSES):
        container.start("wide")
    trace = machine.record(plan.whole_s)
    whole, each = shares(trace, plan)
    quarter = whole / PROCESSES
    worst = max(each, key=lambda one: abs(one - quarter))
    return [Reading(f"{limit} %", whole, limit, 1), Reading(f"{limit} %: one of them", worst, quarter, 1)], trace


def threads(limit: int, machine: Machine, plan: Plan) -> tuple[list[Reading], Trace | None]:
    """Several threads of one process with several streams each."""
    machine.container(limit).start("threads")
    trace = machine.record(plan.whole_s)
    return [Reading(f"{limit} %", shares(trace, plan)[0], limit, 1)], trace


def trials() -> list[Trial]:
    found = [Trial(SINGLE, title, partial(single, shape, limit)) for shape, title in SHAPES.items() for limit in LIMITS]
    found += [Trial(CROWD, f"{PROCESSES} processes, async 0.1 ms", partial(processes, limit)) for limit in LIMITS]
    found += [Trial(CROWD, "8 threads x 4 streams, 0.1 ms", partial(threads, limit)) for limit in LIMITS]
    return found
