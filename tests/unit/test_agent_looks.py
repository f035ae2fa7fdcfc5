"""Decisions by time-out on a node that stood still: time without a look proves nothing."""

import queue
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest

from device_plugin import health, modes
from device_plugin.cards import Cards
from device_plugin.cri import Facts
from device_plugin.enforcement import Enforcement
from device_plugin.health import Health
from device_plugin.looks import LOOK_SECONDS, Looks
from device_plugin.overdue_loans import OVERDUE_SECONDS, Debts
from device_plugin.sandbox import Entry
from device_plugin.vitals import Vitals
from vgpu.devices import Gpu, Inventory
from vgpu.tier import GRAIN


def test_a_look_stands_for_little() -> None:
    looks = Looks()
    assert [looks.at(now) for now in (100.0, 101.0, 4000.0, 4000.5, 3000.0)] == [
        0, 1, 1 + LOOK_SECONDS, 1.5 + LOOK_SECONDS, 1.5 + LOOK_SECONDS,
    ]  # fmt: skip


def test_nobody_is_overdue_for_a_time_in_which_the_node_stood_still(tmp_path: Any) -> None:
    looks, debts, owed = Looks(), Debts(), {(Entry("uid", "main", tmp_path), "x"): 9 * GRAIN}
    assert debts.once(owed, looks.at(0)) == []
    assert debts.once(owed, looks.at(100 * OVERDUE_SECONDS)) == []
    now = 100 * OVERDUE_SECONDS
    found = []
    for _ in range(int(OVERDUE_SECONDS) + 2):
        now += 1
        found += debts.once(owed, looks.at(now))
    assert len(found) == 1


def test_no_card_hangs_for_a_time_in_which_the_agent_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by an hour during a question."""
    cards = Cards(Inventory(devices=(Gpu(uuid="a", index=0, model="T4", memory=1),)))
    asked, answer, jump, looked = threading.Event(), threading.Event(), [0.0], queue.SimpleQueue[float]()
    real = time.monotonic

    def read(_: str) -> Vitals:
        asked.set()
        answer.wait(60)
        return Vitals()

    def at(self: Looks, now: float) -> float:
        found = plain(self, now)
        looked.put(found)
        return found

    plain = Looks.at
    monkeypatch.setattr(Looks, "at", at)
    monkeypatch.setattr(health, "_WAIT_MS", 1)
    monkeypatch.setattr(health, "session", nullcontext)
    monkeypatch.setattr(health.vitals, "read", read)
    monkeypatch.setattr(Health, "_register", lambda _: None)
    monkeypatch.setattr(health.time, "monotonic", lambda: real() + jump[0])
    part = Health(cards, lambda *_: None, ignored=(), recovery_seconds=0, count=lambda *_: None, census=Inventory)
    part.start()
    try:
        assert asked.wait(60)
        before = looked.get(timeout=60)
        jump[0] = 3600.0
        while looked.get(timeout=60) < before + LOOK_SECONDS:
            pass
        for _ in range(3):
            looked.get(timeout=60)
        assert not cards.sick()
    finally:
        answer.set()
        part.stop()


class Runtime:
    facts_now: Facts | None = Facts("containerd", "2.1.0")
    socket: Any = "there"

    def facts(self) -> Facts | None:
        return self.facts_now


def test_a_runtime_that_does_not_answer_now_is_as_it_was(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime's settings decide how cards reach containers: a busy runtime does not change that."""
    runtime = Runtime()
    part = Enforcement("auto", runtime, tmp_path, tmp_path, None, "n", tell=UNUSED, show=UNUSED)  # type: ignore[arg-type]
    monkeypatch.setattr(Enforcement, "_read_node", lambda _: None)
    seen: list[Facts] = []
    choose = modes.choose
    monkeypatch.setattr(modes, "choose", lambda *given: seen.append(given[1].runtime) or choose(*given))
    for facts, socket in ((runtime.facts_now, "there"), (None, "there"), (None, None)):
        runtime.facts_now, runtime.socket = facts, socket
        part._look()
    assert [one.version for one in seen] == ["2.1.0", "2.1.0", ""]


def UNUSED(*_: Any) -> None:
    raise AssertionError
