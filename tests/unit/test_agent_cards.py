"""What is reported about cards, and how often."""

import logging

import msgspec
import pytest

from device_plugin.cards import ABSENT, Cards
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


A, B = CARDS
ILL = msgspec.structs.replace(B, healthy=False, trouble="XID 79")


def shown(cards: Cards) -> list[tuple[str, bool, str]]:
    return [(gpu.uuid, gpu.healthy, gpu.trouble) for gpu in cards.inventory.devices]


@pytest.mark.parametrize(("before", "trouble"), [(B, ABSENT), (ILL, "XID 79")])
def test_a_published_card_that_does_not_answer_is_shown_until_it_does(before: Gpu, trouble: str) -> None:
    cards = Cards(Inventory(devices=(A,), silent=(1,)))
    assert not cards.complete
    assert cards.recall(Inventory(devices=(A, before))) == []
    assert shown(cards) == [("a", True, ""), ("b", False, trouble)]
    assert cards.absent == {"b": before.trouble}
    (again,) = (gpu for gpu in cards.inventory.devices if not gpu.healthy)
    following = Cards(Inventory(devices=(A,), silent=(1,)))  # the next agent
    following.recall(Inventory(devices=(A, again)))
    assert shown(following) == shown(cards)
    assert following.absent == cards.absent
    assert cards.found(Inventory(devices=(A,), silent=(1,))) == []
    assert cards.found(Inventory(devices=CARDS)) == [B]
    assert shown(cards) == [("a", True, ""), ("b", True, "")]
    assert cards.complete
    assert not cards.absent


def test_who_repairs_an_absent_card_takes_its_trouble_away() -> None:
    cards = Cards(Inventory(silent=(0, 1)))
    cards.recall(Inventory(devices=(A, ILL)))
    assert not cards.heal("b")
    assert shown(cards) == [("a", False, ABSENT), ("b", False, ABSENT)]


def test_a_card_that_was_taken_out_or_partitioned_is_not_waited_for() -> None:
    taken_out = Cards(Inventory(devices=(A,)))
    assert taken_out.recall(Inventory(devices=CARDS)) == [B]
    assert shown(taken_out) == [("a", True, "")]
    partitioned = Cards(Inventory(devices=(A,), mig=("b",), silent=(1,)))
    assert partitioned.recall(Inventory(devices=CARDS)) == []
    assert not partitioned.absent
    other = msgspec.structs.replace(B, uuid="c")
    replaced = Cards(Inventory(devices=(A,), silent=(1,)))
    replaced.recall(Inventory(devices=CARDS))
    assert replaced.found(Inventory(devices=(A, other))) == [other]
    assert [uuid for uuid, _, _ in shown(replaced)] == ["a", "c"]


def test_a_card_that_falls_silent_while_another_comes_is_not_forgotten(cards: Cards, told: list[str]) -> None:
    new = Gpu(uuid="c", index=2, model="T4", memory=1000)
    assert cards.found(Inventory(devices=(A, new), silent=(1,))) == [new]
    assert [uuid for uuid, _, _ in shown(cards)] == ["a", "b", "c"]
    assert told == ["change"]
    assert cards.found(Inventory(devices=(A, new), silent=(1,))) == []
    assert not cards.complete


def test_what_others_have_of_a_card_is_told_in_steps_and_at_once_only_when_they_come_or_go() -> None:
    cards = Cards(Inventory(devices=(Gpu(uuid="a", index=0, model="T4", memory=15000),)))
    told: list[int] = []
    cards.listen(lambda: told.append(cards.inventory.devices[0].others))
    for used in ({"a": 1}, {"a": 256 << 20}, {"a": (256 << 20) + 1}, {}):
        cards.used_by_others(used)
    assert told == [256, 0]
    cards.used_by_others({"a": 0})  # the driver does not say how much
    assert (cards.inventory.devices[0].foreign, cards.inventory.devices[0].others) == (True, 0)
