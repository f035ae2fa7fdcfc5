"""A process with several cards: each launch is charged to the cards on which it runs."""

import subprocess
import time
from pathlib import Path

import pytest
from core_share import within
from preloaded import compiled

from vgpu.native import CardLimit, Limits, Region, simulator

LIMIT, BAR = 20, 21.5
TOLERANCE_NS = 55_000_000
#: manners of libvgpu/tests/clients/escapes.c: the cards that they use
MANNERS = {
    "other-card": {0},
    "graph-on-one": {0},
    "graph-captured": {0, 1},
    "graph-by-hand": {0, 1},
    "cooperative-on-two": {0, 1},
}


def look(folder: Path, region: Region) -> list[int]:
    """ns: busy of both cards, then metered of both."""
    return [card.busy_ns for card in simulator.cards(folder / "cards")] + [card.gpu_ns for card in region.usage().cards]


@pytest.mark.parametrize("manner", MANNERS)
def test_each_card_pays_for_itself(tmp_path: Path, manner: str) -> None:
    simulator.create(tmp_path / "cards", "T4x2")
    (tmp_path / "region").mkdir()
    cards = tuple(CardLimit(card.uuid, None, cores=LIMIT) for card in simulator.cards(tmp_path / "cards"))
    with Region.create(tmp_path / "region", Limits(cards, "fixed")) as region:
        command = [str(compiled("escapes.c", driver=True)), manner, "spin_10ms"]
        process = subprocess.Popen(
            command, env=within(tmp_path, region, cards="T4x2"), stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            time.sleep(1.5)
            before, begun = look(tmp_path, region), time.monotonic_ns()
            time.sleep(3)
            found = [now - then for now, then in zip(look(tmp_path, region), before, strict=True)]
            passed = time.monotonic_ns() - begun
            assert process.poll() is None
        finally:
            process.kill()
            process.communicate()
    for card in (0, 1):
        busy, metered = found[card], found[card + 2]
        assert (busy > 0) == (card in MANNERS[manner])
        assert busy / passed * 100 < BAR
        slack = busy * 0.02 + (TOLERANCE_NS if busy else 0)
        # a graph is measured as a whole: each of its cards pays for the time in which any of its nodes ran
        most = 2 * busy if manner in {"graph-captured", "graph-by-hand"} else busy
        assert busy - slack <= metered <= most + slack
    assert found[0] / passed * 100 > LIMIT / 4
