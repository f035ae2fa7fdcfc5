"""A clock for decisions by time-out: it runs only while somebody looks.

A node that is short of time, a machine that was paused: whoever wakes up then finds that minutes have passed, and has
seen nothing of them. That something did not come meanwhile proves nothing. Pure.
"""

from typing import Final

LOOK_SECONDS: Final = 2.0  #: what one look can stand for, where looks are made every second


class Looks:
    def __init__(self, longest: float = LOOK_SECONDS) -> None:
        self._longest = longest
        self._last: float | None = None
        self._sum = 0.0

    def at(self, now: float) -> float:
        """Seconds of looks so far; `now`: of a monotonic clock."""
        self._sum += 0.0 if self._last is None else min(max(now - self._last, 0.0), self._longest)
        self._last = now
        return self._sum
