"""Finds nodes whose cards cannot hold all containers of a pod by any choice, by counting instead of searching. Pure.

All containers together take no more than all cards have. The j containers that ask for most take at least j times what
the smallest of them asks; so the cards must have room for j slices of that size. A node that passes may still be a node
on which no choice works.
"""

from collections.abc import Callable, Sequence

import numpy as np

from vgpu.allocation import Kind
from vgpu.placement.cards import Bools, Ints
from vgpu.placement.room import CORES, MEM, PHYS, SLOTS, UNUSED, Small, Want

Figure = int | Small


def possible(left: Small, wants: Sequence[Want], kinds: Sequence[Kind]) -> Bools:
    """False where the containers that run at the same time do not fit together (shape of `left` without its cards)."""
    together = [want for want, kind in zip(wants, kinds, strict=True) if kind is not Kind.INIT]
    result = np.ones(left.shape[2:], dtype=np.bool_)
    if not together:
        return result
    usable = left[SLOTS] > 0 if together[0].accepted is None else (left[SLOTS] > 0) & together[0].accepted
    for row in (MEM, PHYS, CORES):
        asked = sum(want.count * _smallest(want, row) for want in together)
        result &= np.where(usable, np.maximum(left[row], 0), 0).sum(axis=0, dtype=np.int64) >= asked
    keys: tuple[Callable[[Want], float], ...] = (lambda want: float(np.mean(want.memory)), lambda want: want.cores)
    for key in keys:
        order = sorted(together, key=key, reverse=True)
        memory, guarantee, cores = order[0].memory, order[0].guarantee, order[0].cores
        needed = order[0].count
        for at, want in enumerate(order[1:], start=2):
            memory = _least(memory, want.memory)
            guarantee = _least(guarantee, want.guarantee)
            cores = min(cores, want.cores)
            needed += want.count
            if at < len(order) and _same(order[at], want):
                continue  # more containers of the same kind: one question for all of them
            result &= _slices(left, memory, guarantee, cores, order[0].accepted, at) >= needed
    return result


def _slices(left: Small, memory: Figure, guarantee: Figure, cores: int, accepted: Bools | None, most: int) -> Ints:
    """Number of slices of this size that have room, at most `most` on one card: a container has each card once."""
    room = np.minimum(left[SLOTS], most)
    room = np.minimum(room, left[MEM] // np.maximum(memory, 1))
    room = np.minimum(room, left[PHYS] // np.maximum(guarantee, 1))
    if cores == 100:
        room = np.minimum(room, left[UNUSED])
    elif cores:
        room = np.minimum(room, left[CORES] // cores)
    else:
        room = np.where(left[CORES] > 0, room, 0)
    if accepted is not None:
        room = np.where(accepted, room, 0)
    return np.asarray(np.maximum(room, 0).sum(axis=0), dtype=np.int64)


def _smallest(want: Want, row: int) -> int | Ints:
    """The smallest amount that a container takes of any of a node's cards.

    One with 100 % of cores takes the whole card.
    """
    if row == CORES:
        return 0 if want.alone else want.cores
    figure = want.memory if row == MEM else want.guarantee
    return figure if isinstance(figure, int) else np.asarray(figure.min(axis=0), dtype=np.int64)


def _least(one: Figure, two: Figure) -> Figure:
    return min(one, two) if isinstance(one, int) and isinstance(two, int) else np.minimum(one, two)


def _same(one: Want, two: Want) -> bool:
    return one.memory is two.memory and one.guarantee is two.guarantee and one.cores == two.cores
