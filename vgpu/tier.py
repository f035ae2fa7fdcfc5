"""Limits above the memory of the cards: how much host memory stands behind the cards, and how it is shared. Pure.

Every limit is backed. A part of a limit may not be guaranteed to be on the card; for this part, the node keeps host
memory free.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from vgpu.config import Config, mebibytes
from vgpu.devices import Gpu, GpuSlice
from vgpu.placement.selection import matches

MIB: Final = 1 << 20
GRAIN: Final = 2 * MIB  #: blocks that move are made of pages of this size
_FIRST: Final = 512 * MIB  #: bytes of a guarantee for which a start always waits
_RESERVE: Final = 64  #: one part in this many of a card is never lent: contexts, modules, pages that are not full

K = TypeVar("K", bound=Hashable)


class Scaling(msgspec.Struct, frozen=True):
    """The administrator's settings for the memory of a node's cards."""

    factor: float = 1.0  #: limits may sum up to this multiple of a card
    #: the same for models, by patterns as in use-gputype; the longest pattern counts
    by_model: Mapping[str, float] = {}
    host_memory: int = 0  #: MiB behind all cards of the node

    def of(self, model: str) -> float:
        patterns = [pattern for pattern in self.by_model if matches(model, pattern)]
        return self.by_model[max(patterns, key=lambda one: (len(one), one))] if patterns else self.factor

    def above(self, cards: Sequence[Gpu]) -> float:
        """The largest factor above 1 of these cards; 0: no card has one."""
        return max((factor for gpu in cards if (factor := self.of(gpu.model)) > 1), default=0.0)


UNSCALED: Final = Scaling()
NOTHING: Final[Mapping[str, int]] = {}


def wanted(config: Config) -> Scaling:
    """The scaling in the configuration (of this node)."""
    plugin = config.device_plugin
    return Scaling(plugin.deviceMemoryScaling, plugin.deviceMemoryScalingByModel, mebibytes(plugin.hostMemory))


def scaled(
    cards: Sequence[Gpu], scaling: Scaling, *, backed: bool, behind: Mapping[str, int] = NOTHING
) -> tuple[Gpu, ...]:
    """The cards with the memory that limits may sum up to; `backed`: the node keeps the host memory free.

    Each card that is scaled up has the same part of the host memory behind it. `behind`: MiB that pods hold behind
    cards (UUID). These MiB may exceed a card's part, because there was more host memory before, or fewer cards. Then
    all parts shrink.
    """
    most = {gpu.uuid: int(gpu.physical_memory * (factor - 1)) for gpu in cards if (factor := scaling.of(gpu.model)) > 1}
    part = _part(scaling.host_memory, most, behind) if backed and most else 0
    found = []
    for gpu in cards:
        physical = gpu.physical_memory
        memory = int(physical * min(scaling.of(gpu.model), 1.0)) + min(most.get(gpu.uuid, 0), part)
        same = memory == gpu.memory
        found.append(gpu if same else msgspec.structs.replace(gpu, memory=memory, physical=physical))
    return tuple(found)


def _part(total: int, most: Mapping[str, int], behind: Mapping[str, int]) -> int:
    """The largest part of `total` that each card may have.

    All parts together, with what pods hold already, must fit into `total`.
    """

    def needed(part: int) -> int:
        return sum(max(min(most.get(uuid, 0), part), behind.get(uuid, 0)) for uuid in most.keys() | behind.keys())

    return max(0, bisect_right(range(total // len(most) + 1), total, key=needed) - 1)


def unbacked(cards: Sequence[Gpu], scaling: Scaling, capacity: int, allocatable: int) -> str:
    """Why memory is not scaled on a node with this memory in bytes; empty: it is scaled, or need not be.

    `capacity`: the node's memory, `allocatable`: the part for pods.
    """
    factor = scaling.above(cards)
    if not factor:
        return ""
    begin = f"the memory of the cards is not scaled by {factor:g}"
    if not scaling.host_memory:
        return f"{begin}: devicePlugin.hostMemory says how much memory of the node is behind them, and is 0"
    kept = (capacity - allocatable) // MIB
    if kept < scaling.host_memory:
        return (
            f"{begin}: {scaling.host_memory} MiB of the node are to be behind them (devicePlugin.hostMemory), and "
            f"the kubelet keeps {kept} MiB from pods: raise memory in its systemReserved "
            f"by {scaling.host_memory - kept} MiB"
        )
    return ""


def on_tier(slices: Iterable[GpuSlice]) -> bool:
    """Whether a part of these slices is not guaranteed to be on the card, so that host memory stands behind it."""
    return any(piece.guarantee < piece.mem for piece in slices)


class Need(msgspec.Struct, frozen=True):
    """The host memory of the node that one container needs, and what it has.

    The figures are those of the container's largest card.
    """

    bytes: int  #: on each card: limit less guarantee
    cards: int = 1
    lack: int = 0  #: on one card: missing part of the guarantee that neighbours still have
    used: int = 0  #: host memory used behind one card
    sum: int = 0  #: host memory used behind all of its cards


def budgets(total: int, needs: Mapping[K, Need]) -> dict[K, int]:
    """Bytes of host memory that each container may use behind each of its cards; `total`: of the node.

    Host memory that no limit needs is shared equally. A container that lacks a part of its guarantee may also use
    memory that no container has taken yet. This happens only where the card has no room, because a neighbour must still
    give back a loan. Then all containers together have in host memory what does not fit on the card, and their limits
    need no more.
    """
    left = total - sum(need.bytes * need.cards for need in needs.values())
    parts = sum(need.cards for need in needs.values())
    more = max(left, 0) // parts // GRAIN * GRAIN if parts else 0
    free = max(0, total - sum(need.sum for need in needs.values()))
    return {
        key: max(need.bytes + more, min(need.bytes + need.lack, need.used + free // need.cards))
        for key, need in needs.items()
    }


class Want(msgspec.Struct, frozen=True):
    """What one movable container could use on a card, in bytes above its guarantee."""

    now: int  #: bytes that the container has allocated
    most: int  #: bytes that its limit allows


def room(physical: int, promised: int, others: int = 0) -> int:
    """Bytes of a card that can be lent.

    These are its memory less guarantees, a reserve and the use of other processes (`others`).
    """
    return max(0, physical - physical // _RESERVE - promised - others)


def owed(physical: int, promised: int, above: int, others: int = 0) -> int:
    """Bytes of a card that were lent and must be given back before every container can have its guarantee.

    `above`: bytes that containers have on the card beyond their guarantees. An amount of these bytes up to the
    reserve is never asked for: contexts and modules stay where they are.
    """
    return max(0, above - max(physical - promised - others, physical // _RESERVE))


def at_first(guarantee: int, context: int) -> int:
    """Bytes of its guarantee that a container must get before it starts: data that must be on the card comes first.

    `context`: bytes that a context takes there, 0: not known. There is room for a second context, or for modules.
    """
    return min(guarantee, max(_FIRST, 2 * context))


def loans(free: int, wants: Mapping[K, Want]) -> dict[K, int]:
    """Divides bytes of a card evenly, first among containers that have allocated more than their guarantee."""
    first = _level(free, {key: min(want.now, want.most) for key, want in wants.items()})
    rest = _level(free - sum(first.values()), {key: want.most - first[key] for key, want in wants.items()})
    return {key: (first[key] + rest[key]) // GRAIN * GRAIN for key in wants}


def _level(free: int, wants: Mapping[K, int]) -> dict[K, int]:
    """Divides as evenly as possible; each key gets at most what it wants."""
    found: dict[K, int] = {}
    left = sorted(wants, key=lambda key: wants[key])
    while left:
        key = left[0]
        found[key] = max(0, min(wants[key], free // len(left)))
        free -= found[key]
        left.pop(0)
    return found
