"""Keeps the cluster state equal to the API server: two informers, and a full comparison now and then."""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from scheduler.cluster import Claim, ClusterState, Holding
from scheduler.metrics import DRIFT
from vgpu import allocation, devices, names
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Node, ObjectList, Pod, RawObject, kinds

log = logging.getLogger(__name__)

T = TypeVar("T")

PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
PAGE = "1000"
#: Seconds between the two looks of a comparison: what the informers were only late with has arrived by the second
SECOND_LOOK = 2.0
#: Seconds for the informers to tell what is missing, before it is listed
CATCH_UP_SECONDS = 1.0
CATCH_UP_LOOK = 0.02


def holding_of(pod: Pod) -> Holding | None:
    """What a pod holds according to its record; None when it is not bound, has no record or is finished.

    A pod that is being deleted holds its slices until it is gone: its processes may still run.
    """
    record = pod.metadata.annotations.get(names.ALLOCATION)
    if record is None or not pod.spec.nodeName or pod.finished:
        return None
    try:
        found = allocation.decode(record)
    except ValueError as error:
        log.warning("pod %s/%s: %s", pod.metadata.namespace, pod.metadata.name, error)
        return None
    order = kinds(pod)
    held = allocation.held((kind, found.of(name)) for name, kind in order)
    meta = pod.metadata
    version = int(meta.resourceVersion) if meta.resourceVersion.isdecimal() else 0
    if not found.moving:
        return Holding(pod.spec.nodeName, held, version=version)
    now, then = (
        allocation.held((kind, slices.get(name, ())) for name, kind in order)
        for slices in (found.containers, found.moved().containers)
    )
    claim = Claim(meta.namespace, meta.name, meta.resourceVersion, found, now, then)
    return Holding(pod.spec.nodeName, held, claim=claim, version=version)


def cards_of(node: Node) -> tuple[devices.Inventory, frozenset[str]]:
    """A node's inventory (empty when it has none or it cannot be read) and the UUIDs of its cordoned cards."""
    text = node.metadata.annotations.get(names.DEVICES)
    inventory = devices.Inventory()
    if text:
        try:
            inventory = devices.decode_inventory(text)
        except ValueError as error:
            log.warning("node %s: %s", node.metadata.name, error)
    cordon = node.metadata.annotations.get(names.CORDON, "")
    return inventory, frozenset(part.strip() for part in cordon.split(",") if part.strip())


