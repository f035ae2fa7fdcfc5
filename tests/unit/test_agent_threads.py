"""The agent's threads survive unexpected errors, and log them."""

import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from device_plugin import health, publish, sweep
from device_plugin.cards import Cards
from device_plugin.health import Health
from device_plugin.publish import Publisher
from device_plugin.sweep import Sweep
from device_plugin.vitals import Vitals
from vgpu import names
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory

UNUSED = cast(Any, None)


def failing(stop: Callable[[], None], turns: list[str]) -> Callable[..., None]:
    """Fails at its first turn and ends the loop at its second."""

    def turn(**_: object) -> None:
        turns.append("turn")
        if len(turns) == 1:
            raise RuntimeError("nobody expected this")
        stop()

    return turn


def a_sweep() -> Sweep:
    return Sweep(*[UNUSED] * 6, places=UNUSED, current=UNUSED, watch=UNUSED, lending=UNUSED)


def a_publisher() -> Publisher:
    cards = Cards(Inventory())
    found = Publisher(
        UNUSED, "n", Config(), cards, dict, suspect=UNUSED, gone=UNUSED, heal=lambda _: None, unbacked=UNUSED
    )
    found._informer.stop = lambda: None  # type: ignore[method-assign]  # it was not started
    return found


def a_health() -> Health:
    return Health(Cards(Inventory()), UNUSED, ignored=(), recovery_seconds=0, count=UNUSED, census=Inventory)


@pytest.mark.parametrize(
    ("make", "turn"),
    [(a_sweep, "once"), (a_publisher, "_assert"), (a_health, "_watch")],
    ids=["sweep", "publish", "health"],
)
def test_a_thread_goes_on_after_an_exception_that_nobody_expected(
    make: Callable[[], Any], turn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sweep, "PERIOD_SECONDS", 0.001)
    monkeypatch.setattr(publish, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(health, "_WAIT_MS", 1)
    monkeypatch.setattr(health, "session", nullcontext)
    part, turns = make(), list[str]()
    monkeypatch.setattr(part, turn, failing(part.stop, turns))
    part._run()
    assert len(turns) == 2
    assert "nobody expected this" in caplog.text


def test_a_card_about_which_the_driver_hangs_is_out_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu(uuid=uuid, index=index, model="T4", memory=1000) for index, uuid in enumerate("ab"))
    cards, release, told = Cards(Inventory(devices=gpus)), threading.Event(), queue.SimpleQueue[str]()

    def read(uuid: str) -> Vitals:
        if uuid == "a":
            release.wait(60)
        return Vitals()

    monkeypatch.setattr(health, "_WAIT_MS", 1)
    monkeypatch.setattr(health, "session", nullcontext)
    monkeypatch.setattr(health.vitals, "read", read)
    monkeypatch.setattr(Health, "_register", lambda _: None)
    asking = Health._asking
    monkeypatch.setattr(Health, "_asking", lambda self, uuid="", **_: asking(self, uuid, -1 if uuid == "a" else 1000))
    part = Health(
        cards, lambda *said: told.put(said[0]), ignored=(), recovery_seconds=1e-9, count=UNUSED, census=Inventory
    )
    part.start()
    try:
        assert told.get(timeout=60) == names.CONDITION_UNHEALTHY
        assert cards.sick() == {"a": "the driver hangs while the agent queries the card"}
        release.set()
        assert told.get(timeout=60) == names.EVENT_HEALTHY
    finally:
        release.set()
        part.stop()
