"""Who has been told to give back room of a card, and does not. Pure."""

from collections.abc import Mapping
from typing import Final

import msgspec

from device_plugin.sandbox import Entry
from vgpu.tier import GRAIN

OVERDUE_SECONDS: Final = 60.0  #: without anything given back: its work on the card has not paused once, and may never

Key = tuple[Entry, str]  #: a container, and the UUID of a card


class Overdue(msgspec.Struct, frozen=True):
    """A container that has given nothing back for OVERDUE_SECONDS."""

    entry: Entry
    card: str  #: UUID
    bytes: int  #: that it still has to give back
    again: bool  #: it was found before, and goes on


class _Debt(msgspec.Struct):
    least: int  #: bytes, so far
    since: float
    told: bool = False


class Debts:
    """Remembers the looks before; one for all containers."""

    def __init__(self) -> None:
        self._debts: dict[Key, _Debt] = {}

    def once(self, owed: Mapping[Key, int], now: float) -> list[Overdue]:
        """One look at who owes what, bytes; `now`: seconds of looks (device_plugin.looks).

        The one with most of each card; once more each time that it lasts as long again.
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
                late[key[1]] = key  # the largest one comes last
        found = []
        for key in late.values():
            debt = self._debts[key]
            found.append(Overdue(*key, owed[key], debt.told))
            debt.told, debt.since = True, now
        return found
