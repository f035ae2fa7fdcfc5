"""Cost of events on the card, and whether they measure the same time as the clock: `clock.py TURNS DRIFT_S`.

Prints one object, us and s. Runs with tests/native on its path. All pairs are behind queued work, so that they wait
only for the card.
"""

import json
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_void_p
from statistics import median

from driver_client import cu, ok
from share import Work, event

HOLD = "30ms"  # time in which the host queues all measured work
KERNELS = ("5us", "10us", "20us")
ROW = 100  # launches, or records, in a row
ENDS = 5  # number of ends; the most exactly observed one counts


def between(first: c_void_p, last: c_void_p) -> float:
    """us"""
    took = c_float()
    ok(cu.cuEventSynchronize(last))
    ok(cu.cuEventElapsedTime(byref(took), first, last))
    return 1000 * took.value


def behind(hold: Work, turns: int, work: Callable[[], object]) -> dict[str, float]:
    """us between two events around `work`: the median of several turns, and the smallest."""
    first, last = event(), event()
    took = []
    for _ in range(turns):
        hold.launch()
        ok(cu.cuEventRecord(first, None))
        work()
        ok(cu.cuEventRecord(last, None))
        took.append(between(first, last))
    return {"median": median(took), "least": min(took)}


def seen(mark: c_void_p) -> tuple[float, float]:
    """Time (s, host's clock) of an event on an idle card, and the possible error."""
    begun = time.monotonic()
    ok(cu.cuEventRecord(mark, None))
    ok(cu.cuEventSynchronize(mark))
    ended = time.monotonic()
    return (begun + ended) / 2, (ended - begun) / 2


def end() -> tuple[c_void_p, float, float]:
    marks = [(mark, *seen(mark)) for mark in (event() for _ in range(ENDS))]
    return min(marks, key=lambda mark: mark[2])


def drift(seconds: float) -> dict[str, float]:
    """The same stretch of time by the host's clock and by events, and the host's possible error; s."""
    ok(cu.cuCtxSynchronize())
    first, began, wrong = end()
    time.sleep(seconds)
    last, ended, also = end()
    return {"clock": ended - began, "events": between(first, last) / 1e6, "unsure": wrong + also}


def main() -> None:
    turns, seconds = int(sys.argv[1]), float(sys.argv[2])
    hold, marks = Work(HOLD), [event() for _ in range(ROW)]
    hold.launch()  # the first launch loads its code
    ok(cu.cuCtxSynchronize())
    kernels = {}
    for name in KERNELS:
        work = Work(name, hold.context)
        work.launch()
        ok(cu.cuCtxSynchronize())

        def row(work: Work = work) -> None:
            for _ in range(ROW):
                work.launch()

        kernels[name] = {"pair": behind(hold, turns, work.launch), "row": behind(hold, turns, row)["median"] / ROW}
    answer = {
        "pair": behind(hold, turns, lambda: None),
        "record": behind(hold, turns, lambda: [ok(cu.cuEventRecord(mark, None)) for mark in marks])["median"] / ROW,
        "kernels": kernels,
        "drift": drift(seconds),
    }
    print(json.dumps(answer), flush=True)


main()
