"""A second device plugin for the same resource or cards: how the agent notices it, and how the two do not fight. Pure.

The kubelet asks the plugin that registered last, and lists the newest ids from any plugin: the stream of the earlier
plugin stays open. So ids that are not ours prove another plugin. When one of these streams ends, kubelets before 1.37
drop the plugin that registered last. Two plugins that both register again would push each other out for ever. So the
agent waits longer before each try.

A missing stream proves no other plugin: the kubelet, this agent or the whole node may be slow. Then the agent registers
again, reports no other plugin, and does not wait longer the next time. The proof of another plugin is the kubelet's own
list, when it was written after we sent our ids.

Source: k8s.io/kubernetes v1.30.14 to v1.37.2, pkg/kubelet/cm/devicemanager: plugin/v1beta1 "connectClient" and
"runClient", manager.go "PluginConnected" and "genericDeviceUpdateCallback".
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

#: Time without the resource after which the kubelet, though it answers, has dropped us. The time doubles whenever we
#: lose the resource to a plugin that is known to exist
PATIENCE_SECONDS: Final = (15.0, 600.0)
LOOK_SECONDS: Final = 1.5  #: time that one look can stand for: a blocked event loop has seen nothing meanwhile
_CLOCK_SECONDS: Final = 0.02  #: time by which a file's time may be behind the clock
CALM_SECONDS: Final = 600.0  #: after the stream was kept for this long, the conflict is over


class Contest:
    """Decides when to register again; times are seconds, monotonic.

    `lost`: how often another plugin took the resource.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._missing = 0.0  # seconds of looks at which we did not have the resource
        self._last: float | None = None  # time of the look before
        self._kept: float | None = None  # since when we have the resource

    def look(self, ours: bool, now: float, *, rival: bool) -> bool:
        """One look at a kubelet that answers and with which we are registered; True: register again.

        `ours`: the kubelet has a stream of ours, and lists our ids; `rival`: the kubelet lists ids of another plugin.
        """
        passed = 0.0 if self._last is None else min(now - self._last, LOOK_SECONDS)
        self._last = now
        if ours:
            self._missing = 0.0
            self._kept = now if self._kept is None else self._kept
            if now - self._kept >= CALM_SECONDS:
                self.lost = 0
            return False
        self._kept = None
        self._missing += passed
        first, longest = PATIENCE_SECONDS
        if self._missing < (min(first * 2.0 ** min(self.lost, 16), longest) if rival else first):
            return False
        self.lost += rival
        self._missing, self._last = 0.0, None
        return True

    def pause(self) -> None:
        """The kubelet is away, or new: the agent cannot say anything about other plugins."""
        self._missing, self._last, self._kept = 0.0, None, None


class Told(msgspec.Struct, frozen=True):
    """The last list of ids that was sent to the kubelet."""

    healthy: frozenset[str]
    all: frozenset[str]
    at: float  #: Unix time, just before


class View(msgspec.Struct, frozen=True):
    """What the kubelet lists for our resource, compared with our last list."""

    rival: bool = False  #: the kubelet lists ids that are not ours: another plugin has sent them since
    lacking: bool = False  #: the kubelet lacks some of our healthy ids


def view(listed: Collection[str] | None, written: float, told: Told | None) -> View:
    """`listed`: healthy ids in the kubelet's checkpoint, None: the kubelet does not know the resource.

    `written`: Unix time.

    A checkpoint that is older than our last list proves nothing: the kubelet has not processed that list yet.
    """
    if told is None or listed is None or written + _CLOCK_SECONDS < told.at:
        return View()
    return View(rival=not told.all.issuperset(listed), lacking=not told.healthy.issubset(listed))


def sentence(
    resource: str,
    cards: Collection[str],
    registered: Mapping[str, Collection[str] | None],
    sockets: Collection[str],
    rival: bool,
) -> str:
    """Which other plugin exists, and what to do; empty: none.

    `cards`: UUIDs of the node; `registered`: resource → ids, from the kubelet's checkpoint; `sockets`: names in its
    folder that are neither ours nor the kubelet's; `rival`: another plugin has or had the resource.
    """
    same = sorted(
        other
        for other, ids in registered.items()
        if other != resource and any(uuid in one for one in ids or () for uuid in cards)
    )
    where = f" (other sockets: {', '.join(sorted(sockets))})" if sockets else ""
    if rival:
        return (
            f"another device plugin registers {resource} with the kubelet{where}: remove it from this node, or give "
            "vgpu another resourceName"
        )
    if same:
        return (
            f"another device plugin offers the cards of this node as {', '.join(same)}{where}: the kubelet gives the "
            "cards away twice; remove the other plugin from this node"
        )
    return ""
