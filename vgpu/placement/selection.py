"""Which cards a pod accepts: lists of models and UUIDs."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import numpy as np

from vgpu.placement.cards import Bools, Cards
from vgpu.resources import CardSelector


def matches(model: str, pattern: str) -> bool:
    """The whole name, a glob over the whole name, or a word of it; case does not matter.

    "A10" is a word of "NVIDIA A10" and of "NVIDIA A10-24Q", not of "NVIDIA A100-SXM4-40GB".
    """
    name, wanted = model.casefold(), pattern.casefold()
    if name == wanted:
        return True
    if any(sign in wanted for sign in "*?["):
        return fnmatchcase(name, wanted)
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9])", name) is not None


def _any(model: str, patterns: Iterable[str]) -> bool:
    return any(matches(model, pattern) for pattern in patterns)


def accepts_model(selector: CardSelector, model: str) -> bool:
    """Both lists apply: among the wanted, where there are any, and not among the unwanted."""
    wanted = not selector.use_types or _any(model, selector.use_types)
    return wanted and not _any(model, selector.nouse_types)


def by_model(cards: Cards, selector: CardSelector) -> Bools | None:
    """Cards of an accepted model; None where all are accepted."""
    if not (selector.use_types or selector.nouse_types) or not cards.models:
        return None
    accepted = np.array([accepts_model(selector, model) for model in cards.models], dtype=np.bool_)
    return np.asarray(accepted[cards.model], dtype=np.bool_)


def by_uuid(cards: Cards, selector: CardSelector) -> Bools | None:
    """Cards with an accepted UUID; None where all are accepted."""
    if not (selector.use_uuids or selector.nouse_uuids):
        return None
    mask = np.full(cards.model.shape, not selector.use_uuids, dtype=np.bool_, order="F")
    for uuids, value in ((selector.use_uuids, True), (selector.nouse_uuids, False)):
        for uuid in uuids:
            for place in cards.places.get(uuid, ()):
                mask[place] = value
    return mask
