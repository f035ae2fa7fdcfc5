"""Tables whose figures stay complete, for any length of command and any width of the terminal."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console, RenderableType
from test_cli_tables import card, piece, run

from vgpu.columns import LONGEST, Columns
from vgpu.workstation import table
from vgpu.workstation.table import Moment

ROOT = Path(__file__).parents[2]
LONG = ("python", "-c", "x" * 200)


def lines(thing: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(thing, crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("length", [150, 230, 5000])
@pytest.mark.parametrize("width", [120, 100])
def test_beside_a_long_command_only_the_command_shrinks(length: int, width: int) -> None:
    long = msgspec.structs.replace(run(piece()), command=("python", "-c", "x" * length))
    short = msgspec.structs.replace(run(piece("GPU-b", 1)), command=("nvidia-smi",))
    head, first, second = lines(table.runs_table([long, short], 1190.0), width)
    figures = "4d7831  4711  0 (simulated)  Tesla T4  3000 MiB  2048 MiB  512 MiB   30 %  3m10s  "
    assert first.startswith(figures + "python -c xxx")
    assert first.endswith("x…")
    assert len(first) == width
    assert second == figures.replace("  0 (", "  1 (") + "nvidia-smi"
    assert head.endswith("COMMAND")


def test_top_keeps_its_figures_beside_a_long_command() -> None:
    after = Moment(2.0, (card(utilization=0.25),), (msgspec.structs.replace(run(piece()), command=LONG),))
    found = lines(table.frame(after, after), 90)
    assert found[1].split() == [
        "0",
        "(simulated)",
        "Tesla",
        "T4",
        *["2148", "MiB", "3000", "MiB", "15360", "MiB", "25.0", "%", "1", "0", "MiB"],
    ]
    assert found[4].startswith("4d7831  4711  0 (simulated)  2048 MiB  512 MiB  3000 MiB   30 %     0.0 %  python -")
    assert len(found[4]) == 90


def test_a_long_model_shrinks_after_the_command_and_figures_never_do() -> None:
    wide = msgspec.structs.replace(piece(), model="NVIDIA A100-SXM4-80GB of a very long name")
    (_, line) = lines(table.runs_table([msgspec.structs.replace(run(wide), command=LONG)], 1190.0), 60)
    assert line == "4d7831 4711 0 (simulated) NVIDIA…  3000 MiB 2048 MiB 512 MiB  30 % 3m10s python…"


@pytest.mark.parametrize("width", [80, 40, 7])
def test_a_full_screen_breaks_lines_between_figures(width: int) -> None:
    after = Moment(2.0, (card(utilization=0.25),), (msgspec.structs.replace(run(piece()), command=LONG),))
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True, legacy_windows=False)
    console.set_alt_screen(True)
    console.print(table.frame(after, after))
    assert isinstance(console.file, io.StringIO)
    words = console.file.getvalue().split()
    for figure in ("2148", "15360", "25.0", "3000"):
        assert figure in words
    if width == 80:
        assert (
            "0 (simulated) Tesla T4    2148 MiB  3000 MiB 15360 MiB 25.0 %      1  0 MiB\n" in console.file.getvalue()
        )


def test_characters_of_two_cells_are_counted_as_two() -> None:
    columns = Columns("NAME", ">SIZE", shrinking=("NAME",))
    columns.add("学習学習学習学習", "12 MiB")
    assert lines(columns, 20) == ["NAME            SIZE", "学習学習学…   12 MiB"]


def test_a_cell_has_an_end_in_a_file_too() -> None:
    columns = Columns("COMMAND")
    columns.add("x" * 10 * LONGEST)
    assert len(lines(columns, 10**6)[1]) == LONGEST


def test_what_looks_like_markup_is_text() -> None:
    columns = Columns("COMMAND")
    columns.add("sh -c '[red]x[/]'")
    assert lines(columns, 80)[1] == "sh -c '[red]x[/]'"


def vgpu(*arguments: str, state: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VGPU", "CUDA", "NVIDIA", "LD_", "COLUMNS"))}
    base = {**inherited, "PYTHONPATH": str(ROOT), "VGPU_STATE_DIR": str(state), "VGPU_CONFIG": os.devnull}
    command = [sys.executable, "-m", "vgpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**base, **environ}, timeout=60, check=False)


@pytest.mark.parametrize("environ", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_top_without_a_terminal_prints_one_frame_and_ends(tmp_path: Path, environ: dict[str, str]) -> None:
    done = vgpu("top", state=tmp_path / "state", **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "no slices in use"
    assert "\x1b" not in done.stdout


def test_top_shows_the_simulated_cards_of_vgpu_simulate_and_passes_over_what_it_cannot_read(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert vgpu("probe", state=state, VGPU_SIMULATE="T4").returncode == 0
    assert "0 (simulated)  Tesla T4" in vgpu("top", state=state, VGPU_SIMULATE="T4").stdout
    (state / "simulator" / "T4" / "state").write_text("another version's")
    done = vgpu("top", state=state, VGPU_SIMULATE="T4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "no simulated cards in use" in done.stdout


def test_top_on_a_terminal_without_a_cursor_prints_one_frame_and_ends(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "VGPU_STATE_DIR": str(tmp_path / "state"), "TERM": "dumb"}
    command = [sys.executable, "-m", "vgpu", "top"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    try:
        assert process.wait(timeout=60) == 0
        assert b"no slices in use" in os.read(ours, 65536)
    finally:
        process.kill()
        os.close(ours)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_top_leaves_the_terminal_as_it_was_however_it_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "VGPU_STATE_DIR": str(tmp_path / "state"), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "vgpu", "top"], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    shown = b""
    try:
        while b"no slices in use" not in shown:
            shown += os.read(ours, 65536)
        process.send_signal(number)
        while b"\x1b[?1049l" not in shown:  # the other screen is left
            shown += os.read(ours, 65536)  # OSError: it ended without that
        assert b"\x1b[?25h" in shown  # the cursor is there again
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_the_probe_takes_the_simulated_cards_that_run_would_take(tmp_path: Path) -> None:
    state = tmp_path / "state"
    probed = vgpu("probe", state=state, VGPU_SIMULATE="T4x2")
    assert probed.returncode == 0, probed.stderr
    cards = json.loads(probed.stdout)["cards"]
    ran = vgpu("run", "--gpus", "2", "--", "vgpu-no-such-program", state=state, VGPU_SIMULATE="T4x2")
    assert "no such program" in ran.stderr
    inside = vgpu("run", "--gpus", "2", "--", sys.executable, "-m", "vgpu", "probe", state=state, VGPU_SIMULATE="T4x2")
    assert [one["uuid"] for one in json.loads(inside.stdout)["cards"]] == [one["uuid"] for one in cards]
    assert all(card["cuda_total"] < card["nvml_total"] for card in cards)  # NVML tells all of the board


def test_the_probe_takes_simulated_cards_of_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("simulate: A100-40\n")
    done = vgpu("probe", state=tmp_path / "state", VGPU_CONFIG=str(config))
    assert "A100" in json.loads(done.stdout)["cards"][0]["name"], done.stderr


@pytest.mark.parametrize(("spec", "why"), [("T9", "simulator profile 'T9' is unknown"), ("../T4", "must be PROFILE")])
def test_simulated_cards_that_cannot_be_are_one_sentence(tmp_path: Path, spec: str, why: str) -> None:
    done = vgpu("probe", state=tmp_path / "state", VGPU_SIMULATE=spec)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"vgpu probe: VGPU_SIMULATE is {spec!r}: ")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_and_wrong_options_of_the_probe_need_no_cards(tmp_path: Path) -> None:
    assert vgpu("probe", "--help", state=tmp_path / "state", VGPU_SIMULATE="T9").returncode == 0
    assert "--no-such" in vgpu("probe", "--no-such", state=tmp_path / "state", VGPU_SIMULATE="T9").stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hold", "inf"),
        ("--seconds", "1e400"),
        ("--allocate", "-5"),
        ("--blocks", "0"),
        ("--expect-memory", "1.5"),
        ("--allocate", "99999999"),
        ("--cores", "--kernel", "99999999999999999999ms"),
    ],
)
def test_amounts_that_cannot_be_are_refused_by_the_probe(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = vgpu("probe", *arguments, state=tmp_path / "state", VGPU_SIMULATE="T4")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{arguments[-1]!r} must be " in done.stderr
