"""The bind verb: chooses the cards under the lock, then sends the bind to the API server in one request."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from scheduler import seen
from scheduler.cluster import DOUBT_SECONDS, ClusterState, Holding
from scheduler.leader_check import Behind
from scheduler.seen import holding_of
from scheduler.verbs import Recent, asked
from scheduler.wire import ExtenderBindingArgs, Pod
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient, Unreachable
from vgpu.placement import policy
from vgpu.placement.fit import Rejection, fit_pod
from vgpu.resources import PodRequest, RequestError, Rules

log = logging.getLogger(__name__)

CHOICES: Final = 3  #: number of choices; before each further one, the state has caught up
#: seconds for one choice: other binds wait for the lock, and what filter has found is found again at once
CHOICE_SECONDS: Final = 0.2
SETTLE_ATTEMPTS: Final = 5  #: reads of a pod whose bind had no answer
SETTLE_PAUSE: Final = 0.2  #: seconds before the second read; doubled for each further one


class Refused(Exception):
    """The pod is not bound; the text says why and goes into the pod's events."""


class Binder:
    """Binds pods, several at once; only the choice of the cards is serial."""

    def __init__(
        self, client: KubeClient, state: ClusterState, rules: Rules, recent: Recent, complete: Callable[[], int]
    ) -> None:
        """`complete`: Fence.pass_.

        Its number tells whether the state is the same as before; it may raise Behind.
        """
        self._client = client
        self._state = state
        self._rules = rules
        self._complete = complete
        self._recent = recent
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends the waiting for answers about binds with unknown result."""
        self._stopping.set()

    def bind(self, args: ExtenderBindingArgs) -> None:
        """Puts the pod on the node, with its allocation in the same transaction.

        Raises Refused when the pod is not there.

        Other programs may bind, too: the API server decides, and a conflict is a refusal. Raises Behind where another
        replica leads.
        """
        request = self._request(args)
        record: str | None = None
        if request is not None:
            chosen = self._chosen(args, request)
            if chosen is None:
                return
            record = allocation.encode(chosen)
        try:
            annotations = {names.ALLOCATION: record} if record is not None else {}
            writes.bind(self._client, args.PodNamespace, args.PodName, args.PodUID, args.Node, annotations)
        except ApiError as error:
            self._failed(args, record, error)
        log.info("bound pod %s/%s to %s: %s", args.PodNamespace, args.PodName, args.Node, record or "no cards")

    def _request(self, args: ExtenderBindingArgs) -> PodRequest | None:
        found, request = self._recent.get(args.PodUID)
        if found:
            return request
        try:
            raw = self._client.get(writes.pod_path(args.PodNamespace, args.PodName))
        except ApiError as error:
            raise Refused(f"cannot read the pod: {error}") from None
        pod = msgspec.json.decode(raw, type=Pod)
        if pod.metadata.uid != args.PodUID:
            raise Refused("another pod of the same name has replaced this pod")
        try:
            return asked(pod, self._rules)
        except RequestError as error:
            raise Refused(f"cannot place the pod: {error}") from None

    def _chosen(self, args: ExtenderBindingArgs, request: PodRequest) -> Allocation | None:
        """The cards, chosen in a state that is still complete; None when the pod is on that node already.

        This thread may have been delayed since its call passed the fence, for so long that another replica has led
        meanwhile.
        """
        for _ in range(CHOICES):
            before = self._complete()
            known = self._state.holding(args.PodUID)
            if known is not None and known.confirmed:
                if known.node == args.Node:
                    return None
                raise Refused(f"the pod is already bound to node {known.node}")
            found = self._choose(args, request)
            try:
                if self._complete() == before:
                    return found
            except Behind:
                self._state.retract(args.PodUID)
                raise
            self._state.retract(args.PodUID)
        raise Refused(f"the cluster state changed {CHOICES} times while choosing cards; retrying")

    def _choose(self, args: ExtenderBindingArgs, request: PodRequest) -> Allocation:
        """Chooses the cards and counts them at once, so that the next bind sees them as taken."""
        with self._state.lock:
            if away := self._state.away(args.Node):
                raise Refused(f"node {args.Node} takes no pods now: {away}")
            cards = self._state.cards_of(args.Node, without=args.PodUID)
            if cards is None:
                raise Refused(f"node {args.Node} has no cards")
            until = time.monotonic() + CHOICE_SECONDS
            found = fit_pod(cards, request, policy(request.gpu_policy), until=until)
            if isinstance(found, Rejection):
                raise Refused(f"node {args.Node} has no room left: {found.sentence}")
            held = allocation.held((each.kind, found.containers[each.name]) for each in request.containers)
            self._state.hold(args.PodUID, Holding(args.Node, held, time.monotonic() + DOUBT_SECONDS))
        return found

    def _failed(self, args: ExtenderBindingArgs, record: str | None, error: ApiError) -> None:
        """Returns when the bind took effect in spite of the error, else raises Refused."""
        unknown = isinstance(error, Unreachable) or error.status >= 500
        if not unknown and error.status != 409:
            self._state.retract(args.PodUID)
            raise Refused(str(error)) from None
        pod = self._read(args, SETTLE_ATTEMPTS if unknown else 1)
        if pod is None:  # the next comparison with the API server settles the bind; until then the slices stay counted
            raise Refused(f"cannot find out whether the pod is bound: {error}") from None
        if pod.metadata.uid == args.PodUID and pod.spec.nodeName:
            holding = holding_of(pod)
            if holding is not None:
                self._state.hold(args.PodUID, holding)
            else:
                self._state.retract(args.PodUID)
            if pod.spec.nodeName == args.Node and pod.metadata.annotations.allocation == record:
                return
            raise Refused(f"the pod is already bound to node {pod.spec.nodeName}") from None
        if not unknown or pod.metadata.uid != args.PodUID:
            self._state.retract(args.PodUID)
        # Else the request may still be on its way in the API server: the slices stay counted for a while.
        raise Refused(str(error)) from None

    def _read(self, args: ExtenderBindingArgs, attempts: int) -> seen.Pod | None:
        pause = SETTLE_PAUSE
        for attempt in range(attempts):
            if attempt and self._stopping.wait(pause):
                return None
            pause *= 2
            try:
                raw = self._client.get(writes.pod_path(args.PodNamespace, args.PodName))
                return msgspec.json.decode(raw, type=seen.Pod)
            except ApiError as error:
                if error.status == 404:
                    return seen.Pod()
                log.warning("cannot read pod %s/%s: %s", args.PodNamespace, args.PodName, error)
        return None
