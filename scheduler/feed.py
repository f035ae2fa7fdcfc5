"""Keeps the cluster state equal to the API server: informers, and a regular comparison of versions.

The informers find pods by `spec.schedulerName`, which cannot be changed; anybody could remove a label. Pods that an
earlier scheduler name placed are found by admission's label. When such a pod loses the label, the feed asks the API
server whether the pod is gone.
"""

import logging
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from scheduler.agents import AgentPod, Agents
from scheduler.cluster import ClusterState, Holding
from scheduler.metrics import DRIFT
from scheduler.seen import Brief, Meta, Node, Pod, SeenNode, SeenPod, number, seen_node, seen_pod
from vgpu import names
from vgpu.kube import listing, writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.listing import Listing
from vgpu.kube.pace import gently

log = logging.getLogger(__name__)

T = TypeVar("T")

PODS: Final = "/api/v1/pods"
NODES: Final = "/api/v1/nodes"
NOW: Final = ""  #: used in place of a resourceVersion
#: Seconds between the two looks of a comparison: a change that only reached the informers late has arrived by the
#: second look
SECOND_LOOK = 2.0
#: Number of objects that the second look reads one by one; if there are more, the second look lists them
SINGLE_READS: Final = 100
#: Seconds for the informers to deliver what is missing, before the feed lists it
CATCH_UP_SECONDS = 1.0
CATCH_UP_LOOK = 0.02
#: Seconds for which the state remembers when something changed: longer than a list takes
REMEMBERED_SECONDS: Final = 900.0
ROUGHLY: Final = (0.8, 1.2)  #: factors of the period: replicas of many clusters do not ask at the same moment


