"""What is left of the cards of many nodes, in the form that is fastest to query; `rules` is the definition.

Arrays have the shape cards × nodes, the reverse of `Cards`: figures of one card of every node are next to each other.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vgpu.placement import cards as figures_of
from vgpu.placement.cards import Bools, Cards, Ints
from vgpu.placement.rules import Ask

Small = NDArray[np.int32]

#: Rows of a room (shape: 5 × cards × nodes)
SLOTS, UNUSED, MEM, PHYS, CORES = range(5)
FIGURES: Final = 5
_LARGEST: Final = 2**31 - 1


def nothing(cards: int, nodes: int) -> Small:
    """The room of places without a card."""
    return np.zeros((FIGURES, cards, nodes), dtype=np.int32)


def of(cards: Cards, usage: Ints) -> Small:
    """The room of cards.

    `SLOTS` is 0 where no slice may come at all; `UNUSED` is 1 where no pod holds anything.
    """
    taken = usage[figures_of.SLOTS]
    usable = cards.present & cards.healthy & ~cards.cordoned & (usage[figures_of.ALONE] == 0)
    left = np.empty((FIGURES, *cards.present.shape[::-1]), dtype=np.int32)
    left[SLOTS] = np.where(usable, np.minimum(cards.slots - taken, _LARGEST), 0).T
    left[UNUSED] = ((taken == 0) & (cards.foreign == 0)).T
    for row, total, used in (
        (MEM, cards.memory - cards.foreign, figures_of.MEM),
        (PHYS, cards.physical - cards.foreign, figures_of.PHYS),
        (CORES, cards.cores, figures_of.CORES),
    ):
        left[row] = np.minimum(total - usage[used], _LARGEST).T
    return left


@dataclass(frozen=True, slots=True)
class Want:
    """What one container asks of each card: one figure for all cards where that is enough."""

    count: int
    memory: int | Small
    guarantee: int | Small
    cores: int
    accepted: Bools | None  #: None: all cards

    @classmethod
    def of(cls, asked: Ask) -> "Want":
        memory: int | Small = asked.request.memory or asked.memory.T.astype(np.int32)
        guarantee = memory if asked.guarantee is asked.memory else asked.guarantee.T.astype(np.int32)
        masks = [mask.T for mask in (asked.models, asked.uuids) if mask is not None]
        accepted = np.logical_and.reduce(masks) if masks else None
        return cls(asked.request.count, memory, guarantee, asked.request.cores, accepted)

    @property
    def alone(self) -> bool:
        return self.cores == 100

    def at(self, nodes: Ints) -> "Want":
        """The same for these nodes."""

        def part(figure: int | Small) -> int | Small:
            return figure if isinstance(figure, int) else np.take(figure, nodes, axis=-1)

        accepted = None if self.accepted is None else np.take(self.accepted, nodes, axis=-1)
        return Want(self.count, part(self.memory), part(self.guarantee), self.cores, accepted)


def eligible(left: Small, want: Want) -> Bools:
    """Cards that break no rule (shape cards × nodes)."""
    good: Bools = left[SLOTS] > 0
    good &= left[MEM] >= want.memory
    good &= left[PHYS] >= want.guarantee
    if want.guarantee is not want.memory:
        # host memory behind the cards: limits have this much more left than guarantees
        behind = want.memory - want.guarantee
        good &= (behind <= 0) | (left[MEM] - left[PHYS] >= behind)
    good &= left[UNUSED] > 0 if want.alone else left[CORES] >= max(want.cores, 1)
    if want.accepted is not None:
        good &= want.accepted
    return good


def place(left: Small, want: Want, chosen: Bools) -> None:
    """Takes one slice from each chosen card.

    Changes `left`; ValueError where `left` is not contiguous.
    """
    if not left.flags.c_contiguous:
        raise ValueError("the room of cards that are chosen must be contiguous: its flat view would be a copy")
    flat = left.reshape(FIGURES, -1)
    at = np.flatnonzero(chosen)

    def figure(of_card: int | Small) -> int | Small:
        return of_card if isinstance(of_card, int) else of_card.reshape(-1)[at]

    flat[SLOTS, at] = 0 if want.alone else flat[SLOTS, at] - 1
    flat[UNUSED, at] = 0
    flat[MEM, at] -= figure(want.memory)
    flat[PHYS, at] -= figure(want.guarantee)
    if want.cores:
        flat[CORES, at] -= want.cores


def count(mask: Bools) -> Ints:
    """Cards of each node that are in the mask (shape cards × nodes)."""
    narrow = np.uint8 if len(mask) < 256 else np.uint16
    return np.asarray(np.add.reduce(mask.view(np.uint8), axis=0, dtype=narrow), dtype=np.int64)


def first(good: Bools, size: int) -> tuple[Bools, Bools]:
    """(the first `size` good cards of each node, nodes that have that many)."""
    chosen = np.zeros_like(good)
    missing = np.full(good.shape[1], size, dtype=np.int32)
    for card in range(len(good)):
        np.logical_and(good[card], missing > 0, out=chosen[card])
        missing -= chosen[card]
    return chosen, missing == 0
