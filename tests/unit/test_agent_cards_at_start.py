"""What an agent does on a node whose cards do not answer when it starts."""

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from device_plugin import agent
from device_plugin.agent import Agent, Options
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory
from vgpu.inventory import InventoryError
from vgpu.kube.client import Unreachable

CARDS = tuple(Gpu(uuid=uuid, index=index, model="T4", memory=1000) for index, uuid in enumerate("ab"))
HERE = Path()


class Hanging:
    """Answers at the end."""

    def __init__(self) -> None:
        self.end, self.asked = threading.Event(), 0

    def take(self) -> Inventory:
        self.asked += 1
        assert self.end.wait(60)
        return Inventory(devices=CARDS)


class Census:
    """Answers in turn."""

    def __init__(self, *answers: Inventory | str) -> None:
        self.answers = list(answers)

    def take(self) -> Inventory:
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            raise InventoryError(answer)
        return answer


def begin(
    monkeypatch: pytest.MonkeyPatch, census: Census | Hanging, *published: Inventory | Unreachable
) -> tuple[Inventory, list[str]]:
    """The cards with which the agent begins, and what was missing before each pause."""
    made = Agent(Config(), Options("n", HERE, HERE, HERE, 0, 0), cast(Any, None))
    answers, left, turn = list(published), list[str](), asyncio.sleep

    def before(*_: object) -> Inventory:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    async def pause(seconds: float) -> None:
        left.append(f"{seconds:.0f} s {made._exporter.readiness.left}")
        if isinstance(census, Hanging) and len(left) == 2:
            census.end.set()
        await turn(0)

    monkeypatch.setattr(agent, "published", before)
    monkeypatch.setattr(agent.asyncio, "sleep", pause)
    return asyncio.run(made._cards(cast(Any, census))), left


@pytest.mark.parametrize("nothing", ["no driver", Inventory()])
def test_a_node_that_never_had_cards_waits_and_is_ready(
    monkeypatch: pytest.MonkeyPatch, nothing: Inventory | str
) -> None:
    found, left = begin(monkeypatch, Census(nothing, Inventory(devices=CARDS)), Inventory())
    assert found.devices == CARDS
    assert left == ["30 s "]


def test_what_was_published_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert begin(monkeypatch, Census("version mismatch"), Inventory(devices=CARDS)) == (Inventory(silent=(0, 1)), [])
    partitioned = Inventory(mig=("a",))
    found, _ = begin(monkeypatch, Census(partitioned), Inventory(devices=CARDS))
    assert found == Inventory(mig=("a",), silent=(1,))


def test_without_the_api_server_nobody_knows_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found, left = begin(
        monkeypatch, Census("no driver", "no driver"), Unreachable("no route"), Inventory(devices=CARDS)
    )
    assert found == Inventory(silent=(0, 1))
    assert left == ["2 s the agent has not asked the driver for its cards yet"]


def test_a_driver_that_hangs_keeps_nothing_else_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "CENSUS_SECONDS", 0.01)
    census = Hanging()

    def before(*_: object) -> Inventory:
        census.end.set()  # asked while the driver hangs
        return Inventory(devices=CARDS)

    made = Agent(Config(), Options("n", HERE, HERE, HERE, 0, 0), cast(Any, None))
    monkeypatch.setattr(agent, "published", before)
    assert asyncio.run(made._cards(cast(Any, census))) == Inventory(silent=(0, 1))


def test_a_driver_that_hangs_is_asked_once_and_heard_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "CENSUS_SECONDS", 0.01)
    census = Hanging()
    found, left = begin(monkeypatch, census, Inventory())
    assert found.devices == CARDS
    assert left[:2] == ["30 s "] * 2  # no upgrade waits for it
    assert census.asked == 1
