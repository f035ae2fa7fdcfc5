"""Once a turn: finds which processes really use the cards, and acts on it."""

import logging
import time
from collections.abc import Callable, Mapping

import pynvml

from device_plugin.backstop import Backstop, larger
from device_plugin.bypass import Bypass
from device_plugin.cards import Cards
from device_plugin.foreign import TURNS, Foreign, Observed, Picture, Process, Region, Regions, attribute, process_of
from device_plugin.pod_events import Consequences
from device_plugin.pods import Pods
from device_plugin.sandbox import Entry
from vgpu import names, native
from vgpu.allocation import Held
from vgpu.inventory import InventoryError
from vgpu.tier import MIB

log = logging.getLogger(__name__)


class Watch:
    """Called by one thread."""

    def __init__(
        self,
        cards: Cards,
        pods: Pods,
        consequences: Consequences,
        *,
        evict: bool,
        look: Callable[[], list[Observed]],
        who: Callable[[int], Process | None] = process_of,
        strangers: Callable[[], Mapping[str, Mapping[str, Held]]],
        end_bypass: bool = False,
        bypass: Bypass | None = None,
    ) -> None:
        """`evict`: a pod is evicted, not only reported, when a container has more of a card than it was charged, or
        keeps what it has to give back.

        `end_bypass`: the same when a process of a container uses a card without the library (`bypass` finds such
        processes).

        `look` returns the processes on all cards, `who` returns more about one process. `strangers` returns the pods
        (UIDs) that another version has started, and what is counted for each pod, by card.
        """
        self._cards = cards
        self._pods = pods
        self._consequences = consequences
        self._evict = evict
        self._look = look
        self._who = who
        self._strangers = strangers
        self._foreign = Foreign()
        self._backstop = Backstop()
        self._bypass = bypass or Bypass()
        self._end_bypass = end_bypass
        self._others: Mapping[str, Mapping[int, int]] = {}
        self._strange: Mapping[str, Mapping[str, int]] = {}  # card → pod uid → bytes
        self._counted: Mapping[str, Mapping[str, Held]] = {}  # pod uid → card → what it holds
        # (pod uid, card) → guarantees (MiB) of the pod's other containers
        self._charged: Mapping[tuple[str, str], int] = {}
        self._looks = 0

    def once(self, regions: Regions, read: Callable[[Entry], Region | None]) -> None:
        """One turn; `read` reads the region of a container once more, None: the region is not whole."""
        try:
            observed = self._look()
        except (InventoryError, pynvml.NVMLError) as error:
            log.debug("cannot read which processes use the cards: %s", error)
            return
        self._looks += 1
        # Read again: what a container allocated while NVML answered was charged in that time.
        again = {entry: found for entry in regions if (found := read(entry)) is not None}
        regions = larger(regions, again)
        counted = self._strangers()
        picture = attribute(observed, regions, self._who, strangers=counted)
        self._strange, self._counted, self._charged = picture.strange, counted, _guaranteed(regions)
        self._tell_foreign(picture)
        self._tell_bypass(picture, regions)
        for excess in self._backstop.once(picture, regions, time.monotonic()):
            pod = self._pods.get(excess.entry.pod_uid)
            sentence = f"Container {excess.entry.container} bypasses its limits on {excess.card}: {excess.sentence}"
            if not excess.again:
                log.warning("%s: %s", excess.entry.pod_uid, sentence)
                if pod is not None:
                    self._consequences.untracked(pod, sentence)
            if pod is not None and self._evict:
                self._consequences.evict(pod, sentence)
        self._debit(regions)

    def _debit(self, regions: Regions) -> None:
        """Charges the GPU time that containers used without being charged for it."""
        for (entry, card), seconds in self._backstop.debits.items():
            for place, piece in enumerate(regions[entry][0]):
                if piece.uuid != card:
                    continue
                try:
                    with native.Region.open(entry.path, writable=True) as region:
                        region.debit(place, round(seconds * 1e9))
                except OSError as error:  # the next turn finds the time missing again
                    log.debug("cannot charge %s for GPU time that NVML counts: %s", entry.path, error)
                    continue
                self._backstop.debited((entry, card))
                log.info("%s: charged %.1f s of GPU time on card %s that only NVML counted", entry.path, seconds, card)

    @property
    def knows(self) -> bool:
        """Whether the watch has run long enough to report processes outside our containers."""
        return self._looks >= TURNS

    def of(self, entry: Entry, card: str) -> tuple[int, float]:
        """(bytes by NVML beyond the charges, seconds of GPU time by NVML) of a container on a card."""
        return self._backstop.untracked.get((entry, card), 0), self._backstop.observed.get((entry, card), 0.0)

    def absent(self, entry: Entry, card: str) -> int:
        """Bytes of a card that a container's charges claim, but that NVML has not counted for a while now."""
        return self._backstop.absent.get((entry, card), 0)

    def keeps(self, entry: Entry, sentence: str, *, again: bool) -> None:
        """Reports a container that does not give back what is not its own. Callable in any thread."""
        pod = self._pods.get(entry.pod_uid)
        if not again:
            log.warning("%s: %s", entry.pod_uid, sentence)
        if pod is not None:
            self._consequences.kept(pod, sentence)
            if self._evict:
                self._consequences.evict(pod, sentence)

    def foreign(self, card: str) -> tuple[int, ...]:
        """Bytes of each process on the card that belongs to no container of ours."""
        return tuple(self._others.get(card, {}).values())

    def uncounted(self, card: str) -> int:
        """Bytes of the card that no container is guaranteed and that cannot be taken back."""
        return sum(self.foreign(card)) + self.beyond(card)

    def beyond(self, card: str) -> int:
        """Bytes of the card that containers of another version have beyond their guarantees.

        Where an earlier version scaled memory without host memory behind it, such containers allocated all of it on the
        card.
        """
        more = 0
        for uid, size in self._strange.get(card, {}).items():
            held = self._counted.get(uid, {}).get(card, Held()).phys
            more += max(0, size - max(0, held - self._charged.get((uid, card), 0)) * MIB)
        return more

    def _tell_bypass(self, picture: Picture, regions: Regions) -> None:
        for found in self._bypass.once(picture.outside, regions):
            pod = self._pods.get(found.entry.pod_uid)
            sentence = f"Container {found.entry.container}: {found.sentence}"
            if found.news:
                log.warning("%s: %s", found.entry.pod_uid, sentence)
            if pod is not None:
                if found.news:
                    self._consequences.bypassed(pod, sentence)
                if self._end_bypass:
                    self._consequences.evict(pod, sentence)

    def _tell_foreign(self, picture: Picture) -> None:
        lasting, new = self._foreign.once(picture.foreign)
        self._others = {card: {pid: picture.foreign[card][pid] for pid in pids} for card, pids in lasting.items()}
        self._cards.used_by_others({card: sum(processes.values()) for card, processes in self._others.items()})
        for card, pid in new:
            who = self._who(pid)
            name = f"{pid} ({who.name})" if who else f"{pid}"
            sentence = f"process {name} uses card {card} outside vgpu's containers: vgpu does not count its use"
            log.warning("%s", sentence)
            self._consequences.node(names.EVENT_FOREIGN, sentence)


def _guaranteed(regions: Regions) -> dict[tuple[str, str], int]:
    """(pod uid, card) → MiB that the pod's containers of this version are guaranteed."""
    found: dict[tuple[str, str], int] = {}
    for entry, (slices, _) in regions.items():
        for piece in slices:
            key = entry.pod_uid, piece.uuid
            found[key] = found.get(key, 0) + piece.guarantee
    return found
