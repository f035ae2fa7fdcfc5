"""The agent's threads outlive what nobody expected, and say it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest

from device_plugin import health, publish, sweep
from device_plugin.cards import Cards
from device_plugin.health import Health
from device_plugin.publish import Publisher
from device_plugin.sweep import Sweep
from vgpu.config import Config
from vgpu.devices import Inventory

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
    return Sweep(*[UNUSED] * 6, places=UNUSED, current=UNUSED, watch=UNUSED)


def a_publisher() -> Publisher:
    cards = Cards(Inventory())
    found = Publisher(UNUSED, "n", Config(), cards, dict, suspect=UNUSED, gone=UNUSED, heal=lambda _: None)
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