class Feed:
    """Informers of nodes, of pods (this scheduler's, and those of its earlier names) and of the agents' pods."""

    def __init__(
        self,
        client: KubeClient,
        state: ClusterState,
        scheduler_name: str,
        reconcile_seconds: float,
        *,
        agents: tuple[str, str] | None = None,
        agent_port: int = names.PORT_NODE_HEALTH,
    ) -> None:
        """`agents`: namespace and label selector of the agents' pods; None: every node counts as served.

        `agent_port`: where agents report whether they serve.
        """
        self.state = state
        self._client = client
        self._period = reconcile_seconds
        self._own = {"fieldSelector": f"spec.schedulerName={scheduler_name}"}
        self._former = {
            "labelSelector": f"{names.LABEL_MANAGED}=true",
            "fieldSelector": f"spec.schedulerName!={scheduler_name}",
        }
        self._nodes: Informer[Node] = Informer(
            client, NODES, Node, shape=self._see_node, on_change=self._node_changed, on_replace=self._nodes_listed
        )
        self._pods: Informer[Pod] = Informer(
            client,
            PODS,
            Pod,
            shape=self._see_pod,
            params=self._own,
            on_change=self._pod_changed,
            on_list=self._pods_asked,
            on_replace=self._pods_listed,
        )
        self._others: Informer[Pod] = Informer(
            client,
            PODS,
            Pod,
            shape=self._see_pod,
            params=self._former,
            on_change=self._other_changed,
            on_replace=self._others_listed,
        )
        self._agents = Agents(state.set_away, followed=agents is not None, port=agent_port)
        self._informers: list[Informer[Any]] = [self._nodes, self._pods, self._others]
        if agents is not None:
            path = f"/api/v1/namespaces/{agents[0]}/pods"
            selected = {"labelSelector": agents[1]}
            self._informers.append(Informer(client, path, AgentPod, params=selected, on_change=self._agent_changed))
        self._mark = 0  # the moment at which the pods' informer asked for its list
        self._idle: dict[str, int] = {}  # uid → version, for pods that hold nothing
        self._strange: dict[str, tuple[str, str]] = {}  # uid → (namespace, name), for pods of an earlier scheduler name
        self._seen: dict[str, SeenNode] = {}  # by name
        self._leads: Callable[[], bool] = lambda: True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconcile", daemon=True)

    def start(self, leads: Callable[[], bool] | None = None) -> None:
        """`leads`: whether this replica makes the comparison now; it may raise ApiError."""
        self._leads = leads or self._leads
        self._agents.start()
        for informer in self._informers:
            informer.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for informer in self._informers:
            informer.stop()
        self._agents.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def ready(self) -> bool:
        """Whether all first lists have been taken over."""
        return all(informer.synced.is_set() for informer in self._informers)

    # Fence

    def catch_up(self) -> None:
        """Returns when the state holds everything that the API server had confirmed when this was called.

        A watch reports its version only with a change of its own objects, or once a minute. So the feed lists what the
        informers have not delivered within CATCH_UP_SECONDS. Raises ApiError where the API server does not answer.
        """
        nodes, pods = self._newest(NODES), self._newest(PODS)
        wanted: dict[Informer[Any], str] = {self._nodes: nodes, self._pods: pods, self._others: pods}
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while late := [each for each, version in wanted.items() if not _reached(each.version, version)]:
            if time.monotonic() > deadline:
                break
            if self._stopping.wait(CATCH_UP_LOOK):
                return
        # The informers deliver later what was true before.
        if self._nodes in late:
            self._take_over_nodes(NOW)
        for informer, params in ((self._pods, self._own), (self._others, self._former)):
            if informer in late:
                self._take_over_pods(params, NOW)

    def _newest(self, path: str) -> str:
        """The resourceVersion of this moment, from a list of one object that etcd answers."""
        found = Listing(self._client, path, Brief, {"limit": "1"}, accept=listing.METADATA_ONLY)
        listing.everything(found)
        return found.version

    def _take_over_nodes(self, version: str) -> None:
        """Lists the nodes as of this version or later (see _at_least).

        Takes over the nodes that have not changed meanwhile.
        """
        mark = self.state.mark()
        found: Listing[Node] = Listing(self._client, NODES, Node, _at_least(version))
        present = set()
        for node in (self._see_node(node) for part in found for node in gently(part)):
            present.add(node.name)
            if self.state.unchanged(node.name, mark):
                self._put_node(node)
        for name in self.state.stale_nodes(present, mark):
            self._drop_node(name)

    def _take_over_pods(self, params: Mapping[str, str], version: str) -> int:
        """Takes over the pods of one informer like _take_over_nodes; returns the number of slices that were wrong."""
        mark = self.state.mark()
        found: Listing[Pod] = Listing(self._client, PODS, Pod, {**params, **_at_least(version)})
        pods = [self._see_pod(pod) for part in found for pod in gently(part)]
        return self._repair(pods, mark, strange=params is self._former)

    def _repair(self, pods: Iterable[SeenPod], mark: int, *, strange: bool) -> int:
        expected: dict[str, Holding] = {}
        listed: set[str] = set()
        for pod in self._paced(pods):
            listed.add(pod.uid)
            if strange:
                self._strange[pod.uid] = pod.namespace, pod.name
            if pod.holding is not None:
                expected[pod.uid] = pod.holding
                self._idle.pop(pod.uid, None)
            else:
                self._idle[pod.uid] = pod.version
        found = self._among(self.state.differences(expected, mark), strange=strange)
        if strange:
            found = {uid: wanted for uid, wanted in found.items() if wanted is not None or uid in listed}
            for uid in self._strange.keys() - listed:
                self._ask(uid)
        return self.state.repair(found)

    def _among(self, found: Mapping[str, Holding | None], *, strange: bool) -> dict[str, Holding | None]:
        """The entries of `found` that belong to one informer."""
        return {uid: wanted for uid, wanted in found.items() if (uid in self._strange) is strange}

    def _paced(self, items: Iterable[T]) -> Iterable[T]:
        """The items with pauses between them, so that the scheduler answers verbs in the pauses.

        Before the first lists are complete, no verb can be answered, and there are no pauses.
        """
        return gently(items) if self.ready else items

    # Informers

    def _see_pod(self, pod: Pod) -> SeenPod:
        """The pod's facts; for a pod in a known version, the known holding."""
        meta = pod.metadata
        known = self.state.holding(meta.uid)
        if known is not None and known.confirmed and 0 < known.version == number(meta.resourceVersion):
            return SeenPod(meta.uid, sys.intern(meta.namespace), meta.name, known.version, known, finished=False)
        return seen_pod(pod)

    def _see_node(self, node: Node) -> SeenNode:
        known = self._seen.get(node.metadata.name)
        return known if known and 0 < known.version == number(node.metadata.resourceVersion) else seen_node(node)

    def _put_node(self, node: SeenNode) -> None:
        self._seen[node.name] = node
        self.state.set_node(node.name, node.inventory, node.cordoned)
        self._agents.mark(node.name, node.mark if node.inventory.devices else None)

    def _drop_node(self, name: str) -> None:
        self._seen.pop(name, None)
        self.state.remove_node(name)
        self._agents.mark(name, None)

    def _node_changed(self, change: str, node: SeenNode) -> None:
        if change == "gone":
            self._drop_node(node.name)
        else:
            self._put_node(node)

    def _nodes_listed(self, nodes: Iterable[SeenNode]) -> None:
        present = set()
        for node in self._paced(nodes):
            present.add(node.name)
            self._put_node(node)
        for name in {*self.state.stale_nodes(present, self.state.mark()), *(self._seen.keys() - present)}:
            self._drop_node(name)

    def _pod_changed(self, change: str, pod: SeenPod) -> None:
        if change != "gone" and pod.holding is not None:
            self.state.hold(pod.uid, pod.holding)
            self._idle.pop(pod.uid, None)
        elif change == "gone" or pod.finished:
            self.state.release(pod.uid)
            self._strange.pop(pod.uid, None)
        # If this event shows no bind, the scheduler keeps counting a bind that is under way for the pod.
        if change == "gone":
            self._idle.pop(pod.uid, None)
        elif pod.holding is None:
            self._idle[pod.uid] = pod.version

    def _pods_asked(self) -> None:
        self._mark = self.state.mark()

    def _pods_listed(self, pods: Iterable[SeenPod]) -> None:
        expected: dict[str, Holding] = {}
        idle: dict[str, int] = {}
        for pod in self._paced(pods):
            if pod.holding is not None:
                expected[pod.uid] = pod.holding
            else:
                idle[pod.uid] = pod.version
        self._idle = idle | {uid: version for uid, version in self._idle.items() if uid in self._strange}
        found = self._among(self.state.differences(expected, self.state.mark()), strange=False)
        # A pod that the list lacks may have been bound and confirmed after the list was requested: the watch will
        # report it.
        old = self.state.differences(expected, self._mark)
        certain = {uid: wanted for uid, wanted in found.items() if wanted is not None or self._old(uid, old)}
        self.state.repair(certain)

    def _old(self, uid: str, old: Mapping[str, Holding | None]) -> bool:
        """Whether the state's facts about the pod are older than the list, which comes from a cache."""
        known = self.state.holding(uid)
        listed = number(self._pods.listed)
        return uid in old and (known is None or not listed or known.version <= listed)

    def _other_changed(self, change: str, pod: SeenPod) -> None:
        """A pod that leaves the selection is gone, or has lost its label."""
        if change == "gone":
            self._strange[pod.uid] = pod.namespace, pod.name
            self._ask(pod.uid)
        else:
            self._strange[pod.uid] = pod.namespace, pod.name
            self._pod_changed(change, pod)

    def _others_listed(self, pods: Iterable[SeenPod]) -> None:
        self._repair(pods, self.state.mark(), strange=True)

    def _ask(self, uid: str) -> None:
        """Asks the API server whether this pod of an earlier name is gone.

        The pod stays counted until the API server answers.
        """
        namespace, name = self._strange.get(uid, ("", ""))
        try:
            pod = self._read_pod(namespace, name, uid)
        except (ApiError, msgspec.MsgspecError) as error:
            log.warning(
                "cannot find out whether pod %s/%s is gone; still counting its slices: %s", namespace, name, error
            )
            return
        if pod is None or pod.holding is None:
            self.state.release(uid)
            self._strange.pop(uid, None)
            self._idle.pop(uid, None)
        else:
            log.warning(
                "pod %s/%s has lost the label %s; still counting its slices", namespace, name, names.LABEL_MANAGED
            )
            self.state.hold(uid, pod.holding)

    def _agent_changed(self, change: str, pod: AgentPod) -> None:
        if change == "gone":
            self._agents.gone(pod)
        else:
            self._agents.put(pod)

    # Comparison

    def _run(self) -> None:
        moments: deque[tuple[float, int]] = deque()
        while not self._stopping.wait(self._period * random.uniform(*ROUGHLY)):
            moments.append((time.monotonic(), self.state.mark()))
            while moments and moments[0][0] < time.monotonic() - REMEMBERED_SECONDS:
                self.state.settled(moments.popleft()[1])
            try:
                if self.ready and self._leads():
                    self.reconcile()
            except (ApiError, msgspec.MsgspecError) as error:
                log.warning("cannot compare the state with the API server now: %s", error)

    def reconcile(self) -> int:
        """Compares the versions of all objects and reads what differs; returns the number of slices that were wrong.

        A difference is checked twice: a change that the informers have not delivered yet is no drift.
        """
        mark = self.state.mark()
        nodes, no_nodes = self._other_versions(NODES, {}, self._node_versions())
        pods, no_pods = self._other_versions(PODS, self._own, self._pod_versions(strange=False))
        others, no_others = self._other_versions(PODS, self._former, self._pod_versions(strange=True))
        wrong = 0
        if any((nodes, no_nodes, pods, no_pods, others, no_others)) and not self._stopping.wait(SECOND_LOOK):
            self._settle_nodes(nodes, no_nodes, mark)
            wrong = self._settle_pods(pods, no_pods, mark, strange=False)
            wrong += self._settle_pods(others, no_others, mark, strange=True)
            if wrong:
                log.warning("%d slices differed from the API server; corrected them", wrong)
        DRIFT.set(wrong)
        return wrong

    def _node_versions(self) -> dict[str, int]:
        """Node → version; -1 where the state differs from what the informer delivered."""
        known = self.state.node_names()
        told = {
            name: node.version if name in known or not node.inventory.devices else -1
            for name, node in self._seen.copy().items()
        }
        return dict.fromkeys(known, -1) | told

    def _pod_versions(self, *, strange: bool) -> dict[str, int]:
        """The same for pods, by uid; for a bind with unknown result, no version is expected yet."""
        known = self._idle.copy() | self.state.pod_versions()
        own = self._strange.copy()
        return {uid: version for uid, version in gently(known.items()) if (uid in own) is strange}

    def _other_versions(
        self, path: str, params: Mapping[str, str], known: dict[str, int]
    ) -> tuple[dict[str, Meta], list[str]]:
        """Returns (objects that are newer or unknown, keys that do not exist any more): by uid, nodes by name."""
        found: Listing[Brief] = Listing(
            self._client, path, Brief, {**params, **_at_least("0")}, accept=listing.METADATA_ONLY
        )
        newer: dict[str, Meta] = {}
        for part in found:
            for meta in gently(each.metadata for each in part):
                key = meta.name if path == NODES else meta.uid
                have = known.pop(key, None)
                if have is None or have < number(meta.resourceVersion):
                    newer[key] = meta
        listed = number(found.version)
        return newer, [key for key, version in known.items() if not listed or version <= listed]

    def _settle_nodes(self, newer: Mapping[str, Meta], missing: Iterable[str], mark: int) -> None:
        if len(newer) > SINGLE_READS:
            self._take_over_nodes("0")
            return
        now = self._node_versions()
        for name, meta in newer.items():
            if now.get(name, -1) < number(meta.resourceVersion) and self.state.unchanged(name, mark):
                node = self._read_node(name)
                if node is None:
                    self._drop_node(name)
                else:
                    self._put_node(node)
        for name in missing:
            if self.state.unchanged(name, mark):
                self._drop_node(name)

    def _settle_pods(self, newer: Mapping[str, Meta], missing: Iterable[str], mark: int, *, strange: bool) -> int:
        if len(newer) > SINGLE_READS:
            return self._take_over_pods(self._former if strange else self._own, "0")
        now = self._pod_versions(strange=strange)
        expected: dict[str, Holding | None] = {}
        for uid, meta in newer.items():
            if now.get(uid, -1) < number(meta.resourceVersion):
                pod = self._read_pod(meta.namespace, meta.name, uid)
                if strange:
                    self._strange[uid] = meta.namespace, meta.name
                expected[uid] = pod.holding if pod else None
                if pod is not None and pod.holding is None:
                    self._idle[uid] = pod.version
        for uid in missing:
            if strange:
                self._ask(uid)
            elif uid in now:
                expected[uid] = None
                self._idle.pop(uid, None)
        return self.state.repair(self.state.differing(expected, mark))

    def _read_pod(self, namespace: str, name: str, uid: str) -> SeenPod | None:
        """The pod as it is now; None: it is gone."""
        try:
            pod = msgspec.json.decode(self._client.get(writes.pod_path(namespace, name)), type=Pod)
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        return seen_pod(pod) if pod.metadata.uid == uid else None

    def _read_node(self, name: str) -> SeenNode | None:
        try:
            return seen_node(msgspec.json.decode(self._client.get(f"{NODES}/{name}"), type=Node))
        except ApiError as error:
            if error.status != 404:
                raise
            return None


def _at_least(version: str) -> dict[str, str]:
    """Parameters of a list that the API server answers from its cache: as of this version or later.

    NOW: of this moment. The cache of a kind does not reach a version that changes of other kinds have made, and refuses
    a list of such a version ("Too large resource version"). A list without version is answered by etcd, or from
    Kubernetes 1.31 on by the cache once etcd has said how far it is (KEP-2340).
    """
    return {"resourceVersion": version, "resourceVersionMatch": "NotOlderThan"} if version != NOW else {}


def _reached(have: str, wanted: str) -> bool:
    """Whether version `have` has reached `wanted`.

    Versions of one kind can be compared (KEP-5504, Kubernetes 1.35; true of etcd always); other texts never match.
    """
    return have.isdecimal() and wanted.isdecimal() and int(have) >= int(wanted)
