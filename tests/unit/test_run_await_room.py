"""A command of `vgpu run` waits as long as lent room of its own cards is being given back."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from vgpu.devices import Gpu, GpuSlice
from vgpu.errors import UserError
from vgpu.workstation import run
from vgpu.workstation.slices import Claim, Run, SliceStore

CARD = Gpu("GPU-0", 0, "T4", 15000)
CLAIM = Claim(Run("1", 1, 1, 0.0, ("x",), (GpuSlice(CARD.uuid, 5000),), (CARD,)), Path(), -1)


class Store:
    """A store without other commands."""

    def locked(self) -> Any:
        return nullcontext()

    def sweep(self) -> list[Run]:
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, in one element; waiting advances it."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("vgpu.workstation.run.time.monotonic", lambda: now[0])
    monkeypatch.setattr("vgpu.workstation.run.time.sleep", sleep)
    return now


def wait(monkeypatch: pytest.MonkeyPatch, owed: Callable[[], dict[str, int]]) -> None:
    monkeypatch.setattr(
        "vgpu.workstation.lending.settle", lambda *_: {uuid: size << 20 for uuid, size in owed().items()}
    )
    run.await_room(cast(SliceStore, Store()), CLAIM)


def test_what_another_card_is_owed_does_not_count(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A debt of another card does not count: neither when it grows while the own card's debt falls, nor when it falls
    alone.
    """
    until = 3 * run.BACK_SECONDS
    wait(monkeypatch, lambda: {CARD.uuid: max(0, int(until - clock[0])), "GPU-1": int(9 * clock[0])})
    assert clock[0] > until - 1
    with pytest.raises(UserError, match="still have 3000 MiB of card 0"):
        wait(monkeypatch, lambda: {CARD.uuid: 3000, "GPU-1": max(0, int(1000 - clock[0]))})
    assert clock[0] < until + 2 * run.BACK_SECONDS
