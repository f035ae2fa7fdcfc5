"""What the agent still has to do before it can do everything that it is there for. Thread-safe."""

import logging
import threading
import time
from typing import Final

CARDS: Final = "the agent has not asked the driver for its cards yet"
METRICS: Final = "the agent has not listed the containers' slices yet"
KUBELET: Final = "the kubelet has not registered the plugin yet"
PATIENCE_SECONDS: Final = 60.0  #: no roll-out of agents waits longer for one node's kubelet or driver

log = logging.getLogger(__name__)


class Readiness:
    """Ready when nothing is left; what was done once stays so.

    What is left PATIENCE_SECONDS after cards were found counts as done: this agent is as good as it will be, and others
    are to be replaced, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = [CARDS]
        self._until: float | None = None  # monotonic seconds

    def found_cards(self) -> None:
        """A node with cards: there is more to do."""
        with self._lock:
            self._left = [METRICS, KUBELET]
            self._until = time.monotonic() + PATIENCE_SECONDS

    def idle(self) -> None:
        """A node without cards: nothing is to be done until there are some."""
        self.done(CARDS)

    def done(self, what: str) -> None:
        with self._lock:
            self._left = [one for one in self._left if one != what]

    @property
    def left(self) -> str:
        """A sentence that says what is missing; empty: ready."""
        with self._lock:
            if self._left and self._until is not None and time.monotonic() > self._until:
                log.warning("reporting ready after %.0f s, although %s", PATIENCE_SECONDS, "; ".join(self._left))
                self._left = []
            return "; ".join(self._left)
