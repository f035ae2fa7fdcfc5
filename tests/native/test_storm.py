"""Short forms of the storms that `make storm` plays in full: kill -9, starts at once, requests in lock-step."""

import sys
from pathlib import Path

import pytest

STORMS = Path(__file__).resolve().parents[2] / "libvgpu/tests/storm"
sys.path.insert(0, str(STORMS))
try:
    from programs import compiled, run
finally:
    sys.path.pop(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storm")


def test_after_many_kills_the_charges_are_what_the_card_holds(folder: Path) -> None:
    code, figures, complaints = run(compiled("kills", folder), 100, 8, 7)
    assert (code, complaints) == (0, "")
    assert figures["charged"] == figures["held"] > 0
    assert figures["samples"] == 200
    assert figures["refused"] > 0


@pytest.mark.parametrize("containers", [1, 5])
def test_processes_that_start_at_once_all_start(folder: Path, containers: int) -> None:
    code, figures, complaints = run(compiled("starts", folder), 40, containers)
    assert (code, complaints, figures["failed"]) == (0, "", 0)


def test_of_two_that_ask_at_once_one_gets_its_memory(folder: Path) -> None:
    code, figures, complaints = run(compiled("lockstep", folder), 200)
    assert (code, complaints) == (0, "")
    assert (figures["none"], figures["one"], figures["both"]) == (0, 200, 0)


def test_without_the_library_both_get_it(folder: Path) -> None:
    code, figures, _ = run(compiled("lockstep", folder), 20, preload=False)
    assert (code, figures["both"]) == (1, 20)
