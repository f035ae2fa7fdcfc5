"""A kube-scheduler with an extender: the wire protocol of the stock kube-scheduler, with a simpler queue.

It sums counted resources against the nodes' allocatable, and asks the extender to filter, prioritise and bind.
`IGNORED` has the extended resources that the stock scheduler is configured to ignore. There is no preemption.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, Final

import msgspec
import urllib3

from vgpu import names
from vgpu.kube import writes
from vgpu.kube.client import STRATEGIC_PATCH, ApiError, KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Node, RawObject
from vgpu.resources import parse_quantity
from vgpu.standin.apiserver.podrules import requested

log = logging.getLogger(__name__)

Pod = dict[str, Any]

#: Resources that the extender manages and that are not summed over a node (`ignoredByScheduler: true`)
IGNORED: Final = (
    names.RESOURCE_MEMORY,
    names.RESOURCE_MEMORY_PERCENTAGE,
    names.RESOURCE_CORES,
    names.RESOURCE_PRIORITY,
)
#: Resources that the extender manages and that are summed
COUNTED: Final = (names.RESOURCE_GPU, names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_TOTAL_CORES)
BACK_OFF: Final = (0.2, 3.0)  #: seconds between attempts for one pod (1 s to 10 s in the stock scheduler)
HTTP_SECONDS: Final = 30.0
BINDERS: Final = 16  #: number of pods that may wait for their bind at the same time


class _Failure(Exception):
    """The pod cannot be placed now: reason of the PodScheduled condition, and a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class _Waiting:
    """A pod without a node so far."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.attempts = 0
        self.not_before = 0.0
        self.binding = False
        self.told = ""


class KubeScheduler:
    """Schedules the pods whose `spec.schedulerName` is `scheduler_name`."""

    def __init__(self, client: KubeClient, extender_url: str, scheduler_name: str) -> None:
        self._client = client
        self._url = extender_url.rstrip("/")
        self._name = scheduler_name
        self._http = urllib3.PoolManager(maxsize=BINDERS, retries=False)
        self._lock = threading.RLock()
        self._waiting: dict[str, _Waiting] = {}
        self._placed: dict[str, tuple[str, Pod]] = {}  # uid → (node, pod): bound, or about to be
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._binders = ThreadPoolExecutor(BINDERS, thread_name_prefix="bind")
        self._nodes = Informer(client, "/api/v1/nodes", Node, on_change=lambda *_: self._retry_all())
        self._pods = Informer(client, "/api/v1/pods", RawObject, on_change=self._pod_changed)
        self._thread = threading.Thread(target=self._run, name="kube-scheduler", daemon=True)

    @property
    def nodes_version(self) -> str:
        """The resourceVersion up to which the scheduler knows the nodes; empty before it has listed them."""
        return self._nodes.version

    def start(self) -> None:
        self._nodes.start()
        self._pods.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._nodes.stop()
        self._pods.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._binders.shutdown(wait=True, cancel_futures=True)
        self._http.clear()

    def _pod_changed(self, change: str, item: RawObject) -> None:
        uid, node = item.metadata.uid, item.spec.get("nodeName", "")
        finished = item.status.get("phase") in ("Succeeded", "Failed")
        with self._lock:
            if change == "gone" or finished:
                self._waiting.pop(uid, None)
                self._placed.pop(uid, None)
                self._retry_all()
            elif node:
                self._waiting.pop(uid, None)
                self._placed[uid] = (node, msgspec.to_builtins(item))
            elif item.metadata.deletionTimestamp is not None:
                self._waiting.pop(uid, None)
            elif item.spec.get("schedulerName") == self._name:
                pod = msgspec.to_builtins(item)
                known = self._waiting.setdefault(uid, _Waiting(pod))
                known.pod = pod
                self._wake.set()

    def _retry_all(self) -> None:
        """Something was freed or added: pods that did not fit may fit now."""
        with self._lock:
            for one in self._waiting.values():
                one.not_before = 0.0
        self._wake.set()

    def _run(self) -> None:
        self._nodes.synced.wait()
        while not self._stopping.is_set():
            self._wake.clear()
            one = self._next()
            if isinstance(one, _Waiting):
                self._schedule(one)
            else:
                self._wake.wait(one)

    def _next(self) -> _Waiting | float:
        """The next pod by priority and age; or seconds until a pod is due."""
        now = time.monotonic()
        with self._lock:
            idle = [one for one in self._waiting.values() if not one.binding]
            due = [one for one in idle if one.not_before <= now]
            if not due:
                return max(0.01, min((one.not_before - now for one in idle), default=60.0))
            return min(due, key=lambda one: (-one.pod["spec"].get("priority", 0), one.attempts, _age(one.pod)))

    def _schedule(self, one: _Waiting) -> None:
        pod = one.pod
        try:
            node = self._choose(pod)
        except _Failure as failure:
            self._failed(one, failure)
            return
        with self._lock:
            if self._waiting.get(pod["metadata"]["uid"]) is not one:
                return  # the pod is gone, or another scheduler has bound it
            one.binding = True
            self._placed[pod["metadata"]["uid"]] = (node, pod)
        self._binders.submit(self._bind, one, node)

    def _choose(self, pod: Pod) -> str:
        """Name of the best node. Raises _Failure."""
        reasons: dict[str, str] = {}
        asked = requested(pod)
        nodes = sorted(self._nodes.store.values(), key=lambda node: node.metadata.name)
        fitting: list[str] = []
        for node in nodes:
            lack = self._lack(node, asked)
            if lack:
                reasons[node.metadata.name] = lack
            else:
                fitting.append(node.metadata.name)
        if not fitting:
            raise _Failure("Unschedulable", _summary(len(nodes), reasons.values()))
        if not self._managed(asked):
            return fitting[0]
        answer = self._ask("filter", {"Pod": pod, "Nodes": None, "NodeNames": fitting})
        if answer.get("error"):
            raise _Failure("SchedulerError", f"extender: {answer['error']}")
        for part in ("failednodes", "failedandunresolvablenodes"):
            reasons |= answer.get(part) or {}
        kept: list[str] = [name for name in answer.get("nodenames") or () if name in fitting]
        if not kept:
            raise _Failure("Unschedulable", _summary(len(nodes), reasons.values()))
        if len(kept) == 1:
            return kept[0]
        scores = self._ask("prioritize", {"Pod": pod, "Nodes": None, "NodeNames": kept})
        points = {item["host"]: item["score"] for item in scores}
        return max(kept, key=lambda name: (points.get(name, 0), name))

    @staticmethod
    def _managed(asked: Mapping[str, Fraction]) -> bool:
        return any(asked.get(name) for name in (*IGNORED, *COUNTED))

    def _lack(self, node: Node, asked: Mapping[str, Fraction]) -> str:
        """Why a node is out before the extender is asked; empty: it is not out."""
        if node.spec.unschedulable:
            return "node(s) were unschedulable"
        if not any(one.type == "Ready" and one.status == "True" for one in node.status.conditions):
            return "node(s) were not ready"
        with self._lock:
            used = [requested(pod) for where, pod in self._placed.values() if where == node.metadata.name]
        for name, wanted in asked.items():
            if name in IGNORED or not wanted:
                continue
            offered = parse_quantity(node.status.allocatable.get(name, "0"))
            if sum((one.get(name, Fraction()) for one in used), wanted) > offered:
                return f"Insufficient {name}"
        return ""

    def _bind(self, one: _Waiting, node: str) -> None:
        pod = one.pod
        meta = pod["metadata"]
        about = writes.pod_reference(meta["namespace"], meta["name"], meta["uid"])
        try:
            if self._managed(requested(pod)):
                body = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node}
                answer = self._ask("bind", body)
                if answer.get("error"):
                    raise _Failure("SchedulerError", f"binding rejected: {answer['error']}")
            else:
                try:
                    writes.bind(self._client, meta["namespace"], meta["name"], meta["uid"], node)
                except ApiError as error:
                    raise _Failure("SchedulerError", f"binding rejected: {error}") from None
        except _Failure as failure:
            with self._lock:
                one.binding = False
                if meta["uid"] in self._waiting:  # else the watch has already reported that the pod is bound, or gone
                    self._placed.pop(meta["uid"], None)
            self._failed(one, failure)
            return
        where = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
        writes.emit_event(self._client, about, "Scheduled", where, "Normal", reporting=self._name)

    def _ask(self, verb: str, body: Mapping[str, Any]) -> Any:
        """The extender's answer, with keys in lower case, because Go's JSON decoder ignores case."""
        try:
            answer = self._http.request(
                "POST", f"{self._url}/{verb}", body=msgspec.json.encode(body), timeout=HTTP_SECONDS,
                headers={"content-type": "application/json"},
            )  # fmt: skip
        except urllib3.exceptions.HTTPError as error:
            raise _Failure("SchedulerError", f"extender {verb}: {error}") from None
        if answer.status != 200:
            text = answer.data.decode(errors="replace")[:200]
            raise _Failure("SchedulerError", f"extender {verb} answered {answer.status}: {text}")
        try:
            decoded = msgspec.json.decode(answer.data)
        except msgspec.MsgspecError as error:
            raise _Failure("SchedulerError", f"extender {verb}: {error}") from None
        if isinstance(decoded, list):
            return [_lower(item) for item in decoded]
        return _lower(decoded)

    def _failed(self, one: _Waiting, failure: _Failure) -> None:
        """Reports the failure, and tries again later."""
        first, longest = BACK_OFF
        one.not_before = time.monotonic() + min(first * 2**one.attempts, longest)
        one.attempts += 1
        self._wake.set()
        message = str(failure)
        if one.told == message:
            return
        one.told = message
        meta = one.pod["metadata"]
        log.info("pod %s/%s: %s", meta["namespace"], meta["name"], message)
        condition = {"type": "PodScheduled", "status": "False", "reason": failure.reason, "message": message}
        try:
            self._client.request(
                "PATCH",
                f"{writes.pod_path(meta['namespace'], meta['name'])}/status",
                body={"metadata": {"uid": meta["uid"]}, "status": {"conditions": [condition]}},
                content_type=STRATEGIC_PATCH,
            )
        except ApiError as error:
            one.told = ""
            log.warning("cannot write the condition of pod %s/%s: %s", meta["namespace"], meta["name"], error)
            return
        about = writes.pod_reference(meta["namespace"], meta["name"], meta["uid"])
        writes.emit_event(self._client, about, "FailedScheduling", message, reporting=self._name)


def _age(pod: Pod) -> tuple[str, int]:
    meta = pod["metadata"]
    return (meta.get("creationTimestamp") or "", int(meta.get("resourceVersion") or 0))


def _lower(value: Any) -> Any:
    return {key.lower(): item for key, item in value.items()} if isinstance(value, dict) else value


def _summary(nodes: int, reasons: Iterable[str]) -> str:
    """The text of kube-scheduler: equal reasons are counted."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason] = counts.get(reason, 0) + 1
    parts = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
    return f"0/{nodes} nodes are available: {parts or 'no nodes'}."
