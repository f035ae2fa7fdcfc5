"""What the parts of the agent know about this node's cards: inventory, health, cordon. Thread-safe, no I/O."""

import logging
import threading
from collections.abc import Callable, Mapping

import msgspec

from vgpu.devices import Gpu, Inventory

log = logging.getLogger(__name__)


class Cards:
    """The cards of this node; listeners are called (from any thread) after every change."""

    def __init__(self, inventory: Inventory) -> None:
        self._lock = threading.Lock()
        self._inventory = inventory
        self._sick: dict[str, str] = {}
        self._reasons: dict[str, set[str]] = {}  # of each unhealthy card, those that were logged
        self._cordoned: frozenset[str] = frozenset()
        self._foreign: frozenset[str] = frozenset()
        self._rival = ""
        self._listeners: list[Callable[[], None]] = []

    @property
    def inventory(self) -> Inventory:
        """The cards with their health as of now."""
        with self._lock:
            devices = tuple(
                msgspec.structs.replace(
                    gpu,
                    healthy=gpu.uuid not in self._sick,
                    trouble=self._sick.get(gpu.uuid, ""),
                    foreign=gpu.uuid in self._foreign,
                )
                for gpu in self._inventory.devices
            )
            return msgspec.structs.replace(self._inventory, devices=devices)

    @property
    def by_uuid(self) -> Mapping[str, Gpu]:
        return {gpu.uuid: gpu for gpu in self.inventory.devices}

    @property
    def cordoned(self) -> frozenset[str]:
        return self._cordoned

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after every change until the returned function is called."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return stop

    def sicken(self, uuid: str, reason: str) -> bool:
        """Marks a card unhealthy; tells whether that is news.

        Another reason is kept and not told to listeners: a card may have a hundred errors a second, and whoever
        publishes looks again by itself.
        """
        with self._lock:
            news = uuid not in self._sick
            self._sick[uuid] = reason
            reasons = self._reasons.setdefault(uuid, set())
            log.log(logging.DEBUG if reason in reasons else logging.WARNING, "card %s is unhealthy: %s", uuid, reason)
            reasons.add(reason)
        if news:
            self._tell()
        return news

    def heal(self, uuid: str) -> bool:
        """Marks a card healthy; tells whether that is news."""
        with self._lock:
            news = self._sick.pop(uuid, None) is not None
            self._reasons.pop(uuid, None)
        if news:
            log.info("card %s is healthy again", uuid)
            self._tell()
        return news

    def sick(self) -> dict[str, str]:
        """UUID → reason of every unhealthy card."""
        with self._lock:
            return dict(self._sick)

    def cordon(self, uuids: frozenset[str]) -> None:
        """These cards take no new pods (node annotation `vgpu.io/cordon`)."""
        with self._lock:
            news = uuids != self._cordoned
            self._cordoned = uuids
        if news:
            log.info("cordoned cards: %s", ", ".join(sorted(uuids)) or "none")
            self._tell()

    def used_by_others(self, uuids: frozenset[str]) -> None:
        """Processes that are no containers of ours use these cards."""
        with self._lock:
            news = uuids != self._foreign
            self._foreign = uuids
        if news:
            self._tell()

    @property
    def rival(self) -> str:
        """A sentence about another device plugin that is in the way; empty: none is."""
        return self._rival

    def contested(self, sentence: str) -> None:
        """Another device plugin is in the way; empty: none is any more."""
        self._rival = sentence
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
