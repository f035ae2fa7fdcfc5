"""Checks what vgpu promises on the card of this machine, and prints one table (`make gpu-check`).

No root, no network, no container: every program gets its slice by `vgpu run`, as a user's would. It ends within
`--seconds`; what did not fit is listed as not run. Exit status: 0 every row with a bar meets it, 1 one does not,
2 there is no card to check. With `--simulate` the same on a simulated card.
"""

import argparse
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import pynvml
from checks import contexts, core, engines, events, frameworks, hooks, memory, pairs, tier, training
from checks.children import Budget
from checks.machine import Machine, NoDriver
from checks.rows import Row, broken, markdown, not_run, printed, status

MEMORY = Path("/dev/shm")  # regions are in memory where a node agent makes them
SECONDS = 450.0
INTERRUPTED = 130  # exit code, as in the shell


class Check(msgspec.Struct, frozen=True):
    """One check: rows of one family."""

    family: str
    what: str
    seconds: float  #: the check does not start with less time left
    run: Callable[[Machine], list[Row]]


class Scale(msgspec.Struct, frozen=True):
    """How much of each check is tried."""

    trials: int = pairs.TRIALS
    times: core.Plan = core.Plan()
    short: core.Plan = core.Plan(warm_s=0.8, measured_s=1.5)  #: for rows that need no more
    limits: tuple[int, ...] = core.LIMITS
    lengths: tuple[str, ...] = core.LENGTHS
    kernels: tuple[str, ...] = core.SHORT
    turns: int = 20  #: pairs of events
    drift_s: float = 5.0
    quick: bool = False


QUICK = Scale(
    trials=10, times=core.Plan(warm_s=0.2, measured_s=0.4, settle_s=0.2), short=core.Plan(warm_s=0.1, measured_s=0.3),
    limits=(50,), lengths=("2ms",), kernels=("10us",), turns=3, drift_s=0.3, quick=True,
)  # fmt: skip


def plan(python: str, scale: Scale) -> list[Check]:
    """All checks, the most important first. `python`: the interpreter whose frameworks are tested."""
    times, short = scale.times, scale.short
    found = [Check(memory.FAMILY, name, 15, partial(memory.check, name=name)) for name in memory.ROUTES]
    found += [
        Check(pairs.FAMILY, f"{pairs.BOTH}; {pairs.KILLED}", 30, partial(pairs.together, trials=scale.trials)),
        Check(pairs.FAMILY, "nvidia-smi", 15, pairs.nvidia_smi),
    ]
    found += [
        Check(contexts.FAMILY, what, 20, partial(contexts.check, what=what, python=python))
        for what in (contexts.SIZES, contexts.RUNTIME, contexts.AGAIN)
    ]
    found += [Check(tier.FAMILY, what, 20, partial(tier.check, what=what)) for what in tier.CHECKS]
    found.append(Check(tier.FAMILY, "HOST_NUMA", 10, events.host_numa))
    one = times.warm_s + times.measured_s + 3
    each = one * (1 + len(scale.limits)) + times.settle_s - times.warm_s + one
    shares = partial(core.check, limits=scale.limits)
    found += [
        Check(core.FAMILY, f"kernels of {length}", each, partial(shares, length=length, plan=times))
        for length in scale.lengths
    ]
    each = (short.warm_s + short.measured_s + 3) * (1 + len(scale.limits))
    found += [
        Check(core.FAMILY, f"kernels of {length}", each, partial(shares, length=length, plan=short, pair=()))
        for length in scale.kernels
    ]
    clock = partial(events.time_check, turns=scale.turns, seconds=scale.drift_s)
    found += [
        Check(events.FAMILY, events.CLOCK, 20, clock),
        Check(events.FAMILY, events.LAZY, 15, events.lazy_check),
    ]
    each = (1 + 2 * len(engines.KINDS)) * (short.warm_s + short.measured_s + 3)
    found.append(Check(engines.FAMILY, engines.LOOPS, each, partial(engines.check, plan=short)))
    found += [
        Check(frameworks.FAMILY, what, 30, partial(frameworks.check, what=what, python=python))
        for what in (*frameworks.ROWS, frameworks.SHARE)
    ]
    found.append(Check(hooks.FAMILY, "calls.c", 60, partial(hooks.check, quick=scale.quick)))
    return [*found, Check(tier.FAMILY, training.TRAINING, 60, partial(training.check, python=python))]


