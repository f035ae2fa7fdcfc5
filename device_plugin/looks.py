"""A clock for decisions by time-out: it runs only while the program looks. Pure.

On an overloaded node or a paused machine, a program may wake up minutes later without having looked in between. That
something did not happen in these minutes proves nothing.
"""

from typing import Final

LOOK_SECONDS: Final = 2.0  #: time that one look can stand for, where a look happens every second


class Looks:
    def __init__(self, longest: float = LOOK_SECONDS) -> None:
        self._longest = longest
        self._last: float | None = None
        self._sum = 0.0

    def at(self, now: float) -> float:
        """Seconds of looks so far; `now`: seconds of a monotonic clock."""
        self._sum += 0.0 if self._last is None else min(max(now - self._last, 0.0), self._longest)
        self._last = now
        return self._sum
