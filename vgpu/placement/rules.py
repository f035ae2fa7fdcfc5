"""The hard rules: may this container get a slice of this card? One definition serves one node and a whole cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from vgpu.placement.cards import ALONE, CORES, MEM, PHYS, SLOTS, Bools, Cards, Ints, of_nodes
from vgpu.placement.selection import by_model, by_uuid
from vgpu.resources import CardSelector, GpuRequest, PodRequest

#: MiB of a slice that are physical even where memory is scaled; a smaller slice is all physical
LEAST_GUARANTEE: Final = 512


class Reason(StrEnum):
    """Why a card does not fit; the first reason in this order is reported."""

    TYPE = "type"
    UUID = "uuid"
    HEALTH = "health"
    CORDON = "cordon"
    SLOTS = "slots"
    UNUSED = "unused"  #: a request with cores 100 needs a card without slices
    ALONE = "alone"  #: a slice with cores 100 has the card for itself
    MEMORY = "memory"
    GUARANTEE = "guarantee"  #: physical memory is promised to slices
    CORES = "cores"
    NUMA = "numa"
    COUNT = "count"  #: the node has fewer cards
    UNDECIDED = "undecided"  #: there are more choices of cards than the search tries


class Rejection(msgspec.Struct, frozen=True):
    """Why a node's cards cannot take a container or a pod."""

    reasons: Mapping[Reason, int]  #: number of cards per reason
    sentence: str


@dataclass(frozen=True, slots=True)
class Ask:
    """What one container would take of each card (arrays in the shape of the cards)."""

    request: GpuRequest
    memory: Ints
    guarantee: Ints
    models: Bools | None  #: cards of an accepted model; None: all cards
    uuids: Bools | None

    def at(self, nodes: Ints) -> "Ask":
        """The same for these nodes."""
        memory = of_nodes(self.memory, nodes)
        guarantee = memory if self.guarantee is self.memory else of_nodes(self.guarantee, nodes)
        models, uuids = (mask if mask is None else of_nodes(mask, nodes) for mask in (self.models, self.uuids))
        return Ask(self.request, memory, guarantee, models, uuids)

    def added(self, usage: Ints, chosen: Bools) -> Ints:
        """The usage with one more slice on each chosen card."""
        result = usage.copy(order="K")
        result[SLOTS] += chosen
        result[MEM] += self.memory * chosen
        result[PHYS] += self.guarantee * chosen
        if self.request.cores:
            result[CORES] += self.request.cores * chosen
        if self.request.cores == 100:
            result[ALONE] += chosen
        return result