def run(machine: Machine, checks: Sequence[Check]) -> list[Row]:
    """The rows of all checks for which there is time; after an interrupt, the rows of complete checks."""
    rows: list[Row] = []
    for number, check in enumerate(checks):
        if machine.budget.left < check.seconds:
            rows.append(not_run(check.family, check.what, "no time left"))
            continue
        print(f"{check.family}: {check.what} ...", flush=True)
        try:
            found = check.run(machine)
        except NoDriver as error:
            rows.append(not_run(check.family, check.what, str(error)))
        except (pynvml.NVMLError, OSError, ValueError, KeyError) as error:  # the other checks must still run
            rows.append(broken(check.family, check.what, f"{type(error).__name__}: {error}"))
        except KeyboardInterrupt:
            print("interrupted")
            machine.interrupted = True
            return rows + [not_run(rest.family, rest.what, "interrupted") for rest in checks[number:]]
        else:
            late = machine.budget.left <= 0
            rows += [not_run(row.family, row.what, "no time left") if late and row.broke else row for row in found]
    return rows


def marked(rows: Sequence[Row], simulated: bool) -> list[Row]:
    """The rows, with the mark for a simulated card."""
    return [msgspec.structs.replace(row, simulated=simulated) for row in rows]


def show(machine: Machine, rows: Sequence[Row]) -> None:
    """Prints the table, and the reasons of its verdicts."""
    mark = " (simulated)" if machine.simulate else ""
    print(f"\nvgpu on {machine.model}{mark}", *printed(rows, mark), sep="\n")
    count = Counter(row.verdict for row in rows)
    told = [f"{count[verdict]} {verdict}" for verdict in ("met", "missed", "off", "not run") if count[verdict]]
    print("", ", ".join([*told, f"{count['']} without a bar"]), sep="\n")
    if count["off"]:
        print("off: a time of the simulated card, on a machine with other work: it does not count")


def terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def page_name(machine: Machine) -> str:
    """<card>-<driver>.md, without characters that a file name should not have."""
    parts = ["simulated"] * bool(machine.simulate) + [machine.model, machine.driver]
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts)).lower() + ".md"


def main() -> int:
    """Runs the checks, prints the table, and writes the requested files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulate", default="", metavar="PROFILE", help="on a simulated card, such as H100")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for everything (default {SECONDS:g})")
    parser.add_argument("--only", default="", metavar="TEXT", help="only checks in whose family or name TEXT occurs")
    parser.add_argument("--python", default="python3", help="whose frameworks are meant (default: python3 on PATH)")
    parser.add_argument("--quick", action="store_true", help="few trials, short windows: to see whether it runs")
    parser.add_argument("--docs", type=Path, metavar="DIR", help="write the table to DIR/<card>-<driver>.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    scale = QUICK if options.quick else Scale()
    wanted = options.only.lower()
    checks = [check for check in plan(options.python, scale) if wanted in f"{check.family}: {check.what}".lower()]
    if not checks:
        parser.error(f"--only {options.only}: no check has this in its name")
    signal.signal(signal.SIGTERM, terminated)
    with tempfile.TemporaryDirectory(prefix="vgpu-gpu-check-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        try:
            machine = Machine(Path(folder), options.simulate, Budget(options.seconds))
            machine.slice_mib()
        except (NoDriver, ValueError) as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 2
        facts = machine.facts()
        for name, value in facts:
            print(f"{name}: {value}")
        rows = marked(run(machine, checks), bool(machine.simulate))
        show(machine, rows)
        if options.docs:
            options.docs.mkdir(parents=True, exist_ok=True)
            page = options.docs / page_name(machine)
            page.write_text(markdown(f"{machine.model}, driver {machine.driver}", facts, rows, bool(machine.simulate)))
            print(f"written: {page}")
        if options.json:
            options.json.write_bytes(msgspec.json.encode(rows))
    return INTERRUPTED if machine.interrupted else status(rows)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before or after the checks
        sys.exit(INTERRUPTED)
