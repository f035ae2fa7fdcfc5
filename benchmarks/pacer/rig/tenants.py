"""Several containers on one card.

Checks that each gets its share, that idle time is shared and given back, and that priority is respected.
"""

import time
from functools import partial
from itertools import product
from statistics import mean, median

import numpy as np

from rig.machine import Machine, Program, Trace, share
from rig.report import Plan, Reading, Trial
from rig.single import demand, shares

PAIRS = "Two containers on one card: share in percent"
THREE = "Containers of 20, 30 and 50 % on one card: share in percent"
PRIORITY = "A high-priority container comes to a low one"
KERNELS = {"short": "wide", "long": "long", "2 ms": "2ms"}  # async 0.1 ms, sync 50 ms, async 2 ms
FINE_S = 0.005  # between two looks where milliseconds count
RETURNS = 5
COMINGS = 3  # number of starts of a container with high priority
WINDOW_S = 0.1  # length of the window in which a returning owner is measured
SETTLE_S = 0.5


def pair(limits: tuple[int, int], shapes: tuple[str, str], machine: Machine, plan: Plan) -> tuple[list[Reading], Trace]:
    """Two containers whose limits fill the card.

    What the second one could take next to the first without a limit is measured before and after: neither container is
    charged for the cost of switching between them.
    """
    machine.arbitrate()
    machine.container(limits[0]).start(shapes[0])
    unlimited = machine.container(0)
    taken = [demand(machine, unlimited, shapes[1], plan, limits[1])]
    second = machine.container(limits[1]).start(shapes[1])
    trace = machine.record(plan.whole_s)
    each = shares(trace, plan)[1]
    machine.stop(second)
    taken.append(demand(machine, unlimited, shapes[1], plan, limits[1]))
    return [
        Reading("first", each[0], limits[0], 1),
        Reading("second", each[1], min(limits[1], mean(whole for whole, _ in taken)), 1, most=limits[1]),
        Reading("second less its limit", each[1] - limits[1]),
        *(Reading("second, if it had no limit", whole) for whole, _ in taken),
    ], trace


def back_after_ms(trace: Trace, owner: int, percent: float) -> float:
    """Time from which on the owner has its share again: at least 90 % of it in each 0.1 s window of the next 0.5 s.

    Milliseconds since the trace began; infinity when the owner never gets its share.
    """
    busy = trace.busy[:, owner]
    gained = np.interp(trace.at + WINDOW_S, trace.at, busy) - busy
    good = gained >= 0.9 * percent / 100 * WINDOW_S
    until = trace.at[-1] - WINDOW_S - SETTLE_S
    for begin in trace.at[trace.at <= until]:
        if good[(trace.at >= begin) & (trace.at <= begin + SETTLE_S)].all():
            return float(begin * 1000)
    return float("inf")


def three(policy: str, machine: Machine, plan: Plan) -> tuple[list[Reading], Trace]:
    """The third container rests; under `elastic` the other two share its time by weight until it comes back."""
    elastic = policy == "elastic"
    limits = (20, 30, 50)
    columns = ("20 %", "30 %", "50 %")
    row = f"the third one idle, {policy}"
    machine.arbitrate()
    for limit in limits:
        container = machine.container(limit, policy="elastic" if elastic else "fixed", ceiling=100 if elastic else 0)
        owner = container.start("wide", held=limit == 50)
    trace = machine.record(plan.whole_s)
    expected, bar = ((40, 60, 0), 2) if elastic else ((20, 30, 0), 1)
    each = shares(trace, plan)[1]
    readings = [Reading(c, v, e, bar, row=row) for c, v, e in zip(columns, each, expected, strict=True)]
    if not elastic:
        return readings, trace
    late = []
    for turn in range(RETURNS):
        if turn:
            owner.toggle()
            machine.record(1)  # it is idle again
        before = machine.record(0.5, FINE_S)
        owner.toggle()
        back = machine.record(1.5, FINE_S)
        late.append(back_after_ms(back, 2, 50))
        trace = before.then(back)
    readings.append(Reading("its time back after ms", median(late), 50, 0, "at most", row))
    after = machine.record(plan.measured_s)
    row = "the third one is back, elastic"
    readings += [
        Reading(c, share(after.at, column), limit, 1, row=row)
        for c, column, limit in zip(columns, after.busy.T, limits, strict=True)
    ]
    return readings, trace


def beside_low(high: Program, low_shape: str, machine: Machine, plan: Plan) -> tuple[list[Reading], Trace]:
    """The high program alone, then next to a low program that started before, and alone again.

    The last measurement is necessary because the machine varies.
    """
    high.toggle()
    machine.record(1)
    solo = machine.record(plan.measured_s / 4)
    high.toggle()
    low_one = machine.containers[1].start(low_shape)
    machine.record(1)
    before = machine.record(0.5, FINE_S)
    high.toggle()
    waited, begun = machine.waited(high), time.monotonic()
    trace = machine.record(plan.measured_s, FINE_S)
    kept = (machine.waited(high) - waited) / (time.monotonic() - begun)
    machine.stop(low_one)
    again = machine.record(plan.measured_s / 4)
    high.toggle()
    machine.record(0.2)  # it comes to rest
    alone = mean(share(at, busy[:, 0]) for at, busy in ((solo.at, solo.busy), (again.at, again.busy)))
    first = trace.between(0, WINDOW_S)
    settled = trace.between(WINDOW_S, trace.at[-1])
    beside, low = (share(settled.at, column) for column in settled.busy.T)
    return [
        Reading("high, % of what it gets alone", beside / alone * 100, 95, 0, "at least"),
        Reading("high waits for the card, %", kept * 100, 5, 0, "at most"),
        Reading("low, % of the card", low),
        Reading("low, ms of the first 100", float(first.busy[-1, 1] - first.busy[0, 1]) * 1000),
    ], before.then(trace.between(0, 1.5))


def priority(low_shape: str, machine: Machine, plan: Plan) -> tuple[list[Reading], Trace]:
    """The median of several starts.

    What a program that waits for each kernel gets alone differs from second to second, by as much as the low program
    may take.
    """
    machine.arbitrate()
    high = machine.container(0, priority=0).start("sync2ms", held=True)
    machine.container(0, priority=1)
    comings = [beside_low(high, low_shape, machine, plan) for _ in range(COMINGS)]
    each = zip(*(readings for readings, _ in comings), strict=True)
    readings = [sorted(same, key=lambda reading: reading.value)[COMINGS // 2] for same in each]
    readings.append(Reading("worst coming, %", min(coming[0].value for coming, _ in comings)))
    return readings, comings[0][1]


def trials() -> list[Trial]:
    found = []
    pairs = list(product(((10, 90), (30, 70), (50, 50)), product(("short", "long"), repeat=2)))
    pairs.remove(((50, 50), ("long", "short")))  # the same as short and long
    pairs += [((30, 70), ("2 ms", other)) for other in KERNELS]  # as long as a time slice
    for limits, kinds in pairs:
        row = f"{limits[0]} / {limits[1]}, {kinds[0]} and {kinds[1]}"
        found.append(Trial(PAIRS, row, partial(pair, limits, (KERNELS[kinds[0]], KERNELS[kinds[1]]))))
    found += [Trial(THREE, policy, partial(three, policy), alone=True) for policy in ("fixed", "elastic")]
    found += [
        Trial(PRIORITY, f"low one: {title}", partial(priority, shape), alone=True)
        for shape, title in (("sync2ms", "sync 2 ms"), ("long", "sync 50 ms"), ("wide", "async 0.1 ms"))
    ]
    return found
