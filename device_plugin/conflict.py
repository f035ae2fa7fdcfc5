"""A second device plugin for the same resource or the same cards: how it is noticed, and that nobody fights. Pure.

The kubelet asks the plugin that registered last, and lists the ids that came last from any of them: the stream of the
one before stays open, so ids that are not ours tell. When any of these streams ends, kubelets before 1.37 let go of
whoever registered last. Two that both register again would push each other out for ever, so each try here waits longer
than the one before.
Source: k8s.io/kubernetes v1.30.14 to v1.37.2, pkg/kubelet/cm/devicemanager: plugin/v1beta1 "connectClient" and
"runClient", manager.go "PluginConnected" and "genericDeviceUpdateCallback".
"""

from collections.abc import Collection, Mapping
from typing import Final

#: Without the resource for so long, though the kubelet answers: it has dropped us; doubled with every time that we lose
PATIENCE_SECONDS: Final = (15.0, 600.0)
CALM_SECONDS: Final = 600.0  #: the stream was kept for so long: whatever it was is over


class Contest:
    """When to register again; `lost`: how often somebody else took the resource. Times are seconds, monotonic."""

    def __init__(self) -> None:
        self.lost = 0
        self._missing: float | None = None  # since when we do not have the resource
        self._kept: float | None = None  # since when we have it

    def look(self, ours: bool, now: float) -> bool:
        """One look at a kubelet that answers and with which we are registered; True: register again.

        `ours`: it has a stream of ours, and lists our ids.
        """
        if ours:
            self._missing = None
            self._kept = now if self._kept is None else self._kept
            if now - self._kept >= CALM_SECONDS:
                self.lost = 0
            return False
        self._kept = None
        self._missing = now if self._missing is None else self._missing
        first, longest = PATIENCE_SECONDS
        if now - self._missing < min(first * 2.0 ** min(self.lost, 16), longest):
            return False
        self.lost += 1
        self._missing = None
        return True

    def pause(self) -> None:
        """The kubelet is away, or new: nothing can be said about others."""
        self._missing = self._kept = None


def strange(resource: str, cards: Collection[str], registered: Mapping[str, Collection[str] | None]) -> bool:
    """The kubelet lists ids of somebody else for the resource."""
    return any(not one.startswith(tuple(cards)) for one in registered.get(resource) or ())


def sentence(
    resource: str,
    cards: Collection[str],
    registered: Mapping[str, Collection[str] | None],
    sockets: Collection[str],
    lost: int,
) -> str:
    """Who else is there, and what to do; empty: nobody.

    `cards`: UUIDs of the node; `registered`: resource → ids, of the kubelet's checkpoint; `sockets`: names in its
    folder that are neither ours nor its own; `lost`: how often another plugin took the resource.
    """
    same = sorted(
        other
        for other, ids in registered.items()
        if other != resource and any(uuid in one for one in ids or () for uuid in cards)
    )
    where = f" (sockets beside ours: {', '.join(sorted(sockets))})" if sockets else ""
    if lost or strange(resource, cards, registered):
        return (
            f"another device plugin registers {resource} at the kubelet{where}: remove it from this node, or give vgpu "
            "another resourceName"
        )
    if same:
        return (
            f"another device plugin offers the cards of this node as {', '.join(same)}{where}: they are given away "
            "twice, remove it from this node"
        )
    return ""
