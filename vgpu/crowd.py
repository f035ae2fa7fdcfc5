"""The connections of a listener: how much they hold together, and which connection has to go when that is too much."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol


class Member(Protocol):
    """A connection, as a crowd sees it."""

    peer: str  #: its address
    since: float  #: since when it has waited, by the monotonic clock
    answering: bool  #: its request has come as a whole
    held: int  #: bytes of its body
    owed: int  #: bytes of the answer that its client has not read yet

    def drop(self) -> None: ...

    def postpone(self, seconds: float) -> None: ...


class Crowd:
    """All connections of a listener; decides which connection has to go. Used only by the event loop."""

    def __init__(self, most: int, most_of_peer: int, max_bytes: int, most_owed: int) -> None:
        """`most`: connections, `most_of_peer` from one address. `max_bytes`: of all bodies, `most_owed`: of all answers
        that clients have not read yet, without the newest answer."""
        self._most, self._most_of_peer = most, most_of_peer
        self._max_bytes, self._most_owed = max_bytes, most_owed
        self._all: set[Member] = set()
        self._of_peer: Counter[str] = Counter()
        self._bytes = 0
        self._owed = 0

    @property
    def size(self) -> int:
        return len(self._all)

    def add(self, one: Member) -> None:
        if self._of_peer[one.peer] >= self._most_of_peer:
            self._drop(other for other in self._all if other.peer == one.peer)
        if len(self._all) >= self._most:
            self.shrink()
        self._all.add(one)
        self._of_peer[one.peer] += 1

    def remove(self, one: Member) -> None:
        if one not in self._all:
            return
        self._all.discard(one)
        self._bytes -= one.held
        self._owed -= one.owed
        self._of_peer[one.peer] -= 1
        if not self._of_peer[one.peer]:
            del self._of_peer[one.peer]

    def shrink(self) -> None:
        """Closes one connection of the peer that has most of the waiting connections."""
        waiting = Counter(one.peer for one in self._all if not one.answering)
        most = max(waiting.values(), default=0)
        self._drop(one for one in self._all if waiting[one.peer] == most)

    def hold(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._max_bytes:
            self._drop(one for one in self._all if one.held)

    def owe(self, one: Member, size: int) -> None:
        """Records that a client must read an answer of `size` bytes; 0: it has read the answer.

        A single answer may have any size.
        """
        if one not in self._all:
            return
        self._owed += size - one.owed
        one.owed = size
        while self._owed > self._most_owed and self._drop(
            other for other in self._all if other.owed and other is not one
        ):
            pass

    def postpone(self, seconds: float) -> None:
        """Extends all deadlines."""
        for one in self._all:
            one.postpone(seconds)

    def end(self) -> None:
        for one in self._all:
            if not one.answering:
                one.drop()

    def _drop(self, some: Iterable[Member]) -> bool:
        """Closes the connection that has waited longest; returns whether there was one."""
        waiting = [one for one in some if not one.answering]
        if not waiting:
            return False
        oldest = min(waiting, key=lambda one: one.since)
        oldest.drop()
        self.remove(oldest)
        return True
