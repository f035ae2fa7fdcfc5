"""Once a second, cleans up and makes the picture of the metrics.

The sweep frees dead processes' charges, charges overhead, and removes what deleted pods left. It removes a folder only
when the API server has no such pod any more and no process lives in the folder's container.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from device_plugin import cdi, library
from device_plugin.cards import Cards
from device_plugin.exporter import CardView, ContainerView, Exporter, Picture
from device_plugin.granting import Places
from device_plugin.holdings import Holdings
from device_plugin.identity import Identity
from device_plugin.lending import Lending
from device_plugin.overhead import Settler
from device_plugin.pods import Pods, allocation_of
from device_plugin.refusal import Refusal
from device_plugin.sandbox import Entry, Sandboxes, on_card, slices_of
from device_plugin.watch import Watch
from vgpu.allocation import Held
from vgpu.devices import GpuSlice
from vgpu.inventory import InventoryError, readings
from vgpu.kube.objects import Pod
from vgpu.kubelet.checkpoint import CheckpointError
from vgpu.native import CardUsage, Region, Usage
from vgpu.tier import MIB

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 1.0
_CLEAN_EVERY: Final = 60  #: periods between two looks for old libraries and specs

Share = tuple[GpuSlice, CardUsage | None]


class Sweep:
    """One thread."""

    def __init__(
        self,
        cards: Cards,
        pods: Pods,
        sandboxes: Sandboxes,
        holdings: Holdings,
        identity: Identity,
        exporter: Exporter,
        *,
        places: Places,
        current: Callable[[], Iterable[Path]],
        watch: Watch,
        lending: Lending,
        hangs: Callable[[], bool] = lambda: False,
    ) -> None:
        """`current`: files of the rollout that new containers get.

        `hangs`: whether a question to the driver has had no answer for so long that this thread would hang, too.
        """
        self._watch = watch
        self._lending = lending
        self._hangs = hangs
        self._cards = cards
        self._pods = pods
        self._sandboxes = sandboxes
        self._holdings = holdings
        self._identity = identity
        self._exporter = exporter
        self._places = places
        self._current = current
        self._names: dict[str, tuple[str, str]] = {}  # pod uid → (namespace, name), kept as long as the pod has folders
        self._unnamed: set[Path] = set()  # files of the rollout's folder
        self._complaint = ""
        self._settler = Settler()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        turn = 0
        while not self._stopping.is_set():
            try:
                self.once(clean=turn % _CLEAN_EVERY == 0)
                self._complaint = ""
            except (OSError, Refusal) as error:
                if str(error) != self._complaint:
                    log.warning("clean-up failed: %s; retrying", error)
                    self._complaint = str(error)
            except Exception as error:
                # Containers control much of what is read here: no container may end the thread that watches it.
                if str(error) != self._complaint:
                    log.exception("clean-up failed; retrying")
                    self._complaint = str(error)
            turn += 1
            self._stopping.wait(PERIOD_SECONDS)

    def once(self, *, clean: bool) -> None:
        """One turn; raises OSError, or Refusal (the API server does not answer).

        After an error, the rest is left to the next turn.
        """
        usages = {}
        for entry in self._sandboxes.entries():
            found = _read(entry)
            if found is not None:
                usages[entry] = found
        asks = not self._hangs()
        if asks:
            try:
                self._settler.once(usages)
            except InventoryError as error:
                log.debug("cannot measure the overhead of contexts: %s", error)
            self._watch.once(usages, _read)
        synced = self._pods.synced
        if synced:  # before that, the agent does not know what pods hold
            self._lending.settle()
        self._exporter.show(self._picture(usages, asks), whole=synced, fresh=asks)
        if not self._pods.synced:
            return
        entries = [*self._sandboxes.entries(), *self._sandboxes.removed()]
        dead = self._dead(entries)
        if dead:
            if not all(self._pods.told_gone(entry.pod_uid) for entry in dead):
                self._pods.refresh(certain=True)  # after this, a pod that came meanwhile is known
            for entry in self._dead(dead):
                self._sandboxes.remove(entry)
        if dead or clean:
            self._remove_specs()
        if clean:
            self._remove_libraries()

    def _dead(self, entries: Iterable[Entry]) -> list[Entry]:
        """The folders whose pods are gone and of which no process lives."""
        left = {(one.pod_uid, one.container): one for one in entries if self._pods.get(one.pod_uid) is None}
        survivors = self._sandboxes.survivors(left.keys())
        return [entry for key, entry in left.items() if key not in survivors]

    def _picture(self, usages: dict[Entry, tuple[tuple[GpuSlice, ...], Usage]], asks: bool) -> Picture:
        paths = {(entry.pod_uid, entry.container): entry for entry in usages}
        views: dict[tuple[str, str], list[Share]] = {}
        started = {entry.pod_uid for entry in usages}
        for pod in self._pods.all():
            uid = pod.metadata.uid
            self._names[uid] = (pod.metadata.namespace, pod.metadata.name)
            if pod.finished and uid not in started:
                continue
            for container, slices in _record(pod).items():
                views[uid, container] = [(piece, None) for piece in slices]
        for entry, (slices, usage) in usages.items():
            views[entry.pod_uid, entry.container] = list(zip(slices, usage.cards, strict=False))
        known = {uid for uid, _ in views}
        self._names = {uid: name for uid, name in self._names.items() if uid in known}
        try:
            now = readings() if asks else {}
        except InventoryError:
            now = {}
        held, strangers = self._holdings.held(), self._sandboxes.strangers()
        containers = []
        for (uid, container), shares in views.items():
            namespace, name = self._names.get(uid, ("", uid))
            entry_of = paths.get((uid, container))
            slices = tuple(piece for piece, _ in shares)
            for piece, share in shares:
                untracked, observed = self._watch.of(entry_of, piece.uuid) if entry_of else (0, 0.0)
                budget = self._lending.host_memory(entry_of) if entry_of else 0
                here = on_card(slices, share) if share else 0
                owed = self._lending.owed(entry_of, piece.uuid) if entry_of else 0
                told = share is not None or uid not in strangers
                containers.append(
                    ContainerView(
                        namespace, name, container, piece, share, untracked, observed, budget, here, owed, told
                    )
                )
        return Picture(
            cards=tuple(
                CardView(gpu, held.get(gpu.uuid, Held()), now.get(gpu.uuid), self._watch.foreign(gpu.uuid))
                for gpu in self._cards.inventory.devices
            ),
            containers=tuple(containers),
            host_memory=self._cards.host_memory * MIB,
            unbacked=self._cards.unbacked,
        )

    def _remove_specs(self) -> None:
        """Removes each spec whose folder is gone."""
        for file, mounted in cdi.sources(self._places.cdi):
            if not any(source.name == "limits" and source.exists() for source in mounted):
                file.unlink(missing_ok=True)

    def _remove_libraries(self) -> None:
        """Removes libraries that no answer or spec names at this look and the look before.

        One look is not enough: an answer of the previous agent may not be recorded yet.
        """
        try:
            named = self._identity.sources()
        except (OSError, CheckpointError) as error:
            log.debug("removing no library, since the agent cannot read which ones are in use: %s", error)
            return
        named |= {source for _, mounted in cdi.sources(self._places.cdi) for source in mounted}
        known = {*named, *self._current()}
        present = set(self._places.library.iterdir())
        library.prune(self._places.library, self._unnamed - known)
        self._unnamed = present - known


def _record(pod: Pod) -> dict[str, tuple[GpuSlice, ...]]:
    try:
        record = allocation_of(pod)
    except Refusal:
        return {}
    return record.containers if record else {}


def _read(entry: Entry) -> tuple[tuple[GpuSlice, ...], Usage] | None:
    """Slices and usage after dead processes were reaped; None while the region is not whole."""
    try:
        with Region.open(entry.path, writable=True) as region:
            region.reap()
            return slices_of(region.limits()), region.usage()
    except OSError as error:
        log.debug("%s: %s", entry.path, error)
        return None
