"""Two processes in one slice, the death of one, and the output of nvidia-smi there."""

import shutil
import sys
from typing import Any, Final

from .children import Broken
from .machine import PROGRAMS, Machine
from .rows import MIB, Row, broken, mib, not_run

FAMILY: Final = "processes"
TRIALS: Final = 100
EACH_MIB: Final = 600
ROOM_MIB: Final = 1024  #: in addition to the contexts of both
BAR_MS: Final = 100  #: from the end of a process until its memory is available
BOTH: Final = f"two at once, {EACH_MIB} MiB each"
KILLED: Final = "kill -9 of a holder"


def one_winner(limit: int, winners: list[tuple[int, int]]) -> Row:
    """`winners`: for each trial, how many of two processes got their memory, and how many were out of memory."""
    right = sum(1 for got, refused in winners if (got, refused) == (1, 1))
    wrong = len(winners) - right
    asked, got = f"one of two in {mib(limit)}", f"exactly one in {right} of {len(winners)} trials"
    return Row(FAMILY, BOTH, asked, got, str(wrong), "0", wrong == 0 and bool(winners))


def given_back(answer: dict[str, Any]) -> Row:
    """`answer` of `pair.py killed`; its times begin when the kernel reports the end of the process."""
    held = answer["took"] == 0 and answer["refused"] == 2
    right = held and answer["status"] == 0
    met = right and answer["ms"] <= BAR_MS
    got = f"as much for another after {answer['ms']:.1f} ms" if answer["status"] == 0 else "never given back"
    remark = f"charged before {mib(answer['before'])}, with the heir's {mib(answer['after'])}"
    if not held:
        remark = f"the holder was answered {answer['took']}, the other one before its death {answer['refused']}"
    return Row(FAMILY, KILLED, f"{EACH_MIB} MiB held", got, "", f"<= {BAR_MS} ms", met, remark, timed=right)


def smi_total(memory: int, lines: list[str]) -> Row:
    """`memory`: the slice in MiB; `lines`: memory.total of every card that nvidia-smi shows."""
    what = "nvidia-smi: memory of the slice"
    return Row(FAMILY, what, f"{memory} MiB", ", ".join(lines) + " MiB", "", "the same", lines == [str(memory)])


def smi_pids(own: list[int], lines: list[str]) -> Row:
    """nvidia-smi may show only processes of the slice; it shows none where NVML knows the pids of another namespace."""
    strangers = set(lines) - {str(pid) for pid in own} - {""}
    got = f"{len(lines)} shown"
    error = f"{len(strangers)} of others"
    return Row(FAMILY, "nvidia-smi: processes of the slice", "own ones only", got, error, "0", not strangers)


def together(machine: Machine, trials: int = TRIALS) -> list[Row]:
    """Both rows of two processes."""
    why = machine.alone()
    if why:
        return [not_run(FAMILY, BOTH, why), not_run(FAMILY, KILLED, why)]
    memory = ROOM_MIB + 2 * machine.context_mib
    program = PROGRAMS / "pair.py"
    rows = []
    try:
        with machine.limited([sys.executable, program, "both", str(trials), str(EACH_MIB)], memory=memory) as child:
            rows.append(one_winner(memory * MIB, [(got, refused) for got, refused in child.answer()["winners"]]))
    except Broken as error:
        rows.append(broken(FAMILY, BOTH, str(error)))
    try:
        with machine.limited([sys.executable, program, "killed", str(EACH_MIB)], memory=memory) as child:
            rows.append(given_back(child.answer()))
    except Broken as error:
        rows.append(broken(FAMILY, KILLED, str(error)))
    return rows


def nvidia_smi(machine: Machine) -> list[Row]:
    """Both rows of nvidia-smi."""
    what = "nvidia-smi"
    if machine.simulate:
        return [not_run(FAMILY, what, "simulated: it comes with a driver only")]
    if shutil.which(what) is None:
        return [not_run(FAMILY, what, "not on PATH")]
    memory = 1000 + machine.context_mib
    try:
        with machine.limited([sys.executable, PROGRAMS / "pair.py", "seen"], memory=memory) as child:
            answer = child.answer()
    except Broken as error:
        return [broken(FAMILY, what, str(error))]
    return [smi_total(memory, answer["total"]), smi_pids(answer["own"], answer["pids"])]
