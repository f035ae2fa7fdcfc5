"""Policy `spread`: the least loaded card of the least loaded node, so that neighbours disturb each other least."""

import numpy as np

from vgpu.placement.cards import SLOTS, Cards, Floats, Ints, load, node_load


def card_order(cards: Cards, usage: Ints) -> Ints:
    """Positions of a node's cards, best first; ties by fewer slices, then by index."""
    return np.asarray(np.lexsort((usage[SLOTS], load(cards, usage)), axis=-1), dtype=np.int64)


def node_score(cards: Cards, usage: Ints) -> Floats:
    """One figure per node, the greatest is the best."""
    return -node_load(cards, usage)
