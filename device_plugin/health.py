"""Which cards work: XIDs and memory errors that the driver reports, cards that stop answering, and their recovery.

Sources: NVIDIA's XID catalogue for the errors that a program causes by itself; nvml.h for the event types.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pynvml

from device_plugin import vitals
from device_plugin.cards import Cards
from device_plugin.looks import Looks
from device_plugin.recovery import Recovery
from vgpu import contexts, names
from vgpu.devices import Inventory
from vgpu.inventory import InventoryError, StaleLibrary, session

log = logging.getLogger(__name__)

_WAIT_MS: Final = 1000  #: length of one wait for events; also the period of the probe
_LOOK_SECONDS: Final = 30.0  #: between two looks for cards that have not answered this agent yet
_FRUITLESS: Final = 10  #: looks without a find, after which looks become rarer
_LOOK_SELDOM_SECONDS: Final = 300.0  #: each look stops the watch for errors of the other cards for a moment
_SILENT: Final = 3  #: unanswered questions after which a card counts as lost, where the error does not say so
_HANG_SECONDS: Final = (
    30.0  #: a question to the driver that takes longer will not be answered: asking blocks in the kernel
)
CENSUS_SECONDS: Final = _HANG_SECONDS + contexts.LEARN_SECONDS  #: the same for a census
_EVENTS: Final = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError

Tell = Callable[[str, str], None]


class Health:
    """One thread that asks the driver, and one that notices when the driver hangs.

    `tell(reason, sentence)` makes an event about this node; `count(uuid, xid)` sees every XID.
    """

    def __init__(
        self,
        cards: Cards,
        tell: Tell,
        *,
        ignored: Collection[int],
        recovery_seconds: float,
        count: Callable[[str, int], None],
        census: Callable[[], Inventory],
    ) -> None:
        """`recovery_seconds`: an unhealthy card that is quiet for this long is taken back; 0: never by itself.

        `census` returns the cards as the driver shows them now; raises InventoryError.
        """
        self._cards = cards
        self._tell = tell
        self._ignored = frozenset(ignored)
        self._count = count
        self._census = census
        self._looked = -math.inf  # monotonic seconds
        self._fruitless = 0  # looks in a row
        self._stale = False  # a look has found a driver of another version than the library
        self._lock = threading.RLock()  # guards the recovery, and its agreement with the cards
        self._recovery = Recovery(recovery_seconds)
        self._judge = vitals.Judge()
        self._complaint = ""
        self._stopping = threading.Event()
        self._question: tuple[float, str] | None = (
            None  # seconds within which it has to be answered; of a card, "": of the driver
        )
        self._threads = [
            threading.Thread(target=self._run, name="health", daemon=True),
            threading.Thread(target=self._notice, name="hangs", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def suspect(self, uuid: str, reason: str) -> None:
        """Records a card that was unhealthy before this agent started."""
        self._trouble(uuid, reason or "it was unhealthy when the agent started")

    def heal(self, uuids: Collection[str]) -> None:
        """Takes back cards that an administrator calls repaired. A card that does not answer is found again at once."""
        for uuid in sorted(uuids):
            if uuid not in self._cards.by_uuid:
                log.warning("annotation %s lists card %s, which is not on this node", names.HEAL, uuid)
                continue
            self._looked, self._fruitless = -math.inf, 0  # look at once, in case the card is absent
            with self._lock:
                self._recovery.forgive(uuid, time.monotonic())
                self._back(uuid, "an administrator marked it as repaired")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._due():
                    with self._asking(seconds=CENSUS_SECONDS):
                        self._look()
                with ExitStack() as stack:
                    with self._asking():
                        stack.enter_context(session())
                    self._watch()
                self._complaint, self._stale = "", False
            except (InventoryError, pynvml.NVMLError) as error:
                if str(error) != self._complaint:
                    log.warning("cannot watch the health of the cards: %s; retrying", error)
                    self._complaint = str(error)
                self._stale = isinstance(error, StaleLibrary)
                if isinstance(error, InventoryError):
                    for uuid in self._present():
                        self._trouble(uuid, str(error))
            except Exception as error:
                # A driver may give unexpected answers: the other cards are still watched.
                if str(error) != self._complaint:
                    log.exception("cannot watch the health of the cards; retrying")
                    self._complaint = str(error)
            self._stopping.wait(_WAIT_MS / 1000)

    def _notice(self) -> None:
        looks, asked, since = Looks(), None, 0.0
        while not self._stopping.wait(_WAIT_MS / 1000):
            question, now = self._question, looks.at(time.monotonic())
            if question is not asked:
                asked, since = question, now
            if question is not None and now - since > question[0]:
                for uuid in [question[1]] if question[1] else self._present():
                    self._trouble(uuid, "the driver hangs while the agent queries the card")

    @contextmanager
    def _asking(self, uuid: str = "", seconds: float = _HANG_SECONDS) -> Iterator[None]:
        """Marks the time of a question to the driver, about one card or (empty) about all cards."""
        self._question = seconds, uuid
        try:
            yield
        finally:
            self._question = None

    def _watch(self) -> None:
        """Watches until a card does not answer, or until the next look for cards.

        A look needs a new session, because only a new session finds new cards.
        """
        with self._asking():
            events = self._register()
        try:
            while not self._stopping.is_set():
                probe = time.monotonic() + _WAIT_MS / 1000
                while not self._stopping.is_set() and time.monotonic() < probe:
                    if events is None:
                        self._stopping.wait(_WAIT_MS / 1000)
                    else:
                        with self._asking():
                            self._next_event(events)
                if not self.probe() or self._due():
                    return
        finally:
            if events is not None:
                pynvml.nvmlEventSetFree(events)

    def _due(self) -> bool:
        pause = _LOOK_SECONDS if self._fruitless < _FRUITLESS else _LOOK_SELDOM_SECONDS
        return (self._stale or not self._cards.complete) and time.monotonic() - self._looked >= pause

    def _look(self) -> None:
        """Accepts cards that did not answer before. A card that had trouble before this agent still has it."""
        self._looked, self._fruitless = time.monotonic(), self._fruitless + 1
        try:
            now = self._census()
        except InventoryError as error:
            log.debug("found no card: %s", error)
            return
        before = self._cards.absent
        for gpu in now.devices:
            if before.get(gpu.uuid):
                self._trouble(gpu.uuid, before[gpu.uuid])
        found = self._cards.found(now)
        if found or self._cards.complete:
            self._fruitless = 0
        for gpu in found:
            if not before.get(gpu.uuid):
                self._tell(names.EVENT_HEALTHY, f"card {gpu.uuid} takes pods: it answers the driver")

    def _present(self) -> list[str]:
        """The cards that have answered this agent."""
        absent = self._cards.absent
        return [uuid for uuid in self._cards.by_uuid if uuid not in absent]

    def _register(self) -> Any:
        """An event set with every card that supports it; None when no card does."""
        events = pynvml.nvmlEventSetCreate()
        watched = 0
        for uuid in self._present():
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                known = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                pynvml.nvmlDeviceRegisterEvents(handle, known & _EVENTS, events)
                watched += 1
            except pynvml.NVMLError as error:
                level = logging.DEBUG if self._recovery.ill(uuid) else logging.WARNING
                log.log(level, "card %s reports no XIDs: %s", uuid, error)
        if watched:
            log.debug("watching %d cards for errors", watched)
            return events
        pynvml.nvmlEventSetFree(events)
        return None

    def _next_event(self, events: Any) -> None:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, _WAIT_MS)
            uuid = str(pynvml.nvmlDeviceGetUUID(event.device)) if event.device else ""
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                log.debug("NVML returned no event: %s", error)  # from a lost card: the probe finds out which
                self._stopping.wait(_WAIT_MS / 1000)
            return
        if event.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            self._trouble(uuid, "its memory had an error that ECC could not correct")
            return
        xid = int(event.eventData)
        self._count(uuid, xid)
        if xid in self._ignored:
            log.info("card %s: XID %d is an error of a program; the card stays healthy", uuid, xid)
        else:
            self._trouble(uuid, f"XID {xid}")

    def probe(self) -> bool:
        """Asks every card; takes back cards that are well and have been quiet for long enough.

        False: a card did not answer.
        """
        all_answer = True
        for uuid in self._present():
            now = time.monotonic()
            if not self._recovery.due(uuid, now):
                continue
            try:
                with self._asking(uuid):
                    seen = vitals.read(uuid)
            except pynvml.NVMLError as error:
                all_answer = False
                if self._recovery.silent(uuid, now) >= _SILENT or error.value in vitals.LOST:
                    self._trouble(uuid, f"it does not answer the driver: {error}")
                continue
            with self._lock:
                self._recovery.answered(uuid)
                trouble = self._judge.trouble(uuid, seen, now)
                if trouble:
                    self._trouble(uuid, trouble)
                elif self._recovery.recovered(uuid, now):
                    self._recovery.take_back(uuid, now)
                    self._back(uuid, "it has been without trouble for long enough")
        return all_answer

    def _trouble(self, uuid: str, reason: str) -> None:
        if uuid not in self._cards.by_uuid:
            return  # the card is not shared
        with self._lock:
            self._recovery.trouble(uuid, time.monotonic())
            if self._cards.sicken(uuid, reason):
                self._tell(names.CONDITION_UNHEALTHY, f"card {uuid}: {reason}; it takes no new pods")

    def _back(self, uuid: str, why: str) -> None:
        if self._cards.heal(uuid):
            self._tell(names.EVENT_HEALTHY, f"card {uuid} takes pods again: {why}")
