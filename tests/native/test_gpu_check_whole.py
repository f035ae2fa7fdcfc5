"""`make gpu-check`, rows of the driver itself: which meets its bar; and the whole command on a simulated card."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from preloaded import environment
from test_gpu_check import GPU, MIB

sys.path.insert(0, str(GPU))
import check as command
from checks import contexts, core, engines, events, memory, rows
from checks.children import Child

TELLS = {"median": 2.0, "least": 1.5}
CLOCK = {
    "pair": TELLS, "record": 0.7, "kernels": {"5us": {"pair": {"median": 8.0, "least": 7.5}, "row": 6.5}},
    "drift": {"clock": 5.0, "events": 5.0001, "unsure": 1e-5},
}  # fmt: skip


def test_events_tell_what_they_cost() -> None:
    pair, kernel, drift = events.clock(CLOCK)
    assert (pair.got, pair.verdict) == ("2.00 us", "")
    assert (kernel.asked, kernel.got, kernel.error) == ("6.50 us in a row", "8.00 us", "+1.50 us")
    assert (drift.error, drift.verdict) == ("+20 ppm", "met")


@pytest.mark.parametrize(
    ("took", "met"),
    [
        ({"clock": 5.0, "events": 5.004, "unsure": 1e-5}, True),
        ({"clock": 5.0, "events": 5.006, "unsure": 1e-5}, False),
        ({"clock": 5.0, "events": 4.994, "unsure": 1e-5}, False),
        ({"clock": 5.0, "events": 5.006, "unsure": 2e-3}, True),  # the host saw it no more exactly than that
    ],
)
def test_the_clock_of_events_is_the_hosts(took: dict[str, float], met: bool) -> None:
    assert events.drift(took).met is met


def test_loading_code_is_no_work_of_the_card() -> None:
    native = {"count": 32, "first": {"sum": 10.0}}
    assert events.charged(native, {"first": {"sum": 19.0}}).met
    assert not events.charged(native, {"first": {"sum": 50.0}}).met  # a fifth of the card for what the host did
    launches = {"call": 0.1, "pair": 0.2, "sum": 9.0}
    told = {"count": 32, "mode": "LAZY", "load": 1.0, "get": 0.01, "first": launches, "second": launches}
    (row,) = events.lazy("LAZY", told)
    assert "cuFuncLoad" not in row.remark  # a driver before 12.4 has none
    (row,) = events.lazy("LAZY", told | {"funcload": 0.05, "after": launches})
    assert "cuFuncLoad 50 us" in row.remark


def share(launches: int) -> core.Share:
    return core.Share(length_ms=2, single_ms=2, each_ms=2, launches=launches, seconds=1)


@pytest.mark.parametrize(("left", "got"), [(500, "not on the SMs"), (420, "partly on the SMs"), (250, "on the SMs")])
def test_a_neighbour_tells_where_fills_run(left: int, got: str) -> None:
    assert engines.native("fill", engines.kept(share(left), share(500)), 1.0).got == got


def test_fills_of_a_small_slice_leave_the_rest() -> None:
    assert engines.limited("copy", 88.0, 1.0).met
    assert not engines.limited("copy", 50.0, 1.0).met


def test_a_context_may_take_what_is_charged() -> None:
    assert contexts.size("one", 500 * MIB, 500 * MIB + memory.ALLOWANCE, "process").met
    assert not contexts.size("one", 500 * MIB, 500 * MIB + memory.ALLOWANCE + 1, "process").met
    assert contexts.size("one", 0, 500 * MIB, "process").verdict == ""
    assert contexts.size("one", 500 * MIB, None, "why").verdict == "not run"


def test_a_reset_card_leaves_nothing_in_the_books() -> None:
    answer = {"what": "cudart", "context": 5, "full": 9, "after": 0, "again": 5}
    assert [row.met for row in contexts.books(5, answer)] == [True, True, True]
    assert [row.met for row in contexts.books(5, answer | {"after": 5})] == [True, False, True]
    assert [row.met for row in contexts.books(5, answer | {"context": 0, "again": 4})] == [False, True, False]
    assert contexts.books(0, answer)[0].verdict == ""


def test_the_books_hold_what_a_program_kept_when_it_executed_itself() -> None:
    assert contexts.replaced(9, 0, "process", 0).verdict == ""
    last = {"used": 2 * MIB, "held": True, "rounds": 4}
    assert contexts.charged(last, 2 * MIB + memory.ALLOWANCE, "process", 1).met
    assert contexts.charged(last | {"held": False}, 1 * MIB, "process", 1).remark.endswith("then it was refused")
    assert not contexts.charged(last, 2 * MIB + memory.ALLOWANCE + 1, "process", 1).met
    assert contexts.charged(last, None, "why", 1).remark == "why"


class Scripted:
    """A machine whose programs are a script of the shell."""

    def __init__(self, script: str) -> None:
        self._script = script

    def native(self, _command: object) -> Child:
        return Child(["sh", "-c", self._script], os.environ, 20)


YES = """echo '{"attribute": true, "node": 0}'; """


@pytest.mark.parametrize(
    ("script", "got"),
    [
        (YES + """echo '{"done": true}'""", "works"),
        (YES + """echo '{"begins": "cuMemMap"}'; kill -SEGV $$""", "breaks in cuMemMap"),
        (YES + """echo '{"failed": "cuMemCreate", "why": "801"}'""", "cuMemCreate: 801"),
        ("exit 3", ""),
    ],
)
def test_a_driver_that_breaks_in_the_hosts_memory_is_a_row(script: str, got: str) -> None:
    (row,) = events.host_numa(Scripted(script))  # type: ignore[arg-type]
    assert (row.got, row.verdict) == (got, "" if got else "not run")


def test_each_check_has_a_name_of_its_own() -> None:
    for scale in (command.Scale(), command.QUICK):
        names = [(check.family, check.what) for check in command.plan("python3", scale)]
        assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_command_ends_well_on_a_simulated_card(tmp_path: Path) -> None:
    """`make gpu-check QUICK=1 SIMULATED=1`: no row breaks or misses its bar, even on a busy machine."""
    file = tmp_path / "rows.json"
    env = environment(tmp_path, preload=False)
    for name in ("LD_LIBRARY_PATH", "VGPU_SIMULATE", "VGPU_SIM_DIR", "PYTHONPATH"):
        del env[name]
    done = subprocess.run(
        [sys.executable, GPU / "check.py", "--simulate", "H100", "--quick", "--json", file],
        env=env, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert file.exists(), done.stdout + done.stderr
    found = msgspec.json.decode(file.read_bytes(), type=list[rows.Row])
    wrong = [row for row in found if row.broke or row.verdict == "missed"]
    assert (wrong, done.returncode) == ([], 0)
    families = {row.family for row in found if row.ran}
    assert families == {check.family for check in command.plan("python3", command.QUICK)} - {"frameworks"}