def memory_asked(cards: Cards, request: GpuRequest) -> Ints:
    """MiB on each card.

    A percentage means the card's physical memory, but never more than slices may have of the card.
    """
    if request.memory:
        return np.broadcast_to(np.int64(request.memory), cards.memory.shape)
    return np.minimum(cards.physical * request.percent // 100, cards.memory)


def ask(cards: Cards, request: GpuRequest, selector: CardSelector, *, oversubscribe: bool) -> Ask:
    """The ask of one container on every card.

    `oversubscribe`: on cards with scaled-up memory, only limit / scaling is guaranteed to be physical. The guarantee is
    never less than what contexts and modules take, because they must be on the card. A container that has a card alone,
    or asks for all of its memory, is guaranteed all of it.
    """
    memory = memory_asked(cards, request)
    guarantee = memory
    if oversubscribe and cards.scaled:
        scaled = cards.memory > cards.physical
        if scaled.any():
            if request.cores == 100 or request.whole_card:
                share = cards.physical
            else:  # rounded up: the rest of all limits together is then no more than the host memory behind the card
                share = np.maximum(-(memory * -cards.physical // np.maximum(cards.memory, 1)), LEAST_GUARANTEE)
            guarantee = np.where(scaled, np.minimum(memory, share), memory)
    return Ask(request, memory, guarantee, by_model(cards, selector), by_uuid(cards, selector))


def asks(cards: Cards, pod: PodRequest) -> list[Ask]:
    """The asks of a pod's containers; containers with equal requests share one object."""
    known: dict[GpuRequest, Ask] = {}
    for each in pod.containers:
        if each.gpu not in known:
            known[each.gpu] = ask(cards, each.gpu, pod.selector, oversubscribe=pod.oversubscribe is not False)
    return [known[each.gpu] for each in pod.containers]


def faults(cards: Cards, usage: Ints, asked: Ask) -> Iterator[tuple[Reason, Bools]]:
    """Every rule with the cards that break it, in the order of the reasons."""
    alone = asked.request.cores == 100
    if asked.models is not None:
        yield Reason.TYPE, ~asked.models
    if asked.uuids is not None:
        yield Reason.UUID, ~asked.uuids
    yield Reason.HEALTH, ~cards.healthy
    yield Reason.CORDON, cards.cordoned
    yield Reason.SLOTS, usage[SLOTS] >= cards.slots
    if alone:
        yield Reason.UNUSED, (usage[SLOTS] > 0) | (cards.foreign > 0)
    else:
        yield Reason.ALONE, usage[ALONE] > 0
    full = usage[MEM] + cards.foreign + asked.memory > cards.memory
    if asked.guarantee is not asked.memory:
        behind, more = cards.memory - cards.physical, asked.memory - asked.guarantee
        full |= (more > 0) & (usage[MEM] - usage[PHYS] + more > behind)
    yield Reason.MEMORY, full
    yield Reason.GUARANTEE, usage[PHYS] + cards.foreign + asked.guarantee > cards.physical
    if not alone:
        # A container without a guarantee still needs time that is not promised to others, else it would never run.
        yield Reason.CORES, usage[CORES] + max(asked.request.cores, 1) > cards.cores


def eligible(cards: Cards, usage: Ints, asked: Ask) -> Bools:
    """Cards that break no rule."""
    good = cards.present.copy()
    for _, bad in faults(cards, usage, asked):
        good &= ~bad
    return good


def judge(cards: Cards, usage: Ints, asked: Ask) -> Iterator[tuple[Reason, Bools]]:
    """The cards that break a rule, each under its first reason only.

    Once no card is left, further rules are not checked.
    """
    left = cards.present.copy()
    for reason, bad in faults(cards, usage, asked):
        yield reason, bad & left
        left &= ~bad
        if not left.any():
            return


_NEEDS: Mapping[Reason, tuple[str, str]] = {
    # reason: (what fitting cards have, what the other cards have or lack)
    Reason.TYPE: ("are of an accepted model", "of another model"),
    Reason.UUID: ("have an accepted UUID", "with another UUID"),
    Reason.HEALTH: ("are healthy", "unhealthy"),
    Reason.CORDON: ("are not cordoned", "cordoned"),
    Reason.SLOTS: ("have a free slot", "without a free slot"),
    Reason.UNUSED: (
        "are unused, as gpucores {cores} needs",
        "already used, but {cores} % of cores needs an unused card",
    ),
    Reason.ALONE: ("are not taken by a slice with 100 % of cores", "taken by a slice with 100 % of cores"),
    Reason.MEMORY: ("have {memory} free", "without {memory} free"),
    Reason.GUARANTEE: (
        "have the physical memory free that a slice of {memory} guarantees",
        "without the physical memory free that a slice of {memory} guarantees",
    ),
    Reason.CORES: ("have {cores} % of cores free", "without {cores} % of cores free"),
}


def sentence(counts: Mapping[Reason, int], total: int, request: GpuRequest, *, numa_bind: bool = False) -> str:
    """ "2 of 8 cards have 3000 MiB free, 4 needed"; `counts` are the cards that do not fit, by reason."""
    if total == 0:
        return "the node has no cards"
    if total < request.count:
        return f"the node has {total} {'card' if total == 1 else 'cards'}, {request.count} needed"
    words = {
        "memory": f"{request.memory} MiB" if request.memory else f"{request.percent} % of their memory",
        "cores": str(request.cores or 1),
    }
    fitting = total - sum(counts.values())
    needed = f"{request.count} needed"
    if numa_bind:
        needed += " on one NUMA node"
        if fitting >= request.count:
            needed += ", but these cards are on different NUMA nodes"
    if len(counts) == 1:
        (reason,) = counts
        return f"{fitting} of {total} cards {_NEEDS[reason][0].format_map(words)}, {needed}"
    why = ", ".join(f"{counts[reason]} {_NEEDS[reason][1].format_map(words)}" for reason in Reason if reason in counts)
    return f"{fitting} of {total} cards fit, {needed}" + (f": {why}" if why else "")
