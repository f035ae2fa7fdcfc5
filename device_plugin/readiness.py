"""What the agent still has to do before it can do everything that it is there for. Thread-safe, no I/O."""

import threading
from typing import Final

CARDS: Final = "the driver has not been asked for its cards yet"
METRICS: Final = "what containers hold is not known yet"
KUBELET: Final = "the kubelet has not registered the plugin yet"


class Readiness:
    """Ready when nothing is left; what was done once stays so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = [CARDS]

    def found_cards(self) -> None:
        """A node with cards: there is more to do."""
        with self._lock:
            self._left = [METRICS, KUBELET]

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
            return "; ".join(self._left)
