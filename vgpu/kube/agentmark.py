"""A node's agent says in the annotation `vgpu.io/agent` whether pods may be bound to its node.

To a scheduler with a connection, the agent says the same by HTTP.
"""

from datetime import UTC, datetime
from typing import Final

import msgspec

PATH: Final = "/serving"  #: on the agent's health port: 200, or 503 with the reason why pods cannot start

_SERVING = "serving since "
_LEAVING = "leaving"


class AgentMark(msgspec.Struct, frozen=True):
    """`away`: why the node accepts no pods, as a part of a sentence; empty: it accepts pods.

    `since`: when the agent began to serve; None: unknown.
    """

    away: str = ""
    since: datetime | None = None


def serving(since: datetime) -> str:
    """The annotation of an agent that the kubelet has registered; `since` with a time zone, in whole seconds.

    Each start of an agent writes another time: kube-scheduler tries pods again only when the node changes.
    """
    return f"{_SERVING}{since.astimezone(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}"


def leaving(reason: str) -> str:
    """The annotation of an agent that ends; `reason` in a few words."""
    return f"{_LEAVING}: {reason}"


def read(text: str | None) -> AgentMark:
    """Reads the annotation; None (from agents before this annotation) means nothing."""
    if text is None:
        return AgentMark()
    state, _, why = text.partition(":")
    if text.startswith(_SERVING):
        try:
            since = datetime.fromisoformat(text.removeprefix(_SERVING))
        except ValueError:
            since = None
        return AgentMark(since=since if since is not None and since.tzinfo is not None else None)
    if state.strip() == _LEAVING:
        return AgentMark(
            f"the node's agent is leaving ({why.strip()})" if why.strip() else "the node's agent is leaving"
        )
    return AgentMark(f'the node\'s agent reports "{text[:80]}", a state that this scheduler does not support')
