"""The queue for slices, in order of arrival: each waiter has a ticket file, and holds a lock on it."""

import os
from pathlib import Path

import msgspec

from vgpu.workstation import locks


class Ticket(msgspec.Struct, frozen=True):
    """A place in the queue."""

    number: int
    accepts: frozenset[str]  #: UUIDs of the cards that could ever serve this request


class Queue:
    """The waiting tickets below one state directory. Every method needs `SliceStore.locked`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "queue"
        self._folder.mkdir(mode=0o755, exist_ok=True)
        self._held: dict[int, int] = {}  # number → descriptor, for the tickets of this process

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012d}"

    def enter(self, accepts: frozenset[str]) -> Ticket:
        """Takes the last place."""
        waiting = self.waiting()
        ticket = Ticket(waiting[-1].number + 1 if waiting else 1, accepts)
        path = self._path(ticket.number)
        path.unlink(missing_ok=True)
        self._held[ticket.number] = locks.hold(path)
        path.write_bytes(msgspec.json.encode(ticket))
        return ticket

    def holds(self, ticket: Ticket) -> bool:
        """Whether the place still exists: it is gone when the state directory was removed."""
        return self._path(ticket.number).exists()

    def leave(self, ticket: Ticket) -> None:
        """Gives the place back, with or without a slice."""
        self._path(ticket.number).unlink(missing_ok=True)
        os.close(self._held.pop(ticket.number))

    def waiting(self) -> list[Ticket]:
        """Tickets of living waiters, oldest first; removes the other tickets."""
        found = []
        for path in sorted(self._folder.iterdir()):
            if locks.is_held(path):
                found.append(msgspec.json.decode(path.read_bytes(), type=Ticket))
            else:
                path.unlink(missing_ok=True)
        return found

    def ahead(self, ticket: Ticket | None) -> list[Ticket]:
        """The tickets before `ticket`; all tickets for a caller without one."""
        return [other for other in self.waiting() if ticket is None or other.number < ticket.number]
