"""Shared by the tests of the agent."""

from collections.abc import Iterator

import pytest
from agent_world import MakeWorld, worlds

from device_plugin import starts


@pytest.fixture
def make() -> Iterator[MakeWorld]:
    """Makes agents of one node with their surroundings; everything ends with the test."""
    with worlds() as one:
        yield one


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the agent refuse starts soon."""
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(starts, "RECORD_SECONDS", 0.2)
