"""Decides, from what the node reports about its memory, whether it keeps host memory free for its cards.

The driver's pages may escape a pod's memory cgroup, so the kubelet must keep this memory from pods. A node's
allocatable memory is its capacity less what the kubelet reserves.
"""

from collections.abc import Sequence

from device_plugin.conditions import Finding
from vgpu import names, tier
from vgpu.devices import Gpu
from vgpu.kube.objects import Node
from vgpu.resources import parse_quantity
from vgpu.tier import Scaling


def verdict(cards: Sequence[Gpu], scaling: Scaling, node: Node) -> str | None:
    """Why memory of the cards is not scaled; empty: it is scaled, or need not be.

    None: the node has not reported its memory, or its cards are not known yet.
    """
    if not cards:
        return None
    try:
        capacity, allocatable = (
            parse_quantity(part["memory"]) for part in (node.status.capacity, node.status.allocatable)
        )
        # The kubelet subtracts configured huge pages from allocatable memory, but they are for pods.
        huge = sum(parse_quantity(size) for name, size in node.status.capacity.items() if name.startswith("hugepages-"))
    except (KeyError, ValueError):
        return None
    return tier.unbacked(cards, scaling, int(capacity - huge), int(allocatable))


def finding(sentence: str) -> Finding:
    """The condition that reports `sentence`."""
    well = "the node reserves the host memory that its cards need, if any"
    return Finding(names.CONDITION_UNBACKED, sentence, "HostMemoryMissing", "HostMemoryKept", well)
