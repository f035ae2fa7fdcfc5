"""A second device plugin for the same resource or the same cards: how it is noticed, and that nobody fights. Pure.

The kubelet asks the plugin that registered last, and lists the ids that came last from any of them: the stream of the
one before stays open, so ids that are not ours tell. When any of these streams ends, kubelets before 1.37 let go of
whoever registered last. Two that both register again would push each other out for ever, so each try here waits longer
than the one before.

That a stream is missing proves nobody else: the kubelet, this agent or the whole node may be slow. Then the agent
registers again, says nothing of others and waits no longer the next time. What proves another one is the kubelet's
own list, written after we told it our ids.
Source: k8s.io/kubernetes v1.30.14 to v1.37.2, pkg/kubelet/cm/devicemanager: plugin/v1beta1 "connectClient" and
"runClient", manager.go "PluginConnected" and "genericDeviceUpdateCallback".
"""

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

#: Without the resource for so long, though the kubelet answers: it has dropped us; doubled with every time that we lose
#: it to a plugin that is known to be there
PATIENCE_SECONDS: Final = (15.0, 600.0)
LOOK_SECONDS: Final = 1.5  #: what one look can stand for: an event loop that stood still has seen nothing meanwhile
_CLOCK_SECONDS: Final = 0.02  #: by which the time of a file may be behind the clock
CALM_SECONDS: Final = 600.0  #: the stream was kept for so long: whatever it was is over


class Contest:
    """When to register again; `lost`: how often somebody else took the resource. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self.lost = 0
        self._missing = 0.0  # seconds of looks at which we did not have the resource
        self._last: float | None = None  # the look before
        self._kept: float | None = None  # since when we have it

    def look(self, ours: bool, now: float, *, rival: bool) -> bool:
        """One look at a kubelet that answers and with which we are registered; True: register again.

        `ours`: it has a stream of ours, and lists our ids; `rival`: it lists ids of somebody else.
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
        """The kubelet is away, or new: nothing can be said about others."""
        self._missing, self._last, self._kept = 0.0, None, None


class Told(msgspec.Struct, frozen=True):
    """The last list of ids that went to the kubelet."""

    healthy: frozenset[str]
    all: frozenset[str]
    at: float  #: Unix time, just before


class View(msgspec.Struct, frozen=True):
    """What the kubelet lists for our resource, against what we told it."""

    rival: bool = False  #: ids that are not ours: another plugin has told them since
    lacking: bool = False  #: not all of our healthy ids


def view(listed: Collection[str] | None, written: float, told: Told | None) -> View:
    """`listed`: healthy ids by the kubelet's checkpoint, None: it does not know the resource; `written`: Unix time.

    A checkpoint that is older than our last list tells nothing: the kubelet has not come to it yet.
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
    """Who else is there, and what to do; empty: nobody.

    `cards`: UUIDs of the node; `registered`: resource → ids, of the kubelet's checkpoint; `sockets`: names in its
    folder that are neither ours nor its own; `rival`: another plugin has or had the resource.
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
