"""Long background work in a process whose other threads have to answer soon."""

import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

WORK_SECONDS: Final = 0.001  #: length of one piece of work: only one thread of Python runs at once
LOOK_EVERY: Final = 32  #: items between two looks at the clock


def gently(items: Iterable[T]) -> Iterator[T]:
    """The same items, with pauses as long as the caller's work between them."""
    begin = time.monotonic()
    for number, item in enumerate(items):
        if not number % LOOK_EVERY and (worked := time.monotonic() - begin) > WORK_SECONDS:
            time.sleep(worked)
            begin = time.monotonic()
        yield item
