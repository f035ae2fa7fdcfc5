"""Granting: the guard, and everything that must be in place before a container may start.

The agent grants one container at a time, so that the guard sees what was granted before.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from device_plugin import cdi, container_edits, driver, grants, ids, library
from device_plugin.cards import Cards
from device_plugin.holdings import Holdings, pod_holds
from device_plugin.identity import Candidate
from device_plugin.lending import Lending
from device_plugin.modes import Mode
from device_plugin.pod_events import Consequences
from device_plugin.pods import allocation_of, full_name
from device_plugin.refusal import Refusal
from device_plugin.sandbox import Sandboxes, limits_for
from device_plugin.selinux import Labels
from vgpu.allocation import Allocation, Held, excess
from vgpu.config import Config
from vgpu.devices import Gpu, GpuSlice
from vgpu.inventory import InventoryError, readings
from vgpu.kube.objects import Container, Pod
from vgpu.placement.selection import accepts_model
from vgpu.resources import CardSelector, PodRequest
from vgpu.tier import on_tier

log = logging.getLogger(__name__)

CACHE_SECONDS: Final = 0.005  #: the runtime reads a new CDI spec within about a millisecond (measured)


class Places(msgspec.Struct, frozen=True):
    """Where things are on this host."""

    cdi: Path
    library: Path  #: folder of the rollout on the host
    built_library: Path  #: the library as installed with this program
    built_simulator: Path | None = None  #: folder of the simulator, where the cards are simulated
    simulator_state: Path | None = None
    driver_at: driver.Place = driver.Place()


class Plan(msgspec.Struct, frozen=True):
    """One container that may start, and what it needs for that."""

    candidate: Candidate
    pod: Pod
    request: PodRequest | None
    slices: tuple[GpuSlice, ...]
    #: container → ids, of all containers of the pod that got their ids by mounts
    given: Mapping[str, frozenset[str]] = {}

    @property
    def container(self) -> Container | None:
        """The container in the pod's spec."""
        spec = self.pod.spec
        named = (one for one in (*spec.initContainers, *spec.containers) if one.name == self.candidate.container)
        return next(named, None)

    @property
    def priority(self) -> int | None:
        for container in self.request.containers if self.request else ():
            if container.name == self.candidate.container:
                return container.gpu.priority
        return None


