"""How the agent asks a driver that does not answer, or answers in another way than before."""

import logging
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from device_plugin import discovery, health
from device_plugin.cards import Cards
from device_plugin.discovery import STALE_LOOKS, STALE_LOOKS_AT_START, Census
from device_plugin.driver import Place
from device_plugin.health import Health
from device_plugin.pod_events import Consequences
from device_plugin.sandbox import Sandboxes
from device_plugin.selinux import Labels
from vgpu import contexts, inventory, names
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory
from vgpu.inventory import InventoryError, StaleLibrary
from vgpu.kube import writes

STALE, AWAY = StaleLibrary("version mismatch"), InventoryError("unknown error")


def looks(monkeypatch: pytest.MonkeyPatch, *answers: Inventory | InventoryError) -> list[int]:
    """The numbers of the looks after which the agent ends itself."""
    ends, number = list[int](), 0
    waiting = list(answers)

    def read(**_: object) -> Inventory:
        answer = waiting.pop(0)
        if isinstance(answer, InventoryError):
            raise answer
        return answer

    monkeypatch.setattr(inventory, "read", read)
    monkeypatch.setattr(discovery.driver, "load_nvml", lambda _: None)
    made = Census(Config(), Path(), Place(), end=lambda: ends.append(number))
    for number in range(1, len(answers) + 1):  # noqa: B007 told by `end`
        with suppress(InventoryError):
            made.take()
    return ends


def test_a_process_whose_library_is_of_another_driver_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STALE_LOOKS == 2
    assert looks(monkeypatch, Inventory(), STALE, STALE) == [3]
    assert looks(monkeypatch, Inventory(), STALE, AWAY, STALE, Inventory(), STALE) == []


def test_a_machine_that_waits_for_its_next_boot_does_not_end_each_agent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert looks(monkeypatch, *[STALE] * STALE_LOOKS_AT_START) == [STALE_LOOKS_AT_START]


def test_a_card_that_stays_away_is_looked_for_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [1000.0], list[float]()
    monkeypatch.setattr(health.time, "monotonic", lambda: clock[0])
    here = Gpu(uuid="a", index=0, model="T4", memory=1)

    def take() -> Inventory:
        asked.append(clock[0])
        return Inventory(devices=(here,), silent=(1,))

    cards = Cards(Inventory(devices=(here,), silent=(1,)))
    watched = Health(cards, lambda *_: None, ignored=(), recovery_seconds=0, count=lambda *_: None, census=take)

    def hour() -> int:
        before = len(asked)
        for _ in range(3600):
            clock[0] += 1
            if watched._due():
                watched._look()
        return len(asked) - before

    assert hour() == 10 + (3600 - 1 - 9 * 30) // 300
    watched.heal(["a"])  # somebody says that something is repaired
    assert hour() == 10 + (3600 - 1 - 9 * 30) // 300


def test_a_process_that_cannot_be_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    children = list[subprocess.Popen[bytes]]()
    kill = subprocess.Popen.kill
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: children.append(child))  # stuck in the kernel
    monkeypatch.setattr(contexts, "LEARN_SECONDS", 0.01)
    monkeypatch.setattr(contexts, "_DEATH_SECONDS", 0.01)
    with caplog.at_level(logging.DEBUG):
        assert contexts._ask(["a"]) == {}
    (child,) = children
    lives = child.poll() is None
    kill(child)
    child.wait(60)
    assert lives


def test_a_folder_that_is_as_it_should_be_is_not_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sandboxes, changed = Sandboxes(tmp_path, Labels(tmp_path)), list[int]()
    chmod = Path.chmod

    def note(path: Path, mode: int) -> None:
        changed.append(mode)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", note)
    sandboxes.entries()
    assert changed == []
    chmod(tmp_path / "containers", 0o755)
    sandboxes.entries()
    assert changed == [0o700]
    assert (tmp_path / "containers").stat().st_mode & 0o777 == 0o700


def test_what_is_dropped_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    away = threading.Event()
    monkeypatch.setattr(writes, "emit_event", lambda *_, **__: away.wait(60))
    consequences = Consequences(cast(Any, None), "n")
    for number in range(1100):
        consequences.node(names.CONDITION_UNHEALTHY, str(number))
    away.set()
    consequences._worker.shutdown(wait=True)
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "dropping" in warned[0]


def test_a_stale_library_is_looked_into_also_where_every_card_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, sessions = list[int](), list[int]()

    def take() -> Inventory:
        asked.append(len(sessions))
        watched.stop()
        raise STALE

    def session() -> object:
        sessions.append(1)
        if len(sessions) == 50:
            watched.stop()
        raise STALE

    monkeypatch.setattr(health, "_WAIT_MS", 1)
    monkeypatch.setattr(health, "session", session)
    cards = Cards(Inventory(devices=(Gpu(uuid="a", index=0, model="T4", memory=1),)))
    watched = Health(cards, lambda *_: None, ignored=(), recovery_seconds=0, count=lambda *_: None, census=take)
    watched._run()
    assert asked == [1]
    assert cards.sick() == {"a": "version mismatch"}
