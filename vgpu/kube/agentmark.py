"""What a node's agent says about itself in the annotation `vgpu.io/agent`: may pods be bound to its node?

To a scheduler that is connected to it, it says the same by HTTP.
"""

from datetime import UTC, datetime
from typing import Final

import msgspec

PATH: Final = "/serving"  #: on the agent's port for health: 200, or 503 and why pods cannot start

_SERVING = "serving since "
_LEAVING = "leaving"


class AgentMark(msgspec.Struct, frozen=True):
    """`away`: why the node takes no pods, a part of a sentence; empty: it takes them.

    `since`: when the agent began to serve; None: it does not say.
    """

    away: str = ""
    since: datetime | None = None


def serving(since: datetime) -> str:
    """The annotation of an agent that the kubelet has registered; `since` with a time zone, in whole seconds.

    Each start of an agent writes another time: kube-scheduler tries pods again only when something of a node changes.
    """
    return f"{_SERVING}{since.astimezone(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')}"


def leaving(reason: str) -> str:
    """The annotation of an agent that ends; `reason` in a few words."""
    return f"{_LEAVING}: {reason}"


def read(text: str | None) -> AgentMark:
    """What the annotation says; None, as agents before this annotation leave it: nothing."""
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
