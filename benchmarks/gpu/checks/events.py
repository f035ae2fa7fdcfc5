"""Time on the card: cost of events, whether their clock is the host's, and cost of a first launch."""

import sys
from typing import Any, Final

from .children import Broken
from .core import ROOM_MIB
from .machine import PROGRAMS, Command, Machine
from .rows import Row, broken, not_run

FAMILY: Final = "events and first launches"
CLOCK: Final = "events, short kernels, drift"
LAZY: Final = "first launches"
DRIFT: Final = 1000  #: ppm; the core limit assumes the same value
CORES: Final = 20  #: of the slice in which kernels are launched for the first time
SLOWER: Final = 2.0  #: factor for first launches in that slice


def clock(answer: dict[str, Any]) -> list[Row]:
    """`answer` of clock.py; us and s."""
    pair = answer["pair"]
    remark = (
        f"behind queued work; the least {pair['least']:.2f} us; a record among many takes {answer['record']:.2f} us"
    )
    rows = [Row(FAMILY, "an empty pair of events", "", f"{pair['median']:.2f} us", remark=f"{remark} of the card")]
    for name, took in answer["kernels"].items():
        each, pair = took["row"], took["pair"]
        what, remark = f"a kernel of {name} between two events", f"behind queued work; the least {pair['least']:.2f} us"
        times = f"{each:.2f} us in a row", f"{pair['median']:.2f} us", f"{pair['median'] - each:+.2f} us"
        rows.append(Row(FAMILY, what, *times, remark=remark))
    return [*rows, drift(answer["drift"])]


def drift(took: dict[str, float]) -> Row:
    """The same time by the clock and by events, and the host's possible error; s."""
    apart, unsure = 1e6 * (took["events"] / took["clock"] - 1), 1e6 * took["unsure"] / took["clock"]
    remark = f"the clock is CLOCK_MONOTONIC; the host saw the events to {unsure:.0f} ppm"
    times = f"{took['clock']:.6f} s", f"{took['events']:.6f} s", f"{apart:+.0f} ppm", f"<= {DRIFT} ppm"
    return Row(FAMILY, "event time against the clock", *times, abs(apart) <= DRIFT + unsure, remark, timed=True)


def lazy(mode: str, answer: dict[str, Any]) -> list[Row]:
    """`answer` of lazy.py without the library; `mode`: what CUDA_MODULE_LOADING asked for; ms."""
    first, second = answer["first"], answer["second"]
    remark = (
        f"{answer['count']} kernels, loading {answer['mode']}: module {answer['load']:.2f} ms, a function"
        f" {1000 * answer['get']:.0f} us; a pair of events around it {1000 * first['pair']:.0f} us, later"
        f" {1000 * second['pair']:.0f} us"
    )
    if "after" in answer:
        remark += (
            f"; cuFuncLoad {1000 * answer['funcload']:.0f} us, then the first launch"
            f" {1000 * answer['after']['call']:.0f} us, its pair {1000 * answer['after']['pair']:.0f} us"
        )
    asked, got = f"later {1000 * second['call']:.0f} us", f"{1000 * first['call']:.0f} us"
    return [Row(FAMILY, f"a first launch, {mode}", asked, got, remark=remark)]


def charged(native: dict[str, Any], ours: dict[str, Any]) -> Row:
    """The host's time for loading must not be charged as work of the card."""
    alone, here = native["first"]["sum"], ours["first"]["sum"]
    what = f"{native['count']} first launches at {CORES} %"
    return Row(
        FAMILY, what, f"{alone:.1f} ms", f"{here:.1f} ms", f"x {here / alone:.2f}", f"<= x {SLOWER:g}",
        here <= SLOWER * alone, "one after the other, each waited for; loading code is no work of the card", timed=True,
    )  # fmt: skip


def time_check(machine: Machine, turns: int = 20, seconds: float = 5.0) -> list[Row]:
    command: Command = [sys.executable, PROGRAMS / "clock.py", str(turns), str(seconds)]
    try:
        with machine.native(command) as child:
            return clock(child.answer())
    except Broken as error:
        return [broken(FAMILY, CLOCK, str(error))]


def lazy_check(machine: Machine) -> list[Row]:
    command: Command = [sys.executable, PROGRAMS / "lazy.py"]
    rows: list[Row] = []
    answers = {}
    try:
        for mode in ("EAGER", "LAZY"):
            variables = {"CUDA_MODULE_LOADING": mode}
            with machine.native(command, variables=variables) as child:
                answers[mode] = child.answer()
            rows += lazy(mode, answers[mode])
        memory = machine.context_mib + ROOM_MIB
        with machine.limited(command, memory=memory, cores=CORES, variables=variables) as child:
            rows.append(charged(answers["LAZY"], child.answer()))
    except Broken as error:
        rows.append(broken(FAMILY, LAZY, str(error)))
    return rows


def host_numa(machine: Machine) -> list[Row]:
    """What the driver reports about memory of the host's NUMA node, and whether it works: a row without a bar."""
    what = "memory of the host's node (HOST_NUMA)"
    command: Command = [sys.executable, PROGRAMS / "host_numa.py"]
    step, said = "the start", ""
    try:
        with machine.native(command) as child:
            while True:
                answer = child.answer()
                step = answer.get("begins", step)
                if "attribute" in answer:
                    said = f"says {'yes' if answer['attribute'] else 'no'}, node {answer['node']}"
                if "failed" in answer:
                    return [Row("tier", what, f"the driver {said}", f"{answer['failed']}: {answer['why']}")]
                if "done" in answer:
                    return [Row("tier", what, f"the driver {said}", "works", remark="made, mapped, filled, copied")]
    except Broken as error:
        if step == "the start":
            return [not_run("tier", what, str(error))]
        return [Row("tier", what, f"the driver {said}", f"breaks in {step}", remark=str(error))]
