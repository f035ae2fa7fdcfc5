"""`make gpu-check`: which row meets its bar, and the whole command on a simulated card."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from preloaded import HERE, environment, run

GPU = HERE.parents[1] / "benchmarks/gpu"
sys.path.insert(0, str(GPU))
from checks import contexts, core, frameworks, hooks, memory, pairs, rows  # noqa: E402  (found by the line above)
from checks.children import Broken, Child  # noqa: E402

MIB = 1 << 20
LIMIT = 1000 * MIB


def full(**changes: object) -> memory.Full:
    """A slice of LIMIT that was filled to the byte, with some changed fields."""
    told = {"cuMemGetInfo": (LIMIT, LIMIT, 0), "NVML v1": (LIMIT, LIMIT, 0)}
    whole = memory.Full(LIMIT, 200 * MIB, 1, told, 800 * MIB, 1, 2, 7, 4)
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"status": 801}, False),  # something else than the limit ended it
        ({"refused": 0}, False),  # the driver refused
        ({"told": {"NVML v1": (LIMIT, LIMIT - 1, 1)}}, False),
        ({"told": {"cuMemGetInfo": (LIMIT + 1, LIMIT, 1)}}, False),
        ({"used": LIMIT - 1, "told": {"cuMemGetInfo": (LIMIT, LIMIT - 1, 1)}}, False),
        ({"used": LIMIT - 1, "told": {"cuMemGetInfo": (LIMIT, LIMIT - 1, 1)}, "unit": 2}, True),
        ({"used": LIMIT + 1, "told": {"cuMemGetInfo": (LIMIT, LIMIT + 1, -1)}, "unit": 2}, False),
    ],
)
def test_a_slice_is_full_to_its_routes_last_step_or_missed(changes: dict[str, object], met: bool) -> None:
    assert memory.judged("a route", LIMIT, full(**changes)).met is met


@pytest.mark.parametrize(
    ("seen", "context", "verdict"),
    [
        (LIMIT, 200 * MIB, "met"),
        (LIMIT + memory.ALLOWANCE, 200 * MIB, "met"),
        (LIMIT + memory.ALLOWANCE + 1, 200 * MIB, "missed"),
        (LIMIT + memory.ALLOWANCE + 1, 0, "met"),  # an unknown context is not in the limit
        (None, 200 * MIB, "not run"),
    ],
)
def test_what_a_process_really_holds_is_bounded(seen: int | None, context: int, verdict: str) -> None:
    assert memory.observed("a route", LIMIT, full(), seen, "process", context).verdict == verdict


def test_what_is_freed_leaves_the_context_alone() -> None:
    assert memory.emptied("a route", {"used": 5, "context": 5}).met
    assert not memory.emptied("a route", {"used": 6, "context": 5}).met


def test_exactly_one_of_two_must_win_every_time() -> None:
    assert pairs.one_winner(LIMIT, [(1, 1)] * 3).met
    for trial in ((2, 0), (0, 2), (1, 0)):
        assert not pairs.one_winner(LIMIT, [(1, 1), trial]).met
    assert not pairs.one_winner(LIMIT, []).met


def test_a_dead_holders_memory_must_come_back_in_time() -> None:
    answer = {"took": 0, "refused": 2, "status": 0, "ms": 1.5, "before": 9, "after": 8}
    assert pairs.given_back(answer).met
    for change in ({"ms": 101.0}, {"status": 2}, {"refused": 0}, {"took": 2}):
        assert not pairs.given_back(answer | change).met


def test_nvidia_smi_must_show_the_slice_and_nobody_else() -> None:
    assert pairs.smi_total(1000, ["1000"]).met
    assert not pairs.smi_total(1000, ["15360"]).met
    assert not pairs.smi_total(1000, ["1000", "15360"]).met
    assert pairs.smi_pids([5, 6], ["6"]).met
    assert pairs.smi_pids([5, 6], []).met
    assert not pairs.smi_pids([5, 6], ["6", "7"]).met


def test_shares_count_launches_with_what_they_take_in_a_row() -> None:
    whole = core.Share(length_ms=0.1, single_ms=0.11, each_ms=0.104, launches=9600, seconds=1)
    share = core.Share(length_ms=0.1, single_ms=0.2, each_ms=0.2, launches=2885, seconds=1)
    row = core.judged("one", 30, share, whole, None)
    assert (row.got, row.met) == ("30.00 %", True)
    assert core.judged("one", 28, share, whole, None).verdict == "missed"
    assert core.judged("one", 32, share, whole, 99.0).verdict == "missed"
    assert core.unlimited("one", whole, None).met
    lazy = msgspec.structs.replace(whole, launches=3000)  # the host launches too slowly to fill the card
    unjudged = core.judged("one", 30, share, lazy, None)
    assert (unjudged.verdict, unjudged.bar) == ("", "")
    assert unjudged.remark.startswith("not judged: without a limit the program fills 31 % of the card")
    assert core.judged("one", 20, share, lazy, None).verdict == "missed"
    assert not core.unlimited("one", msgspec.structs.replace(whole, each_ms=0.01), None).met


def test_frameworks_must_see_fill_and_survive_their_limit() -> None:
    answer = {
        "total": LIMIT, "free": 700 * MIB, "got": 690 * MIB, "kind": "OutOfMemoryError", "right": True, "again": True,
        "version": "1",
    }  # fmt: skip
    assert frameworks.judged("one", LIMIT, answer).met
    for change in ({"total": LIMIT + 1}, {"got": 600 * MIB}, {"got": LIMIT + 1}, {"right": False}, {"again": False}):
        assert not frameworks.judged("one", LIMIT, answer | change).met
    assert frameworks.shared({"rate": 100.0, "version": "1"}, {"rate": 50.5, "version": "1"}).met
    assert not frameworks.shared({"rate": 100.0, "version": "1"}, {"rate": 55.0, "version": "1"}).met


def call(ns: float, bar: int = 20, moving: int = 50) -> hooks.Call:
    return hooks.Call(ns, bar, moving)


def test_calls_may_cost_some_nanoseconds_or_a_part_of_themselves() -> None:
    (fast,) = hooks.judged("limit", {"cuMemGetInfo": call(50)}, {"cuMemGetInfo": call(75)})
    (slow,) = hooks.judged("limit", {"cuMemGetInfo": call(1000)}, {"cuMemGetInfo": call(1025)})
    assert (fast.verdict, slow.verdict) == ("missed", "met")
    (moves,) = hooks.judged(hooks.MOVES, {"cuMemGetInfo": call(50)}, {"cuMemGetInfo": call(75)})
    assert (moves.verdict, moves.bar) == ("met", "<= +50 ns")


def test_the_program_of_the_bench_tells_each_call_with_its_bars() -> None:
    """There is one source: a call cannot be without a bar, because the program would not compile."""
    assert hooks.read("a call\t12.5\t20\t50\n...again\t3.0\t2\t2\n") == {
        "a call": call(12.5),
        "...again": call(3, 2, 2),
    }
    with pytest.raises(ValueError):
        hooks.read("a call 12.5")


def test_the_status_is_that_of_the_rows_with_a_bar() -> None:
    met, told = rows.exact("a", "b", 1, 1), rows.Row("a", "b")
    assert rows.status([met, told, rows.not_run("a", "b", "why")]) == 0
    assert rows.status([met, rows.exact("a", "b", 1, 2)]) == 1
    assert rows.status([met, rows.broken("a", "b", "why")]) == 1
    assert rows.status([told]) == 1


def test_a_time_of_a_simulated_card_misses_nothing() -> None:
    late = rows.Row("a", "b", met=False, timed=True)
    assert (late.verdict, rows.status([late])) == ("missed", 1)
    simulated = msgspec.structs.replace(late, simulated=True)
    assert (simulated.verdict, rows.status([simulated])) == ("off", 0)
    wrong = msgspec.structs.replace(rows.exact("a", "b", 1, 2), simulated=True)
    assert (wrong.verdict, rows.status([simulated, wrong])) == ("missed", 1)


def test_the_table_reads_at_a_hundred_columns() -> None:
    long = rows.Row("core limit", "w" * 90, "a b " * 20, "g" * 50, "+1", "±1 point", False, "because " * 40)
    lines = rows.printed([rows.exact("memory limit", "cuMemAlloc", 1, 1), long], " (simulated)")
    assert max(map(len, lines)) <= 100
    titles = [index for index, line in enumerate(lines) if line.endswith("(simulated)")]
    assert [lines[index - 1] for index in titles] == ["", ""]
    assert lines.count("") == len(titles)  # nothing is blank but the line before each family
    assert next(line for line in lines if line.startswith("missed ")).split()[-2:] == ["±1", "point"]
    assert " ".join(lines).count("because") == 40


def test_a_page_of_a_simulated_card_says_so_everywhere() -> None:
    two = [rows.exact("memory", "a | b", 1, 2), rows.not_run("processes", "c", "why")]
    text = rows.markdown("T4", [("date", "today")], two, True)
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert all(title.endswith("(simulated)") for title in titles)
    assert (len(titles), text.count("**missed**"), "a \\| b" in text) == (3, 1, True)
    assert "simulated" not in rows.markdown("T4", [("date", "today")], two, False).lower()


def test_programs_go_with_all_that_they_started() -> None:
    script = 'sleep 300 & echo "{\\"pid\\": $!}"; wait'
    with Child(["sh", "-c", script], os.environ, 20) as child:
        started = child.answer()["pid"]
        assert runs(started)
    deadline = time.monotonic() + 20
    while runs(started):
        assert time.monotonic() < deadline, "what it started is still there"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie; in a container, zombies may stay."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_is_silent_or_fails_is_told_of() -> None:
    with Child(["sleep", "300"], os.environ, 0.05) as child, pytest.raises(Broken, match="did not answer"):
        child.answer()
    with Child(["sh", "-c", "echo why >&2; exit 3"], os.environ, 20) as child, pytest.raises(Broken, match="3: why"):
        child.answer()


@pytest.mark.parametrize("launcher", [(), core.launcher()], ids=["by Python", "by launch.c"])
def test_a_kernel_program_tells_its_share(tmp_path: Path, launcher: tuple[Path, ...]) -> None:
    """Only the simulator reads its PTX here; the length comes from the name."""
    command = [sys.executable, GPU / "programs/share.py", "2ms", "0.05", "0.3", *launcher]
    env = environment(tmp_path, preload=False)
    done = subprocess.run(command, env=env, input="\n\n", capture_output=True, text=True, timeout=60, check=True)
    share = msgspec.convert(
        {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}, core.Share
    )
    assert share.length_ms == 2
    assert share.each_ms > 1.99  # by the simulated card's own clock; a busy machine only adds to it
    assert 0 < share.of(share.length_ms) < 100.5


def check(tmp_path: Path, *options: str, code: int = 0) -> tuple[list[rows.Row], str]:
    """The command on a simulated card: the rows it wrote and what it printed."""
    file = tmp_path / "rows.json"
    command = [sys.executable, GPU / "check.py", "--simulate", "T4", "--quick", "--json", file, *options]
    env = environment(tmp_path, preload=False)
    for name in ("LD_LIBRARY_PATH", "VGPU_SIMULATE", "VGPU_SIM_DIR", "PYTHONPATH"):
        del env[name]
    done = run(command, env, code=code)
    return msgspec.json.decode(file.read_bytes(), type=list[rows.Row]), done.stdout


def test_the_command_fills_a_simulated_slice(tmp_path: Path) -> None:
    found, printed = check(tmp_path, "--only", "cuMemAllocPitch", "--docs", str(tmp_path))
    assert [row.verdict for row in found] == ["met"] * 3
    (page,) = tmp_path.glob("*.md")
    assert page.name.startswith("simulated-")
    assert any(line.startswith("vgpu on ") and "(simulated)" in line for line in printed.splitlines())
    table = printed[printed.index("\nvgpu on ") :].splitlines()
    assert max(len(line) for line in table if not line.startswith("written: ")) <= 100
    assert printed.count("\nmet ") == 3
    assert page.read_text().count("| met | cuMemAllocPitch |") == 1


def test_the_command_tries_two_processes(tmp_path: Path) -> None:
    found, _ = check(tmp_path, "--only", pairs.BOTH)
    assert [row.verdict for row in found] in (["met", "met"], ["met", "missed"])  # the second one is a time
    assert found[0].got == "exactly one in 10 of 10 trials"
    assert found[1].got.startswith("as much for another")


def test_the_command_tries_the_cuda_runtime(tmp_path: Path) -> None:
    """Its context is charged, and a reset gives all of it back."""
    found, _ = check(tmp_path, "--only", contexts.RUNTIME)
    assert [row.verdict for row in found] == ["met", "met", "met"]


def test_what_does_not_fit_into_the_time_is_not_run(tmp_path: Path) -> None:
    found, printed = check(tmp_path, "--seconds", "1", code=1)
    assert {row.verdict for row in found} == {"not run"}
    assert "no time left" in printed


def test_without_a_driver_it_says_so_in_one_line(tmp_path: Path) -> None:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    env = {name: value for name, value in environment(tmp_path, preload=False).items() if name != "LD_LIBRARY_PATH"}
    done = run([sys.executable, GPU / "check.py"], env, code=2)
    assert not done.stdout
    assert done.stderr.startswith("gpu-check: no NVIDIA driver")
    assert done.stderr.count("\n") == 1
