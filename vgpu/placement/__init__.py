"""Chooses cards for containers: hard rules (`rules`, `fit`), and one module per policy, found by its name."""

from importlib import import_module
from typing import Protocol, cast

from vgpu.placement.cards import Cards, Floats, Ints
from vgpu.resources import PLACEMENT_POLICIES


class Policy(Protocol):
    """The functions that the module of a policy offers."""

    def card_order(self, cards: Cards, usage: Ints) -> Ints:
        """Positions of each node's cards, best first (shape of the cards)."""

    def node_score(self, cards: Cards, usage: Ints) -> Floats:
        """One figure per node, the greatest is the best."""


def policy(name: str) -> Policy:
    """The policy of this name; KeyError with the known names when there is no such policy."""
    if name not in PLACEMENT_POLICIES:
        raise KeyError(f'policy "{name}" is unknown: must be one of {", ".join(PLACEMENT_POLICIES)}')
    return cast(Policy, import_module(f"{__name__}.{name}"))


def policies() -> dict[str, Policy]:
    """All policies by name."""
    return {name: policy(name) for name in PLACEMENT_POLICIES}
