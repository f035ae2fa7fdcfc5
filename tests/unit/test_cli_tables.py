"""The tables of `vgpu ps` and `vgpu top`."""

import io
import json

import msgspec
import pytest
from rich.console import Console, RenderableType

from vgpu.workstation import table
from vgpu.workstation.cards import CardReading
from vgpu.workstation.table import Moment, RunFigures, SliceFigures

MIB = 1 << 20
SECOND = 10**9


def piece(uuid: str = "GPU-a", index: int = 0, gpu_ns: int = 0, cores: int = 30) -> SliceFigures:
    return SliceFigures(uuid, index, "Tesla T4", 3000 * MIB, 2048 * MIB, 512 * MIB, cores, gpu_ns)


def run(*slices: SliceFigures) -> RunFigures:
    return RunFigures("4d7831", 4711, ("python", "train it.py"), 1000.0, True, 1, slices)


def card(busy_ns: int | None = None, utilization: float | None = None) -> CardReading:
    return CardReading("GPU-a", 0, "Tesla T4", 15360 * MIB, 2148 * MIB, True, utilization, busy_ns)


def text(thing: RenderableType) -> list[list[str]]:
    """Lines, each split where at least two spaces part it."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(thing)
    lines = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_ps_has_one_line_per_slice() -> None:
    found = text(table.runs_table([run(piece(), piece("GPU-b", 1, cores=0))], 1190.0))
    assert found == [
        ["ID", "PID", "CARD", "MODEL", "LIMIT", "USED", "HOST", "CORES", "SINCE", "COMMAND"],
        [
            "4d7831",
            "4711",
            "0 (simulated)",
            "Tesla T4",
            "3000 MiB",
            "2048 MiB",
            "512 MiB",
            "30 %",
            "3m10s",
            "python 'train it.py'",
        ],
        ["1 (simulated)", "Tesla T4", "3000 MiB", "2048 MiB", "512 MiB", "-"],
    ]


def test_a_command_of_several_lines_takes_one() -> None:
    several = msgspec.structs.replace(run(piece()), command=("sh", "-c", "echo a\n\techo ü"))
    lines = text(table.runs_table([several], 1190.0))
    assert len(lines) == 2
    assert lines[1][-1] == "sh -c 'echo a\\n\\techo ü'"


def test_ps_as_json() -> None:
    (found,) = json.loads(table.as_json([run(piece())]))
    assert found["command"] == ["python", "train it.py"]
    assert found["slices"][0]["memory_limit_bytes"] == 3000 * MIB
    assert json.loads(table.as_json([])) == []


def test_top_measures_between_two_moments() -> None:
    before = Moment(10.0, (card(busy_ns=0),), (run(piece(gpu_ns=5 * SECOND)),))
    after = Moment(12.0, (card(busy_ns=SECOND),), (run(piece(gpu_ns=5 * SECOND + 600_000_000)),))
    found = text(table.frame(before, after))
    assert found[1] == ["0 (simulated)", "Tesla T4", "2148 MiB", "3000 MiB", "15360 MiB", "50.0 %", "1", "0 MiB"]
    assert found[3][:8] == ["4d7831", "4711", "0 (simulated)", "2048 MiB", "512 MiB", "3000 MiB", "30 %", "30.0 %"]


def test_top_takes_the_drivers_utilisation_where_the_card_has_no_counter() -> None:
    found = text(table.frame(Moment(1.0, (), ()), Moment(2.0, (card(utilization=0.25),), ())))
    assert found[1][5:] == ["25.0 %", "0", "0 MiB"]
    assert found[2] == ["no slices in use"]


def test_top_tells_what_processes_outside_of_slices_have() -> None:
    used = msgspec.structs.replace(card(utilization=0.0), users={4711: 2048 * MIB, 4712: 100 * MIB, 99: 300 * MIB})
    after = Moment(2.0, (used,), (run(piece()),), frozenset({4711, 4712}))
    assert text(table.frame(after, after))[1][-1] == "300 MiB"


def test_top_does_not_guess_what_it_has_not_seen_before() -> None:
    after = Moment(2.0, (card(busy_ns=SECOND),), (run(piece(gpu_ns=SECOND)),))
    found = text(table.frame(Moment(1.0, (), ()), after))
    assert found[1][5] == found[3][7] == "-"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(-1, "0s"), (42.9, "42s"), (190, "3m10s"), (5 * 3600 + 120, "5h02m"), (2 * 86400 + 3 * 3600, "2d03h")],
)
def test_ages(seconds: float, expected: str) -> None:
    assert table.age(seconds) == expected
