"""Finds containers that were asked to give back room of a card, and do not. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from device_plugin.sandbox import Entry
from vgpu.tier import GRAIN

#: time without any room given back: the container's work on the card has not paused once, and may never pause
OVERDUE_SECONDS: Final = 60.0

Key = tuple[Entry, str]  #: a container, and the UUID of a card


class Overdue(msgspec.Struct, frozen=True):
    """A container that has given nothing back for OVERDUE_SECONDS."""

    entry: Entry
    card: str  #: UUID
    bytes: int  #: bytes that the container still has to give back
    again: bool  #: the debt was reported before, and continues


class _Debt(msgspec.Struct):
    least: int  #: least bytes owed so far
    since: float
    told: bool = False


class Debts:
    """Remembers the earlier looks; one object for all containers."""

    def __init__(self) -> None:
        self._debts: dict[Key, _Debt] = {}

    def once(self, owed: Mapping[Key, int], now: float) -> list[Overdue]:
        """One look at the debts (bytes) of the containers; `now`: seconds of looks (device_plugin.looks).

        Returns the container with the largest overdue debt on each card, and again each time the debt lasts as long
        again.
        """
        self._debts = {key: debt for key, debt in self._debts.items() if owed.get(key)}
        late: dict[str, Key] = {}
        for key, amount in sorted(owed.items(), key=lambda one: one[1]):
            if not amount:
                continue
            debt = self._debts.setdefault(key, _Debt(amount, now))
            if amount <= debt.least - GRAIN:
                debt.least, debt.since = amount, now
            elif now - debt.since > OVERDUE_SECONDS:
                late[key[1]] = key  # the largest debt comes last
        found = []
        for key in late.values():
            debt = self._debts[key]
            found.append(Overdue(*key, owed[key], debt.told))
            debt.told, debt.since = True, now
        return found
