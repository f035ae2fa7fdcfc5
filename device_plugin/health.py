"""Which cards work: XIDs that the driver reports, cards that stop answering, and their recovery.

Sources: NVIDIA's XID catalogue for the errors that a program makes by itself; nvml.h for the event types.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final

import pynvml

from device_plugin.cards import Cards
from vgpu import names
from vgpu.inventory import InventoryError, readings, session

log = logging.getLogger(__name__)

#: Errors of the application, not of the card: graphics engine exception, page fault, reset channel, preemptive
#: cleanup, video processor exception
IGNORED_XIDS: Final = frozenset({13, 31, 43, 45, 68})
RECOVERY_SECONDS: Final = 300.0  #: a card that answers and reports nothing for so long is taken back
_WAIT_MS: Final = 1000  #: one wait for events; also the period of the probe


class Health:
    """One thread; `tell(reason, sentence)` makes an event about this node."""

    def __init__(
        self,
        cards: Cards,
        tell: Callable[[str, str], None],
        *,
        ignored: Collection[int] = IGNORED_XIDS,
        recovery_seconds: float = RECOVERY_SECONDS,
    ) -> None:
        self._cards = cards
        self._tell = tell
        self._ignored = frozenset(ignored)
        self._recovery = recovery_seconds
        self._since: dict[str, float] = {}  # the last sign of trouble of each unhealthy card, monotonic seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def suspect(self, uuid: str) -> None:
        """A card that was unhealthy before this agent started."""
        self._trouble(uuid, "it was unhealthy when the agent started")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with session():
                    self._watch()
            except InventoryError as error:
                for uuid in self._cards.by_uuid:
                    self._trouble(uuid, str(error))
            except pynvml.NVMLError as error:
                log.warning("health of the cards is not watched: %s; trying again", error)
            self._stopping.wait(_WAIT_MS / 1000)

    def _watch(self) -> None:
        events = self._register()
        try:
            while not self._stopping.is_set():
                if events is None:
                    self._stopping.wait(_WAIT_MS / 1000)
                else:
                    self._next_event(events)
                self._probe()
        finally:
            if events is not None:
                pynvml.nvmlEventSetFree(events)

    def _register(self) -> Any:
        """An event set with every card that supports it; None when none does."""
        events = pynvml.nvmlEventSetCreate()
        watched = 0
        for gpu in self._cards.inventory.devices:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                watched += 1
            except pynvml.NVMLError as error:
                log.warning("card %s reports no XIDs: %s", gpu.uuid, error)
        if watched:
            return events
        pynvml.nvmlEventSetFree(events)
        return None

    def _next_event(self, events: Any) -> None:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return
            raise
        xid = int(event.eventData)
        if event.eventType != pynvml.nvmlEventTypeXidCriticalError or xid in self._ignored:
            log.info("XID %d is an error of a program, the card stays", xid)
            return
        self._trouble(str(pynvml.nvmlDeviceGetUUID(event.device)), f"XID {xid}")

    def _probe(self) -> None:
        """Cards that do not answer are lost; those that answer, quiet for long enough, are back."""
        answering = readings()
        now = time.monotonic()
        for uuid in self._cards.by_uuid:
            if uuid not in answering:
                self._trouble(uuid, "it does not answer the driver")
            elif uuid in self._since and now - self._since[uuid] >= self._recovery:
                del self._since[uuid]
                self._cards.heal(uuid)

    def _trouble(self, uuid: str, reason: str) -> None:
        self._since[uuid] = time.monotonic()
        if self._cards.sicken(uuid, reason):
            self._tell(names.EVENT_UNHEALTHY, f"card {uuid}: {reason}; it takes no new pods")
