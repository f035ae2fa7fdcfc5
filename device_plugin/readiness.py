"""What is still missing before the agent can do all of its work. Thread-safe."""

import logging
import threading
import time
from typing import Final

CARDS: Final = "the agent has not asked the driver for its cards yet"
METRICS: Final = "the agent has not listed the containers' slices yet"
KUBELET: Final = "the kubelet has not registered the plugin yet"
PATIENCE_SECONDS: Final = 60.0  #: a rollout of agents waits no longer than this for one node's kubelet or driver

log = logging.getLogger(__name__)


class Readiness:
    """Ready when nothing is missing; a finished task stays finished.

    PATIENCE_SECONDS after cards were found, missing tasks count as finished: waiting longer does not help this agent,
    and the rollout has to replace other agents, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = [CARDS]
        self._until: float | None = None  # monotonic seconds

    def found_cards(self) -> None:
        """The node has cards: there is more to do."""
        with self._lock:
            self._left = [METRICS, KUBELET]
            self._until = time.monotonic() + PATIENCE_SECONDS

    def idle(self) -> None:
        """The node has no cards: there is nothing to do until it has some."""
        self.done(CARDS)

    def done(self, what: str) -> None:
        with self._lock:
            self._left = [one for one in self._left if one != what]

    @property
    def left(self) -> str:
        """A sentence that says what is missing; empty: the agent is ready."""
        with self._lock:
            if self._left and self._until is not None and time.monotonic() > self._until:
                log.warning("reporting ready after %.0f s, although %s", PATIENCE_SECONDS, "; ".join(self._left))
                self._left = []
            return "; ".join(self._left)
