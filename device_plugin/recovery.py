"""Decides when to ask an unhealthy card again, and when to take it back.

Pure; times are seconds of one monotonic clock. A card comes back after a quiet time. If a card fails again within an
hour of its return, its quiet time doubles, up to eight times the usual one. A card that does not answer is asked less
and less often, because a question may hang for seconds.
"""

import math
from typing import Final

import msgspec

RELAPSE_SECONDS: Final = 3600.0  #: a card that fails again within this time after its return has a relapse
LONGEST: Final = 8  #: the quiet time grows by relapses to at most this multiple of the usual one
PROBE_SECONDS: Final = (1.0, 30.0)  #: between two questions to a card that does not answer: first and longest pause


class _Card(msgspec.Struct):
    trouble: float = -math.inf  #: the last sign of trouble; -inf: healthy
    back: float = -math.inf  #: when the card was taken back
    factor: int = 1
    silent: int = 0  #: questions in a row without an answer
    next: float = -math.inf  #: when to ask the card again


class Recovery:
    def __init__(self, quiet: float) -> None:
        """`quiet`: seconds without trouble after which a card is taken back; 0: only when an administrator says so."""
        self._quiet = quiet
        self._cards: dict[str, _Card] = {}

    def ill(self, uuid: str) -> bool:
        return self._card(uuid).trouble > -math.inf

    def trouble(self, uuid: str, now: float) -> None:
        """Records a sign that the card does not work."""
        card = self._card(uuid)
        if not self.ill(uuid):
            relapse = now - card.back < RELAPSE_SECONDS
            card.factor = min(2 * card.factor, LONGEST) if relapse else 1
        card.trouble = now

    def due(self, uuid: str, now: float) -> bool:
        """Whether it is time to ask the card."""
        return now >= self._card(uuid).next

    def silent(self, uuid: str, now: float) -> int:
        """Records that the card did not answer; returns how often in a row."""
        card = self._card(uuid)
        card.silent += 1
        first, longest = PROBE_SECONDS
        card.next = now + min(first * 2.0 ** min(card.silent - 1, 16), longest)
        return card.silent

    def answered(self, uuid: str) -> None:
        card = self._card(uuid)
        card.silent, card.next = 0, -math.inf

    def recovered(self, uuid: str, now: float) -> bool:
        """Whether an unhealthy card has been quiet for long enough."""
        card = self._card(uuid)
        return self.ill(uuid) and bool(self._quiet) and now - card.trouble >= self._quiet * card.factor

    def take_back(self, uuid: str, now: float) -> None:
        card = self._card(uuid)
        card.trouble, card.back, card.silent, card.next = -math.inf, now, 0, -math.inf

    def forgive(self, uuid: str, now: float) -> None:
        """Records that an administrator repaired the card: it is taken back, and its earlier trouble does not count."""
        self.take_back(uuid, now)
        self._cards[uuid].back, self._cards[uuid].factor = -math.inf, 1

    def _card(self, uuid: str) -> _Card:
        return self._cards.setdefault(uuid, _Card())
