"""The extender's pure verbs: which nodes can take a pod (filter), and which of them is the best (prioritize)."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress
from typing import Final

import msgspec
import numpy as np

from scheduler.cluster import ClusterState, rows_of
from scheduler.metrics import UNSCHEDULABLE
from scheduler.survey import Survey
from scheduler.wire import ExtenderArgs, ExtenderFilterResult, HostPriority, Pod, node_names
from vgpu import names
from vgpu.placement import policy
from vgpu.placement.cards import Bools, Floats
from vgpu.resources import PodRequest, RequestError, Rules, read_pod

RECENT: Final = 10_000  #: number of pods whose request is kept for their bind
BEST: Final = 10  #: extender.MaxExtenderPriority of kube-scheduler
PATIENCE: Final = 0.1  #: seconds to wait for news that kube-scheduler has already
#: seconds between two waits: kube-scheduler asks for one pod after the other, and an event is news for all of them
PATIENT_EVERY: Final = 1.0


class Recent:
    """Requests of pods by uid, the latest `RECENT` of them: a bind does not say what its pod asks for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, PodRequest | None] = OrderedDict()

    def put(self, uid: str | None, request: PodRequest | None) -> None:
        if not uid:
            return
        with self._lock:
            self._requests[uid] = request
            self._requests.move_to_end(uid)
            if len(self._requests) > RECENT:
                self._requests.popitem(last=False)

    def get(self, uid: str) -> tuple[bool, PodRequest | None]:
        """(known, request); a known pod without a request asks for no GPU."""
        with self._lock:
            if uid not in self._requests:
                return False, None
            return True, self._requests[uid]


class Verbs:
    """Answers from the cluster state alone: the verbs reserve nothing and send no requests."""

    def __init__(self, state: ClusterState, rules_: Rules, recent: Recent) -> None:
        self._state = state
        self._rules = rules_
        self._recent = recent
        self._lock = threading.Lock()
        self._patient_again = 0.0  #: monotonic seconds

    def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """Every node that can take the pod, and a sentence for every other node.

        A node where an eviction could help is in FailedNodes, the others in FailedAndUnresolvableNodes.
        """
        nodes, whole = node_names(args)
        try:
            request = self._request(args.Pod)
        except RequestError as error:
            return ExtenderFilterResult(
                NodeNames=[], FailedAndUnresolvableNodes=dict.fromkeys(nodes, f"cannot place the pod: {error}")
            )
        if request is None:
            return _result(nodes, whole, np.ones(len(nodes), dtype=np.bool_), {}, {})
        uid = args.Pod.metadata.uid or ""
        begin = time.monotonic()
        survey = Survey(self._state, uid, request, nodes)
        took = time.monotonic() - begin
        until = self._patience() if not survey.fits.any() else 0.0
        # A pod whose judgement took long is not judged again for every change of a busy cluster.
        while (
            not survey.fits.any() and (left := until - time.monotonic()) > took and self._state.news(survey.mark, left)
        ):
            survey = Survey(self._state, uid, request, nodes)
        if not survey.fits.any():
            for reason in survey.reasons:
                UNSCHEDULABLE.labels(reason).inc()
        return _result(nodes, whole, survey.fits, survey.failed, survey.unresolvable)

    def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """10 for the policy's best node, 0 to 9 for the others; of equal nodes the first by name is the best."""
        nodes, _ = node_names(args)
        try:
            request = self._request(args.Pod)
        except RequestError:  # filter has reported it
            request = None
        if request is None or not nodes:
            return [HostPriority(name, 0) for name in nodes]
        row_of = self._state.row_of()
        rows = rows_of(row_of, nodes)
        with self._state.lock:
            view = self._state.view()
            if view.row_of is not row_of:  # a node came or went
                rows = view.rows(nodes)
            scores = np.full(len(nodes), -np.inf, dtype=np.float64)
            known = rows >= 0
            scores[known] = policy(request.node_policy).node_score(view.cards, view.usage)[rows[known]]
        return [HostPriority(name, points) for name, points in zip(nodes, _points(nodes, scores), strict=True)]

    def _patience(self) -> float:
        """Until when (monotonic seconds) to wait for a change, when the answer would be that no node fits.

        kube-scheduler asks as soon as a pod is gone, and the watch may deliver this a moment later here. After the
        answer "no", kube-scheduler would not try the pod again until something else happens, which may take minutes.
        """
        now = time.monotonic()
        with self._lock:
            if now < self._patient_again:
                return now
            self._patient_again = now + PATIENT_EVERY
        return now + PATIENCE

    def _request(self, pod: Pod) -> PodRequest | None:
        request = asked(pod, self._rules)
        self._recent.put(pod.metadata.uid, request)
        return request


def asked(pod: Pod, rules_: Rules) -> PodRequest | None:
    """The pod's request for cards, None: it asks for none.

    Raises RequestError, also where admission has not seen the pod.

    No check and no quota has counted such a pod. Admission sets the label, and policies protect it.
    """
    request = read_pod(pod.mapping(), rules_)
    mark = (pod.metadata.labels or {}).get(names.LABEL_MANAGED)
    if request is not None and mark != "true":
        told = (
            "admission sets it to true, but has not processed this pod:"
            " recreate the pod without a label that opts out of admission"
        )
        raise RequestError(f"metadata.labels[{names.LABEL_MANAGED}]", mark, told)
    return request


def _points(nodes: Sequence[str], scores: Floats) -> list[int]:
    """Scores for kube-scheduler from a policy's figures.

    Only one node gets `BEST`: kube-scheduler would choose among equal nodes at random.
    """
    known = np.isfinite(scores)
    if not known.any():
        return [0] * len(nodes)
    top, low = float(scores[known].max()), float(scores[known].min())
    points = np.zeros(len(nodes), dtype=np.int64)
    points[known] = np.floor((scores[known] - low) / (top - low) * (BEST - 1)) if top > low else BEST - 1
    best = min(np.flatnonzero(scores == top).tolist(), key=lambda at: nodes[at])
    points[best] = BEST
    return points.tolist()


def _result(
    nodes: Sequence[str], whole: Sequence[msgspec.Raw] | None, fits: Bools, failed: dict[str, str], lost: dict[str, str]
) -> ExtenderFilterResult:
    """The answer in the form of the question: node names, or the nodes as they came."""
    if fits.all() and whole is None:
        return ExtenderFilterResult(None, list(nodes), failed, lost)
    chosen = fits.tolist()
    if whole is not None:
        return ExtenderFilterResult({"items": list(compress(whole, chosen))}, None, failed, lost)
    return ExtenderFilterResult(None, list(compress(nodes, chosen)), failed, lost)
