"""What the agent reports about pods and its node while the API server is too slow."""

import threading
from typing import Any, cast

import pytest

from device_plugin.pod_events import Consequences
from vgpu import names
from vgpu.kube import writes
from vgpu.kube.objects import Meta, Pod

POD = Pod(metadata=Meta(name="p", namespace="default", uid="u"))


def test_what_waits_to_be_said_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    away, said = threading.Event(), list[tuple[str, str]]()

    def emit(_: object, about: dict[str, str], reason: str, message: str, *__: object, **___: object) -> None:
        away.wait(60)
        said.append((about["name"], f"{reason}: {message}"))

    monkeypatch.setattr(writes, "emit_event", emit)
    consequences = Consequences(cast(Any, None), "n")
    consequences.node(names.CONDITION_UNHEALTHY, "first")
    for _ in range(1000):  # the kubelet tries the start again and again
        consequences.refused(POD, "no room")
        consequences.node(names.CONDITION_CONFLICT, "another one")
    away.set()
    consequences.node(names.EVENT_HEALTHY, "last")
    consequences._worker.shutdown(wait=True)
    assert said == [
        ("n", "VgpuUnhealthy: first"),
        ("p", "VgpuMismatch: no room"),
        ("n", "VgpuConflict: another one"),
        ("n", "VgpuHealthy: last"),
    ]


def test_what_was_said_may_be_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(writes, "emit_event", lambda *given, **_: said.append(given[3]))
    consequences = Consequences(cast(Any, None), "n")
    for turn in range(1, 4):
        consequences.untracked(POD, "more than its slice")
        consequences._worker.submit(int).result(60)
        assert len(said) == turn
    consequences.stop()
