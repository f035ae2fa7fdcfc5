"""What the agent writes to the API server about pods: events, evictions, and corrected records."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from device_plugin.pods import full_name
from device_plugin.refusal import Refusal
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.objects import Pod

log = logging.getLogger(__name__)

REPORTER: Final = "vgpu-device-plugin"
EVICTION_SECONDS: Final = 10.0  #: between two evictions for one owner, because the owner makes the next pod at once
_REMEMBERED: Final = 1024  #: number of owners, and of waiting calls


class Consequences:
    """Sends events and evictions in the background: a slow API server delays no container.

    A call that still waits is not queued twice: after an hour without API server, each call goes out once.
    """

    def __init__(self, client: KubeClient, node: str) -> None:
        self._client = client
        self._node = node
        self._evicted: dict[str, float] = {}  # owner's uid → monotonic seconds; only the worker uses this
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._lock = threading.Lock()
        self._waiting: set[tuple[str, ...]] = set()
        self._dropping = False

    def stop(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    def refused(self, pod: Pod, sentence: str) -> None:
        """Reports by an event that a pod can never start here.

        Where a controller owns the pod, also evicts it so that it is recreated.
        """
        self._submit(("refused", pod.metadata.uid, sentence), self._refused, pod, sentence)

    def allocated(self, pod: Pod, sentence: str) -> None:
        """Reports that a container of the pod may start, and with what."""
        meta = pod.metadata
        reference = writes.pod_reference(meta.namespace, meta.name, meta.uid)
        self._say(reference, names.EVENT_ALLOCATED, sentence, "Normal")

    def node(self, reason: str, sentence: str) -> None:
        """Reports something about this node or one of its cards."""
        type_ = "Normal" if reason == names.EVENT_HEALTHY else "Warning"
        self._say(writes.node_reference(self._node), reason, sentence, type_)

    def untracked(self, pod: Pod, sentence: str) -> None:
        """Reports by an event that a container of the pod has more of a card than it was charged."""
        meta = pod.metadata
        reference = writes.pod_reference(meta.namespace, meta.name, meta.uid)
        self._say(reference, names.EVENT_UNTRACKED, sentence, "Warning")

    def bypassed(self, pod: Pod, sentence: str) -> None:
        """Reports by an event that a process of the pod uses a card without the library."""
        meta = pod.metadata
        reference = writes.pod_reference(meta.namespace, meta.name, meta.uid)
        self._say(reference, names.EVENT_BYPASS, sentence, "Warning")

    def kept(self, pod: Pod, sentence: str) -> None:
        """Reports by an event that a container of the pod gives back nothing of what was lent to it."""
        meta = pod.metadata
        reference = writes.pod_reference(meta.namespace, meta.name, meta.uid)
        self._say(reference, names.EVENT_KEPT, sentence, "Warning")

    def evict(self, pod: Pod, sentence: str) -> None:
        """Evicts the pod where a controller owns it.

        The caller repeats the call when the API server did not accept the eviction.
        """
        self._submit(("evict", pod.metadata.uid), self._evict, pod, sentence)

    def record(self, pod: Pod, record: Allocation) -> None:
        """Replaces the pod's allocation; raises Refusal when the API server rejects it or the pod has changed."""
        meta = pod.metadata
        change = {"annotations": {names.ALLOCATION: allocation.encode(record)}, "resourceVersion": meta.resourceVersion}
        try:
            writes.patch_pod(self._client, meta.namespace, meta.name, change, uid=meta.uid)
        except ApiError as error:
            raise Refusal(
                f"the agent could not record the allocation of pod {full_name(pod)}: {error}", transient=True
            ) from None
        log.info("%s: recorded the allocation that matches its ids: %s", full_name(pod), allocation.encode(record))

    def _say(self, reference: dict[str, str], reason: str, sentence: str, type_: str) -> None:
        self._submit(("event", reference["uid"], reason, sentence), self._event, reference, reason, sentence, type_)

    def _submit(self, what: tuple[str, ...], call: Callable[..., None], *arguments: object) -> None:
        """Runs `call` after the earlier calls, unless the same call already waits.

        `what` says which calls are the same.
        """
        with self._lock:
            if what in self._waiting:
                log.debug("already waiting to be sent: %s", what)
                return
            full = len(self._waiting) >= _REMEMBERED
            if full:
                level = logging.DEBUG if self._dropping else logging.WARNING
                log.log(
                    level, "the API server accepts no events: %d wait, dropping further ones: %s", _REMEMBERED, what
                )
            self._dropping = full
            if full:
                return
            self._waiting.add(what)

        def now() -> None:
            with self._lock:
                self._waiting.discard(what)
            call(*arguments)

        self._worker.submit(now)

    def _refused(self, pod: Pod, sentence: str) -> None:
        meta = pod.metadata
        reference = writes.pod_reference(meta.namespace, meta.name, meta.uid)
        self._event(reference, names.EVENT_MISMATCH, sentence)
        # without effect now: the kubelet tries the start again, and the agent comes back here
        self._evict(pod, sentence)

    def _evict(self, pod: Pod, sentence: str) -> None:
        meta = pod.metadata
        # The owner of a static pod is its node, which would only show the pod again.
        owner = next((one for one in meta.ownerReferences if one.controller and one.kind != "Node"), None)
        if owner is None or meta.deletionTimestamp is not None:
            return
        now = time.monotonic()
        if now - self._evicted.get(owner.uid, -EVICTION_SECONDS) < EVICTION_SECONDS:
            return
        try:
            writes.evict(self._client, meta.namespace, meta.name, meta.uid)
        except ApiError as error:
            log.warning("could not evict %s: %s", full_name(pod), error)
            return
        log.info("evicted %s: %s", full_name(pod), sentence)
        if len(self._evicted) >= _REMEMBERED:
            self._evicted.clear()
        self._evicted[owner.uid] = now

    def _event(self, reference: dict[str, str], reason: str, sentence: str, type_: str = "Warning") -> None:
        writes.emit_event(self._client, reference, reason, sentence, type_, reporting=REPORTER, host=self._node)
