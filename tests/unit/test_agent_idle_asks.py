"""An agent on a node without cards looks at the driver again and again, and asks the API server once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from device_plugin import agent as module
from device_plugin.agent import Agent, Options
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory
from vgpu.kube.client import Unreachable


@pytest.mark.parametrize("away", [0, 2])
def test_the_api_server_says_once_that_there_were_no_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, away: int
) -> None:
    monkeypatch.setattr(module, "LOOK_FOR_CARDS_SECONDS", 0.001)
    monkeypatch.setattr(module, "ASK_SECONDS", 0.001)
    card = Gpu("GPU-a", 0, "Tesla T4", 16000)
    looks, asked = [], []

    def take() -> Inventory:
        looks.append(None)
        return Inventory((card,) if len(looks) > away + 5 else ())

    def published(*_: object) -> Inventory:
        asked.append(None)
        if len(asked) <= away:
            raise Unreachable("no answer")
        return Inventory()

    monkeypatch.setattr(module, "published", published)
    one = Agent(Config(), Options("n1", tmp_path, tmp_path, tmp_path, 0, 0), cast(Any, None))
    found = asyncio.run(one._cards(cast(Any, SimpleNamespace(take=take))))
    assert found.devices == (card,)
    assert len(looks) == away + 6
    assert len(asked) == away + 1
