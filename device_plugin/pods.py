"""The pods of this node: a cache fed by list and watch.

One request to the API server helps where the cache may be behind the kubelet.
"""

import threading
from collections import OrderedDict
from typing import Final

import msgspec

from device_plugin.refusal import Refusal
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import ObjectList, Pod

_PATH: Final = "/api/v1/pods"
#: UIDs of deleted pods that are remembered, so that a late answer does not bring a deleted pod back
_REMEMBERED: Final = 4096
_decoder: Final = msgspec.json.Decoder(ObjectList[Pod])


class Pods:
    """Thread-safe; lists pods by UID, in the order in which they came to this node."""

    def __init__(self, client: KubeClient, node: str) -> None:
        self._client = client
        self._params = {"fieldSelector": f"spec.nodeName={node}"}
        self._changed = threading.Condition()
        self._pods: dict[str, Pod] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._informer = Informer(
            client, _PATH, Pod, params=self._params, on_change=self._change, on_replace=self._replace
        )

    @property
    def synced(self) -> bool:
        """Whether the API server has delivered all pods once."""
        return self._informer.synced.is_set()

    def start(self) -> None:
        self._informer.start()

    def stop(self) -> None:
        self._informer.stop()

    def get(self, uid: str) -> Pod | None:
        with self._changed:
            return self._pods.get(uid)

    def find(self, namespace: str, name: str) -> Pod | None:
        """The pod that has this name now, by the cache."""
        with self._changed:
            found = [p for p in self._pods.values() if (p.metadata.namespace, p.metadata.name) == (namespace, name)]
        return found[-1] if found else None

    def all(self) -> list[Pod]:
        """All pods, oldest on this node first."""
        with self._changed:
            return list(self._pods.values())

    def told_gone(self, uid: str) -> bool:
        """Whether the API server has reported that this pod is gone."""
        with self._changed:
            return uid in self._gone

    def refresh(self, *, certain: bool = False) -> None:
        """Asks the API server now; raises Refusal when it does not answer.

        The API server answers from its cache, which is by node, as it answers the kubelet's own watch. `certain`: the
        answer must be as of this moment; for that, servers before 1.31 read all pods of the cluster.
        """
        params = self._params if certain else {**self._params, "resourceVersion": "0"}
        try:
            answer = self._client.request("GET", _PATH, params=params, timeout=5)
        except ApiError as error:
            raise Refusal(f"the API server does not list this node's pods: {error}", transient=True) from None
        with self._changed:
            for pod in _decoder.decode(answer).items or []:
                self._put(pod)

    def wait(self, seconds: float) -> None:
        """Waits for the next change, `seconds` at most."""
        with self._changed:
            self._changed.wait(seconds)

    def _put(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        known = self._pods.get(uid)
        if uid not in self._gone and (known is None or _version(known) <= _version(pod)):
            self._pods[uid] = pod

    def _change(self, change: str, pod: Pod) -> None:
        with self._changed:
            if change == "gone":
                self._pods.pop(pod.metadata.uid, None)
                self._forget(pod.metadata.uid)
            else:
                self._put(pod)
            self._changed.notify_all()

    def _replace(self, pods: list[Pod]) -> None:
        with self._changed:
            listed = {pod.metadata.uid for pod in pods}
            for uid in [uid for uid in self._pods if uid not in listed]:
                del self._pods[uid]
            for pod in sorted(pods, key=lambda pod: pod.metadata.creationTimestamp or ""):
                self._put(pod)
            self._changed.notify_all()

    def _forget(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)


def _version(pod: Pod) -> int:
    """The pod's resourceVersion as a number, which grows with each change; 0 where it is no number.

    Source: Kubernetes API concepts, "Resource versions".
    """
    text = pod.metadata.resourceVersion
    return int(text) if text.isdecimal() else 0


def allocation_of(pod: Pod) -> Allocation | None:
    """The slices that the scheduler recorded on a pod, None: none; raises Refusal when the record cannot be read."""
    text = pod.metadata.annotations.get(names.ALLOCATION)
    if text is None:
        return None
    try:
        return allocation.decode(text)
    except ValueError as error:
        raise Refusal(f"pod {full_name(pod)}: {error}", pod=pod) from None


def full_name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
