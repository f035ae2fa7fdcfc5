"""Policy `binpack`: the fullest card of the fullest node that still fits, so that whole cards and nodes stay free."""

import numpy as np

from vgpu.placement.cards import SLOTS, Cards, Floats, Ints, load, node_load


def card_order(cards: Cards, usage: Ints) -> Ints:
    """Positions of a node's cards, best first; ties by more slices, then by index."""
    return np.asarray(np.lexsort((-usage[SLOTS], -load(cards, usage)), axis=-1), dtype=np.int64)


def node_score(cards: Cards, usage: Ints) -> Floats:
    """One figure per node, the greatest is the best."""
    return node_load(cards, usage)
