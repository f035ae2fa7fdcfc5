"""An agent's mark on its node."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from vgpu.kube.agentmark import AgentMark, leaving, read, serving


def test_what_is_written_is_read() -> None:
    since = datetime(2026, 11, 29, 1, 2, 3, 999, tzinfo=timezone(timedelta(hours=1)))
    assert serving(since) == "serving since 2026-11-29T00:02:03Z"
    assert read(serving(since)) == AgentMark(since=datetime(2026, 11, 29, 0, 2, 3, tzinfo=UTC))
    assert read(leaving("upgrade")) == AgentMark("the node's agent is leaving (upgrade)")
    assert read(None) == AgentMark()


@pytest.mark.parametrize("text", ["", "serving", "gone: fishing", "x" * 1000])
def test_what_is_not_known_takes_no_pods(text: str) -> None:
    assert "does not support" in read(text).away
    assert len(read(text).away) < 200


@pytest.mark.parametrize("text", ["serving since 2026-11-29T00:02:03", "serving since noon"])
def test_a_time_that_cannot_be_compared_is_none(text: str) -> None:
    assert read(text) == AgentMark()
