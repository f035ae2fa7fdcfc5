"""Decides which cards a pod accepts: lists of models and UUIDs."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

import numpy as np

from vgpu.placement.cards import Bools, Cards
from vgpu.resources import CardSelector

#: Words in front of a model, which NVML's name has or lacks, depending on driver and time: "Tesla T4", "NVIDIA T4"
_MAKER: Final = "nvidia"
_BRANDS: Final = ("tesla", "geforce", "quadro")
#: Suffix of NVIDIA's feature discovery where NVIDIA's own plugin shares cards by time (k8s-device-plugin, README)
_SHARED: Final = "-shared"


def matches(model: str, pattern: str) -> bool:
    """Whether the pattern is the whole name, a glob over the whole name, or a word of it.

    Case does not matter; a blank, "-" and "_" are alike. The maker and the brand in front may be missing, because node
    labels spell "NVIDIA-A100-SXM4-40GB" and "Tesla-T4". "A10" is a word of "NVIDIA A10" and of "NVIDIA A10-24Q", not of
    "NVIDIA A100-SXM4-40GB". A Quadro without its brand must otherwise have the same name: "NVIDIA RTX 4000 Ada
    Generation" is no "Quadro RTX 4000".
    """
    if fnmatchcase(model.casefold(), pattern.casefold()):
        return True
    name, wanted = _words(model), _words(pattern).removesuffix(_SHARED)
    brand, wanted_brand = _brand(name), _brand(wanted)
    bare, wanted_bare = _bare(name), _bare(wanted)
    if not wanted_bare:  # only a maker or a brand
        return _holds(name, wanted)
    if brand and wanted_brand and brand != wanted_brand:
        return False
    if wanted_brand == "quadro" and not brand:
        return bare == wanted_bare
    if any(sign in wanted for sign in "*?["):
        return fnmatchcase(name.removeprefix(f"{_MAKER}-"), wanted) or fnmatchcase(bare, wanted_bare)
    return _holds(bare, wanted_bare)


def _words(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.casefold()).strip("-")


def _brand(name: str) -> str:
    return next((brand for brand in _BRANDS if brand in name.split("-")[:2]), "")


def _bare(name: str) -> str:
    """The name without the maker and the brand in front."""
    return re.sub(rf"^(?:(?:{'|'.join((_MAKER, *_BRANDS))})(?:-|$))+", "", name)


def _holds(name: str, words: str) -> bool:
    return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", name) is not None


def _any(model: str, patterns: Iterable[str]) -> bool:
    return any(matches(model, pattern) for pattern in patterns)


def accepts_model(selector: CardSelector, model: str) -> bool:
    """Whether both lists accept the model: it must be among the wanted models, if any, and not among the unwanted."""
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
