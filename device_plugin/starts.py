"""The node's answers to the kubelet: which ids to prefer, what the ids give, and whether their container may start.

The plugin calls this in worker threads, several at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from device_plugin import cdi, container_edits, ids
from device_plugin.cards import Cards
from device_plugin.container_edits import Answer
from device_plugin.granting import Granting, Plan
from device_plugin.identity import Candidate, Identity
from device_plugin.modes import Mode
from device_plugin.pod_events import Consequences
from device_plugin.pods import Pods, allocation_of, full_name
from device_plugin.refusal import Refusal
from vgpu import names
from vgpu.config import Config, rules
from vgpu.kube.objects import Pod, kinds
from vgpu.resources import RequestError, read_pod

log = logging.getLogger(__name__)

#: the kubelet gives up after 30 s and tries again; the agent retries transient causes for this long
ANSWER_SECONDS: Final = 8.0
LOOK_SECONDS: Final = 0.25  #: between two attempts, unless a pod changes earlier
#: a pod refused for this long does not start by waiting: it gets an event and, if owned, is evicted
END_SECONDS: Final = 60.0
END_TRIES: Final = 3  #: and refused this often: a node that stood still has tried nothing meanwhile
RECORD_SECONDS: Final = 2.0  #: a pod without an allocation after this time was placed by another scheduler
#: On a mirror pod: the UID that the kubelet has for it (kubernetes/pkg/kubelet/types, ConfigHashAnnotationKey)
_CONFIG_HASH: Final = "kubernetes.io/config.hash"
_STATIC: Final = "no scheduler places it, so it has no slice; create the pod in the API server, such as by a DaemonSet"


class Starts:
    """The node's answers to the kubelet (device_plugin.plugin.Node)."""

    def __init__(
        self,
        config: Config,
        cards: Cards,
        pods: Pods,
        identity: Identity,
        granting: Granting,
        consequences: Consequences,
        mode: Callable[[], Mode],
    ) -> None:
        """`mode`: how cards reach the next container."""
        self._mode = mode
        self._config = config
        self._cards = cards
        self._pods = pods
        self._identity = identity
        self._granting = granting
        self._consequences = consequences
        # pod uid → (monotonic seconds of the first refusal, number of refusals)
        self._refused_since: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    # GetPreferredAllocation

    def steer(self, size: int) -> Sequence[str]:
        wanted = self._awaited(size)
        if not wanted:  # the kubelet may know a pod before our watch reports the pod
            try:
                self._pods.refresh()
            except Refusal as refusal:
                log.warning("cannot choose ids for the kubelet: %s", refusal)
                return ()
            wanted = self._awaited(size)
        return wanted

    def _awaited(self, size: int) -> tuple[str, ...]:
        """Cards of the oldest container on this node with `size` slices and still without ids from the kubelet."""
        done = self._identity.allocated()
        for pod in self._pods.all():
            try:
                record = None if pod.finished else allocation_of(pod)
            except Refusal:
                continue
            for name, _ in kinds(pod) if record else ():
                slices = record.containers.get(name, ()) if record else ()
                if len(slices) == size and (pod.metadata.uid, name) not in done:
                    return tuple(piece.uuid for piece in slices)
        return ()

    # Allocate

    def answer(self, device_ids: Sequence[str]) -> Answer:
        key = ids.key(device_ids)
        mode = self._mode()
        if mode.strategy == "cdi":
            name = cdi.new_name(key)
            self._identity.remember(device_ids, name)
            return Answer(cdi_names=(name,))
        return self._granting.mounts(key, sorted({ids.card(device_id) for device_id in device_ids}), mode)

    # PreStartContainer

    def start(self, device_ids: Sequence[str]) -> None:
        began = time.monotonic()
        while True:
            elapsed = time.monotonic() - began
            plans: list[Plan] = []
            try:
                plans = self._plans(device_ids, patient=elapsed < RECORD_SECONDS)
                self._granting.grant(device_ids, plans)
            except Refusal as refusal:
                if refusal.transient and elapsed <= ANSWER_SECONDS:
                    log.debug("trying again: %s", refusal)
                    self._pods.wait(LOOK_SECONDS)
                    continue
                if refusal.waits:
                    self._stays(_only(plans))
                else:
                    self._refused(refusal.pod or _only(plans), str(refusal), incurable=not refusal.transient)
                raise
            except OSError as error:
                self._refused(_only(plans), f"the agent could not prepare the container: {error}")
                raise
            with self._lock:
                for plan in plans:
                    self._refused_since.pop(plan.pod.metadata.uid, None)
            return

    def _refused(self, pod: Pod | None, sentence: str, *, incurable: bool = False) -> None:
        """The kubelet only tries the same start again: a refusal that does not end by itself is ended here."""
        if pod is None:
            return
        now = time.monotonic()
        with self._lock:
            living = {each.metadata.uid for each in self._pods.all()}
            self._refused_since = {uid: one for uid, one in self._refused_since.items() if uid in living}
            since, tries = self._refused_since.get(pod.metadata.uid, (now, 0))
            self._refused_since[pod.metadata.uid] = since, tries + 1
        if incurable:
            self._consequences.refused(pod, sentence)
        elif now - since > END_SECONDS and tries + 1 >= END_TRIES:
            # The words are the same each time, so that the API server counts the repeated event.
            self._consequences.refused(pod, f"{sentence} (for more than {END_SECONDS:.0f} s)")

    def _stays(self, pod: Pod | None) -> None:
        """The pod waits for other pods, and a new pod would wait, too.

        Earlier reasons to refuse the pod do not count any more.
        """
        if pod is not None:
            with self._lock:
                self._refused_since.pop(pod.metadata.uid, None)

    def _plans(self, device_ids: Sequence[str], *, patient: bool) -> list[Plan]:
        candidates = self._identity.candidates(device_ids)
        if not candidates:
            raise Refusal(f"the kubelet lists no container that holds {', '.join(device_ids)}", transient=True)
        known = [(candidate, self._pod(candidate)) for candidate in candidates]
        if any(pod is None or names.ALLOCATION not in pod.metadata.annotations for _, pod in known):
            self._pods.refresh()
            known = [(candidate, self._pod(candidate)) for candidate in candidates]
        living = [(candidate, pod) for candidate, pod in known if pod is not None and not pod.finished]
        if not living:
            self._refuse_static({candidate.pod_uid for candidate in candidates})
            who = ", ".join(candidate.pod_uid or candidate.name for candidate in candidates)
            raise Refusal(
                f"the API server has no running pod on this node for {who} (if this is a static pod: {_STATIC})",
                transient=True,
            )
        return [self._plan(candidate, pod, device_ids, patient) for candidate, pod in self._starting(living)]

    def _refuse_static(self, uids: Collection[str]) -> None:
        """The kubelet knows a static pod by a UID of its own; the mirror pod in the API server names that UID."""
        for pod in self._pods.all():
            if pod.metadata.annotations.get(_CONFIG_HASH) in uids:
                raise Refusal(f"pod {full_name(pod)} is a static pod of the kubelet: {_STATIC}", pod=pod)

    def _starting(self, known: Sequence[tuple[Candidate, Pod]]) -> list[tuple[Candidate, Pod]]:
        """The candidates to prepare.

        These are all with a CDI name of their own, and the next one of several that share a mount.
        """
        by_name = [(candidate, pod) for candidate, pod in known if candidate.cdi_name]
        by_mount = [(candidate, pod) for candidate, pod in known if not candidate.cdi_name]
        if len(by_mount) < 2:
            return [*by_name, *by_mount]
        pods = {pod.metadata.uid: pod for _, pod in by_mount}
        if len(pods) > 1:
            who = ", ".join(full_name(pod) for pod in pods.values())
            raise Refusal(f"the kubelet's checkpoint lists the same ids for {who}", transient=True)
        (pod,) = pods.values()
        name = self._identity.starting(pod, [candidate.container for candidate, _ in by_mount])
        return [*by_name, *((one, pod) for one, _ in by_mount if name in (None, one.container))]

    def _pod(self, candidate: Candidate) -> Pod | None:
        if candidate.pod_uid:
            return self._pods.get(candidate.pod_uid)
        return self._pods.find(candidate.namespace, candidate.name)

    def _plan(self, candidate: Candidate, pod: Pod, device_ids: Sequence[str], patient: bool) -> Plan:
        record = allocation_of(pod)
        if record is None:
            raise Refusal(
                f"pod {full_name(pod)} has no allocation: {self._config.scheduler_name} did not place it; "
                f"set spec.schedulerName: {self._config.scheduler_name} and no spec.nodeName",
                transient=patient,
                pod=pod,
            )
        # The record is moving: the scheduler has so far only reserved what the container will have.
        on_its_way = record.moving.get(candidate.container, ())
        slices, count = record.containers.get(candidate.container, on_its_way), len(set(device_ids))
        if len(slices) != count:
            raise Refusal(
                f"the kubelet gave container {candidate.container} of pod {full_name(pod)} {count} cards, but its "
                f"allocation has {len(slices)}",
                pod=pod,
            )
        strange = [piece.uuid for piece in slices if piece.uuid not in self._cards.by_uuid]
        if strange:
            sentence = f"the allocation of pod {full_name(pod)} lists {', '.join(strange)}, not a card of this node"
            # The agent does not know yet which cards do not answer: an earlier agent may have published the card.
            raise Refusal(sentence, transient=not self._cards.complete, pod=pod)
        try:
            request = read_pod(msgspec.to_builtins(pod), rules(self._config))
        except RequestError as error:
            raise Refusal(f"pod {full_name(pod)}: {error}", pod=pod) from None
        given = {} if candidate.cdi_name else self._identity.mounted(pod.metadata.uid)
        return Plan(candidate, pod, request, container_edits.in_order(slices, self._cards.by_uuid), given)


def _only(plans: Sequence[Plan]) -> Pod | None:
    """The pod of all these plans."""
    return plans[0].pod if len({plan.pod.metadata.uid for plan in plans}) == 1 else None
