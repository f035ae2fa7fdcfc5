"""Device ids, the tokens that the kubelet hands to containers: `<uuid>::<n>`. Pure."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from vgpu.devices import Gpu

_SEPARATOR: Final = "::"


def of(gpu: Gpu) -> list[str]:
    """All ids of a card: one for each slice that the card may be cut into."""
    return [f"{gpu.uuid}{_SEPARATOR}{n}" for n in range(gpu.slots)]


def card(device_id: str) -> str:
    """The UUID of the card that an id belongs to."""
    return device_id.partition(_SEPARATOR)[0]


def key(device_ids: Iterable[str]) -> str:
    """The name of a set of ids: first 16 hex digits of the SHA-256 of the sorted ids joined by ","."""
    return hashlib.sha256(",".join(sorted(device_ids)).encode()).hexdigest()[:16]


def prefer(available: Collection[str], required: Sequence[str], size: int, cards: Sequence[str]) -> list[str]:
    """`size` ids: the `required` ones, then one of each of `cards` (UUIDs), then ids of the cards with most free ids.

    The ids come from as many different cards as possible; the list is shorter when fewer ids are available.
    """
    chosen = list(required[:size])
    free: dict[str, list[str]] = {}
    for device_id in sorted(set(available) - set(chosen), key=_order):
        free.setdefault(card(device_id), []).append(device_id)
    taken = Counter(card(device_id) for device_id in chosen)
    while len(chosen) < size and free:
        uuid = min(free, key=lambda u: (taken[u], u not in cards, -len(free[u]), u))
        chosen.append(free[uuid].pop(0))
        taken[uuid] += 1
        if not free[uuid]:
            del free[uuid]
    return chosen


def _order(device_id: str) -> tuple[str, int, str]:
    uuid, _, number = device_id.partition(_SEPARATOR)
    return uuid, int(number) if number.isdecimal() else 0, number