class Granting:
    """Thread-safe."""

    def __init__(
        self,
        config: Config,
        cards: Cards,
        sandboxes: Sandboxes,
        holdings: Holdings,
        places: Places,
        consequences: Consequences,
        labels: Labels,
        lending: Lending,
    ) -> None:
        """Installs the library on the host; raises OSError naming the path."""
        self._config = config
        self._cards = cards
        self._sandboxes = sandboxes
        self._holdings = holdings
        self._places = places
        self._consequences = consequences
        self._lock = threading.Lock()
        self._labels = labels
        self._lending = lending
        self._minors: dict[str, int] = {}
        self.rollout = self._install()
        cdi.sweep(self._places.cdi)

    def _install(self) -> library.Rollout:
        made = library.install(self._places.library, self._places.built_library, self._places.built_simulator)
        for source in (*made.sources(), self._places.simulator_state):
            if source is not None and source.exists():
                self._labels.put(source)
        return made

    def mounts(self, key: str, uuids: Sequence[str], mode: Mode) -> container_edits.Answer:
        """The answer to the container that will hold the ids of this `key`.

        The answer mounts a link, which leads to that container's folder. Raises Refusal, or OSError when a card has no
        device node.
        """
        cards = sorted((self._cards.by_uuid[uuid] for uuid in uuids), key=lambda gpu: gpu.index)
        given = container_edits.container_edits(
            self._sandboxes.by_ids / key,
            self.rollout,
            [gpu.uuid for gpu in cards],
            simulator_state=self._places.simulator_state,
            mode=mode,
        )
        if mode.strategy != "device-specs" or self._places.simulator_state:
            return container_edits.Answer(given.env, given.mounts)
        nodes = driver.device_nodes([minor for _, minor in self._numbered(cards)], self._places.driver_at)
        return container_edits.Answer(
            given.env, (*given.mounts, *driver.files(self._places.driver_at)), devices=tuple(nodes)
        )

    def grant(self, device_ids: Sequence[str], plans: Sequence[Plan]) -> None:
        """Puts everything for the start in place; `plans` are all containers that hold these ids.

        Raises Refusal or OSError.
        """
        with self._lock:
            self._grant(device_ids, plans)
        if any(plan.candidate.cdi_name for plan in plans):
            time.sleep(CACHE_SECONDS)

    def _grant(self, device_ids: Sequence[str], plans: Sequence[Plan]) -> None:
        """Puts everything for the start in place; `plans` are all containers that hold these ids."""
        by_mounts = [plan for plan in plans if not plan.candidate.cdi_name]
        chosen = [plan for plan in plans if plan.candidate.cdi_name]
        if by_mounts:
            # Several plans mean: there is no container runtime to ask which container starts. The containers never run
            # at the same time, and the allocation counts the peak of both, so the agent holds the larger slice for
            # both.
            largest = max(by_mounts, key=lambda plan: sum((piece.mem << 8) + piece.cores for piece in plan.slices))
            if len(by_mounts) > 1:
                names = ", ".join(plan.candidate.container for plan in by_mounts)
                log.warning(
                    "containers %s of pod %s hold the same ids, and the agent has no container runtime to ask which "
                    "one starts: each of them gets the larger slice, that of %s",
                    names,
                    full_name(largest.pod),
                    largest.candidate.container,
                )
            chosen.append(self._where_ids_are(largest, device_ids))
        for plan in chosen:
            self._is_backed(plan)
            self._driver_is_there(plan)
            self._guard(plan)
        self._verify(chosen)
        for plan in chosen:
            self._library_reads_regions(plan)
        for plan in chosen:
            uid, holds = plan.pod.metadata.uid, self._holds(plan)
            with self._lending.making_room(uid, plan.candidate.container, holds, plan.slices) as host_memory:
                self._put(device_ids, plan, host_memory)

    def _where_ids_are(self, plan: Plan, device_ids: Sequence[str]) -> Plan:
        """Where cards come by mounts, the kubelet's ids decide which cards the container sees.

        The container starts only when the pod's record names these cards, too. Only the scheduler knows which pods it
        is binding meanwhile. So the agent asks the scheduler, in the record, to move the record.
        """
        cards = self._cards.by_uuid
        moved = grants.move(plan.slices, sorted({ids.card(device_id) for device_id in device_ids}))
        if moved is None:
            raise Refusal(f"the kubelet gave pod {full_name(plan.pod)} several ids of one card", pod=plan.pod)
        record, name = allocation_of(plan.pod) or Allocation({}), plan.candidate.container
        if set(moved) == set(record.containers.get(name, ())):
            if name in record.moving:  # an earlier start asked for this move, when the container held other ids
                others = {other: slices for other, slices in record.moving.items() if other != name}
                self._consequences.record(plan.pod, Allocation(record.containers, others))
            return plan
        for gpu in (cards[piece.uuid] for piece in moved):
            if plan.request and not _accepts(plan.request.selector, gpu):
                card = f"{gpu.model} {gpu.uuid}"
                sentence = f"the kubelet gave pod {full_name(plan.pod)} ids of {card}, which the pod does not accept"
                raise Refusal(sentence, pod=plan.pod)
        plan = msgspec.structs.replace(plan, slices=container_edits.in_order(moved, cards))
        asked = {**record.moving, **self._asked(plan, record), name: plan.slices}
        if asked != record.moving:
            self._consequences.record(plan.pod, Allocation(record.containers, asked))
        self._guard(plan)
        where = ", ".join(f"card {cards[piece.uuid].index}" for piece in plan.slices)
        sentence = f"the kubelet gave pod {full_name(plan.pod)} {where}; the scheduler has not found room there yet"
        raise Refusal(sentence, transient=True, pod=plan.pod)

    def _asked(self, plan: Plan, record: Allocation) -> dict[str, tuple[GpuSlice, ...]]:
        """Containers of the pod whose record names other cards than their ids.

        The list has all of them: room that one of them keeps on its recorded cards is lost for other pods.
        """
        found = {}
        for name, device_ids in plan.given.items():
            slices = record.containers.get(name, ())
            moved = grants.move(slices, sorted({ids.card(device_id) for device_id in device_ids}))
            if moved is not None and set(moved) != set(slices):
                found[name] = container_edits.in_order(moved, self._cards.by_uuid)
        return found

    def _before(self, plan: Plan) -> tuple[GpuSlice, ...] | None:
        """What the container was granted at its earlier start.

        Where another version granted it, the pod's record tells.
        """
        uid, name = plan.pod.metadata.uid, plan.candidate.container
        found = self._sandboxes.granted().get(uid, {}).get(name)
        if found is None and uid in self._sandboxes.strangers():
            record = allocation_of(plan.pod) or Allocation({})
            return container_edits.in_order(record.containers.get(name, ()), self._cards.by_uuid)
        return found

    def _is_backed(self, plan: Plan) -> None:
        """Refuses a start that needs host memory where the node keeps none: such a pod must start elsewhere.

        A container that started before keeps its slice. The node may not put the whole slice on the card instead,
        because the scheduler gives that memory to other pods.
        """
        if not on_tier(plan.slices) or self._before(plan) == plan.slices or self._cards.backed:
            return
        why = "has not reported whether it reserves" if self._cards.backed is None else "does not reserve"
        sentence = f"pod {full_name(plan.pod)}: the node {why} the host memory that the pod's slice needs"
        raise Refusal(sentence, transient=True, pod=plan.pod)

    def _holds(self, plan: Plan) -> dict[str, Held]:
        """What the pod holds by card, once this container is started."""
        before = self._sandboxes.granted().get(plan.pod.metadata.uid, {})
        return pod_holds(plan.pod, {**before, plan.candidate.container: plan.slices})

    def _guard(self, plan: Plan) -> None:
        granted = self._holdings.granted(without={plan.pod.metadata.uid})
        known = self._before(plan) == plan.slices
        sentence = excess(self._cards.beside(granted), granted, self._holds(plan), known=known)
        if sentence:
            raise Refusal(f"pod {full_name(plan.pod)}: {sentence}", transient=True, pod=plan.pod)

    def _verify(self, plans: Sequence[Plan]) -> None:
        try:
            for source in self._sources_of(plans):
                library.verify(source)
        except Refusal:
            self.rollout = self._install()  # puts back the files that are ours
            for source in self._sources_of(plans):
                library.verify(source)

    def _sources_of(self, plans: Sequence[Plan]) -> set[Path]:
        return {*self.rollout.sources(), *(source for plan in plans for source in plan.candidate.sources)}

    def _library_reads_regions(self, plan: Plan) -> None:
        """Refuses a library that cannot read this agent's regions.

        The kubelet repeats its stored answer for ever, even an answer from an agent of another version.
        """
        for source in plan.candidate.sources:
            if not library.reads_regions(source):
                raise Refusal(
                    f"pod {full_name(plan.pod)} was given {source.name}, which does not work with this version of "
                    "vgpu: recreate the pod",
                    pod=plan.pod,
                )

    def _driver_is_there(self, plan: Plan) -> None:
        """Refuses an answer whose driver files are gone.

        The kubelet repeats its stored answer for ever, and the runtime would create an empty folder for a missing file.
        """
        gone = [
            str(file) for file in plan.candidate.driver_files if not self._places.driver_at.seen(str(file)).exists()
        ]
        if gone:
            raise Refusal(
                f"pod {full_name(plan.pod)} was given {', '.join(gone)}, which the driver of the node no longer has: "
                "recreate the pod",
                pod=plan.pod,
            )
        # A pod that Allocate refuses is lost, and its controller recreates it at once. So the refusal comes here.
        if plan.candidate.device_nodes and not plan.candidate.driver_files:
            if shortage := driver.shortage(self._places.driver_at, "device-specs"):
                raise Refusal(f"pod {full_name(plan.pod)} cannot start: {shortage}", transient=True, pod=plan.pod)
            raise Refusal(
                f"pod {full_name(plan.pod)} got its cards while the agent could not find the driver's libraries, and "
                "the kubelet does not add libraries later: recreate the pod",
                pod=plan.pod,
            )

    def _put(self, device_ids: Sequence[str], plan: Plan, host_memory: int) -> None:
        settings = self._config.device_plugin
        policy = grants.core_policy(plan.request, plan.container, may_disable=settings.allowDisableControl)
        limits = limits_for(
            plan.slices,
            contexts={uuid: gpu.context for uuid, gpu in self._cards.by_uuid.items()},
            core_policy="none" if settings.disablecorelimit else policy,
            cores_limit=plan.request.cores_limit if plan.request else None,
            priority=plan.priority,
            allow_disable_control=settings.allowDisableControl,
            movable=((plan.request and plan.request.memory_mode) or settings.memoryMode) == "movable",
            host_memory=host_memory,
            fills_on_engine=settings.fillsOn == "engine",
            copies_on_sms=settings.copiesOn == "sms",
        )
        try:
            directory = self._sandboxes.prepare(plan.pod.metadata.uid, plan.candidate.container, limits)
        except ValueError as error:
            sentence = f"the agent cannot enforce the allocation of pod {full_name(plan.pod)}: {error}"
            raise Refusal(sentence, pod=plan.pod) from None
        if plan.candidate.cdi_name:
            given = container_edits.container_edits(
                directory,
                self.rollout,
                [piece.uuid for piece in plan.slices],
                limits=container_edits.limits_environment(
                    plan.slices, plan.priority, enforce_cores=not settings.disablecorelimit
                ),
                simulator_state=self._places.simulator_state,
            )
            needed = self._driver_edits([self._cards.by_uuid[piece.uuid] for piece in plan.slices])
            body = cdi.spec(plan.candidate.cdi_name, given, needed.edits, needed.version)
            cdi.write(self._places.cdi, plan.candidate.cdi_name, body)
        else:
            self._sandboxes.point(ids.key(device_ids), directory)
        shares = "; ".join(self._share(piece) for piece in plan.slices)
        log.info("%s/%s may start with %s", full_name(plan.pod), plan.candidate.container, shares)
        self._consequences.allocated(plan.pod, f"Container {plan.candidate.container} gets {shares}")

    def _share(self, piece: GpuSlice) -> str:
        gpu = self._cards.by_uuid[piece.uuid]
        time_share = f" and {piece.cores} % of the time" if piece.cores else ""
        physical = f" ({piece.guarantee} MiB of them guaranteed)" if on_tier((piece,)) else ""
        return f"{piece.mem} MiB{physical}{time_share} of card {gpu.index} ({gpu.model}, {gpu.uuid})"

    def _driver_edits(self, cards: Sequence[Gpu]) -> driver.DriverEdits:
        if self._places.simulator_state:
            return driver.DriverEdits({})
        return driver.edits_for(self._numbered(cards), self._places.driver_at)

    def _numbered(self, cards: Sequence[Gpu]) -> list[tuple[Gpu, int]]:
        """The cards with their device minor numbers; raises Refusal."""
        if any(gpu.uuid not in self._minors for gpu in cards):
            try:
                self._minors = {uuid: reading.minor for uuid, reading in readings().items()}
            except InventoryError as error:
                raise Refusal(str(error), transient=True) from None
        try:
            return [(gpu, self._minors[gpu.uuid]) for gpu in cards]
        except KeyError as error:
            raise Refusal(f"card {error.args[0]} does not answer the driver", transient=True) from None


def _accepts(selector: CardSelector, gpu: Gpu) -> bool:
    """Whether the card's model and UUID match the pod's annotations."""
    wanted = not selector.use_uuids or gpu.uuid in selector.use_uuids
    return wanted and gpu.uuid not in selector.nouse_uuids and accepts_model(selector, gpu.model)
