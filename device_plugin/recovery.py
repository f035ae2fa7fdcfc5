"""When an unhealthy card is asked again, and when it is taken back. Pure; times are seconds of one monotonic clock.

A card comes back after it has been quiet for a while. One that falls ill again soon has to be quiet for twice as long,
and so on; one that does not answer is asked ever less often, since asking may hang for seconds.
"""

import math
from typing import Final

import msgspec

RELAPSE_SECONDS: Final = 3600.0  #: ill again within this time after it came back: a relapse
LONGEST: Final = 8  #: multiple of the quiet time, after relapses
PROBE_SECONDS: Final = (1.0, 30.0)  #: between two questions to a card that does not answer: first and longest


class _Card(msgspec.Struct):
    trouble: float = -math.inf  #: the last sign of it; -inf: healthy
    back: float = -math.inf  #: when it was taken back
    factor: int = 1
    silent: int = 0  #: questions in a row without an answer
    next: float = -math.inf  #: when it is asked again


class Recovery:
    def __init__(self, quiet: float) -> None:
        """`quiet`: seconds without trouble after which a card is taken back; 0: only when somebody says so."""
        self._quiet = quiet
        self._cards: dict[str, _Card] = {}

    def ill(self, uuid: str) -> bool:
        return self._card(uuid).trouble > -math.inf

    def trouble(self, uuid: str, now: float) -> None:
        """A sign that the card does not work."""
        card = self._card(uuid)
        if not self.ill(uuid):
            relapse = now - card.back < RELAPSE_SECONDS
            card.factor = min(2 * card.factor, LONGEST) if relapse else 1
        card.trouble = now

    def due(self, uuid: str, now: float) -> bool:
        """It is time to ask the card."""
        return now >= self._card(uuid).next

    def silent(self, uuid: str, now: float) -> int:
        """The card did not answer; how often in a row."""
        card = self._card(uuid)
        card.silent += 1
        first, longest = PROBE_SECONDS
        card.next = now + min(first * 2.0 ** min(card.silent - 1, 16), longest)
        return card.silent

    def answered(self, uuid: str) -> None:
        card = self._card(uuid)
        card.silent, card.next = 0, -math.inf

    def recovered(self, uuid: str, now: float) -> bool:
        """An unhealthy card has been quiet for long enough."""
        card = self._card(uuid)
        return self.ill(uuid) and bool(self._quiet) and now - card.trouble >= self._quiet * card.factor

    def take_back(self, uuid: str, now: float) -> None:
        card = self._card(uuid)
        card.trouble, card.back, card.silent, card.next = -math.inf, now, 0, -math.inf

    def forgive(self, uuid: str, now: float) -> None:
        """Somebody has repaired the card: it is taken back, and what it did before does not count."""
        self.take_back(uuid, now)
        self._cards[uuid].back, self._cards[uuid].factor = -math.inf, 1

    def _card(self, uuid: str) -> _Card:
        return self._cards.setdefault(uuid, _Card())