class Feed:
    """Pods are found by `spec.schedulerName`, which cannot be changed; a label could be taken off by anybody."""

    def __init__(self, client: KubeClient, state: ClusterState, scheduler_name: str, reconcile_seconds: float) -> None:
        self.state = state
        self._client = client
        self._selector = {"fieldSelector": f"spec.schedulerName={scheduler_name}"}
        self._period = reconcile_seconds
        self._nodes: Informer[Node] = Informer(
            client, NODES, Node, on_change=self._node_changed, on_replace=self._nodes_listed
        )
        self._pods: Informer[Pod] = Informer(
            client,
            PODS,
            Pod,
            params=self._selector,
            on_change=self._pod_changed,
            on_list=self._pods_asked,
            on_replace=self._pods_listed,
        )
        self._mark = 0  # of the moment at which the pods' informer asked for its list
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconcile", daemon=True)

    def start(self) -> None:
        self._nodes.start()
        self._pods.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._nodes.stop()
        self._pods.stop()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def ready(self) -> bool:
        """Both first lists have been taken over."""
        return self._nodes.synced.is_set() and self._pods.synced.is_set()

    # Fence

    def catch_up(self) -> None:
        """Returns when the state holds everything that the API server had confirmed when this was called.

        What the informers have not told within CATCH_UP_SECONDS (a watch says how far it is only with a change of what
        it watches, or once a minute) is listed. Raises ApiError where the API server does not answer.
        """
        wanted = {
            informer: _version(self._client, path, params)
            for informer, path, params in ((self._nodes, NODES, {}), (self._pods, PODS, self._selector))
        }
        deadline = time.monotonic() + CATCH_UP_SECONDS
        while not all(_reached(informer.version, version) for informer, version in wanted.items()):
            if time.monotonic() > deadline:
                self._take_over()
                return
            if self._stopping.wait(CATCH_UP_LOOK):
                return

    def _take_over(self) -> None:
        """Lists everything and takes it over at once; what the informers tell later has been true before."""
        mark = self.state.mark()
        self._compare_nodes(mark)
        self.state.repair(self.state.differences(_expected(list_all(self._client, PODS, Pod, self._selector)), mark))

    # Informers

    def _node_changed(self, change: str, node: Node) -> None:
        if change == "gone":
            self.state.remove_node(node.metadata.name)
        else:
            self.state.set_node(node.metadata.name, *cards_of(node))

    def _nodes_listed(self, nodes: Iterable[Node]) -> None:
        present = set()
        for node in nodes:
            present.add(node.metadata.name)
            self.state.set_node(node.metadata.name, *cards_of(node))
        for name in self.state.stale_nodes(present, self.state.mark()):
            self.state.remove_node(name)

    def _pod_changed(self, change: str, pod: Pod) -> None:
        holding = None if change == "gone" else holding_of(pod)
        if holding is not None:
            self.state.hold(pod.metadata.uid, holding)
        elif change == "gone" or pod.finished:
            self.state.release(pod.metadata.uid)
        # Else the pod is not bound yet, as far as this event knows: a bind on its way stays counted.

    def _pods_asked(self) -> None:
        self._mark = self.state.mark()

    def _pods_listed(self, pods: Iterable[Pod]) -> None:
        expected = _expected(pods)
        found = self.state.differences(expected, self.state.mark())
        # A pod that the list lacks may have been bound, and confirmed, since it was asked for: the watch will tell.
        old = self.state.differences(expected, self._mark)
        self.state.repair({uid: wanted for uid, wanted in found.items() if wanted is not None or uid in old})

    # Comparison

    def _run(self) -> None:
        while not self._stopping.wait(self._period):
            if self.ready:
                try:
                    self.reconcile()
                except (ApiError, msgspec.MsgspecError) as error:
                    log.warning("comparison with the API server not possible now: %s", error)

    def reconcile(self) -> int:
        """Lists everything afresh and repairs what differs; returns the number of slices that had been wrong.

        What differs is looked at twice: a change that the informers have not told yet is no drift.
        """
        mark = self.state.mark()
        self._compare_nodes(mark)
        suspects = self.state.differences(_expected(list_all(self._client, PODS, Pod, self._selector)), mark)
        wrong = 0
        if suspects and not self._stopping.wait(SECOND_LOOK):
            again = self.state.differences(_expected(list_all(self._client, PODS, Pod, self._selector)), mark)
            certain = {uid: wanted for uid, wanted in again.items() if uid in suspects}
            wrong = self.state.repair(certain)
            if wrong:
                log.warning("%d slices of %d pods were not what the API server says: repaired", wrong, len(certain))
        DRIFT.set(wrong)
        self.state.settled(mark)
        return wrong

    def _compare_nodes(self, mark: int) -> None:
        nodes = {node.metadata.name: node for node in list_all(self._client, NODES, Node, {})}
        for name, node in nodes.items():
            if self.state.unchanged(name, mark):
                self.state.set_node(name, *cards_of(node))
        for name in self.state.stale_nodes(nodes, mark):
            self.state.remove_node(name)


def _version(client: KubeClient, path: str, params: Mapping[str, str]) -> str:
    """The resourceVersion of this moment, from etcd and not from a cache: a list without resourceVersion."""
    page = msgspec.json.decode(client.request("GET", path, params={**params, "limit": "1"}), type=ObjectList[RawObject])
    return page.metadata.resourceVersion


def _reached(have: str, wanted: str) -> bool:
    """Versions of one kind can be compared (KEP-5504, Kubernetes 1.35; true of etcd always); others never match."""
    return have.isdecimal() and wanted.isdecimal() and int(have) >= int(wanted)


def list_all(client: KubeClient, path: str, type_: type[T], params: Mapping[str, str]) -> list[T]:
    """Everything at `path`, page by page."""
    decoder: msgspec.json.Decoder[ObjectList[T]] = msgspec.json.Decoder(ObjectList[type_])  # type: ignore[valid-type]  # a type known only at run time
    items: list[T] = []
    token = ""
    while True:
        query = {**params, "limit": PAGE} | ({"continue": token} if token else {})
        page = decoder.decode(client.request("GET", path, params=query, timeout=60))
        items += page.items or []
        token = page.metadata.continue_
        if not token:
            return items


def _expected(pods: Iterable[Pod]) -> dict[str, Holding]:
    found = ((pod.metadata.uid, holding_of(pod)) for pod in pods)
    return {uid: holding for uid, holding in found if holding is not None}
