"""What is told about cards, and how often."""

import logging

import pytest

from device_plugin.cards import Cards
from vgpu.devices import Gpu, Inventory

CARDS = tuple(Gpu(uuid=uuid, index=index, model="T4", memory=1000) for index, uuid in enumerate("ab"))


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cards(told: list[str]) -> Cards:
    found = Cards(Inventory(devices=CARDS))
    found.listen(lambda: told.append("change"))
    return found


def test_a_storm_of_errors_is_one_change_and_its_last_word_is_kept(
    cards: Cards, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    news = [cards.sicken("a", f"XID {48 + turn % 2}") for turn in range(1000)]
    assert news == [True] + [False] * 999
    assert told == ["change"]
    assert cards.inventory.devices[0].trouble == "XID 49"
    assert [record.getMessage() for record in caplog.records] == [
        "card a is unhealthy: XID 48",
        "card a is unhealthy: XID 49",
    ]
    assert cards.heal("a")
    assert cards.sicken("a", "XID 48")
    assert told == ["change"] * 3
    assert len(caplog.records) == 4  # healthy again, and once more the first one
