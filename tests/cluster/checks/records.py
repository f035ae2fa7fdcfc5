"""Slices by the records of the pods, followed change by change, so that no state is missed."""

import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.credentials import NODE
from tests.cluster.node import Node
from vgpu import names
from vgpu.allocation import Held, decode, held, merge
from vgpu.devices import Gpu, decode_inventory
from vgpu.kube.client import KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Pod, kinds


def cards(node: Node) -> dict[str, Gpu]:
    """The node's cards by UUID, as it publishes them."""
    text = node.kubectl.get("node", NODE)["metadata"]["annotations"][names.DEVICES]
    return {gpu.uuid: gpu for gpu in decode_inventory(text).devices}


def holds(pod: Pod) -> dict[str, Held]:
    """What a pod occupies by its record; nothing before it is bound and after its end."""
    text = pod.metadata.annotations.get(names.ALLOCATION)
    if text is None or pod.finished:
        return {}
    slices = decode(text).containers
    return held((kind, slices.get(name, ())) for name, kind in kinds(pod))


def together(pods: Iterable[Pod]) -> dict[str, Held]:
    """What several pods occupy, by card."""
    total: dict[str, Held] = {}
    for pod in pods:
        total = merge(total, holds(pod))
    return total


class Records:
    """Follows all pods; `over` lists every state in which records of living pods exceeded a card."""

    def __init__(self, kubeconfig: Path, on: Mapping[str, Gpu]) -> None:
        self.over: list[str] = []
        self.peak: dict[str, int] = dict.fromkeys(on, 0)  #: card → largest number of MiB ever held
        self.states = 0
        self.ran: set[str] = set()  #: UIDs of pods that were seen running
        self._cards = on
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}
        client = KubeClient.connect(kubeconfig)
        self._informer = Informer(client, "/api/v1/pods", Pod, on_change=self._change, on_replace=self._replace)

    def __enter__(self) -> Self:
        logging.getLogger("vgpu.kube.informer").setLevel(logging.ERROR)  # a killed API server is expected
        self._informer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._informer.stop()

    def living(self) -> list[Pod]:
        """Pods that have not ended."""
        with self._lock:
            return [pod for pod in self._pods.values() if not pod.finished]

    def _change(self, change: str, pod: Pod) -> None:
        with self._lock:
            if change == "gone":
                self._pods.pop(pod.metadata.uid, None)
            else:
                self._pods[pod.metadata.uid] = pod
            self._look()

    def _replace(self, pods: list[Pod]) -> None:
        with self._lock:
            self._pods = {pod.metadata.uid: pod for pod in pods}
            self._look()

    def _look(self) -> None:
        self.states += 1
        self.ran |= {uid for uid, pod in self._pods.items() if pod.status.phase in ("Running", "Succeeded")}
        for uuid, now in together(self._pods.values()).items():
            card = self._cards[uuid]
            self.peak[uuid] = max(self.peak[uuid], now.mem)
            if now.mem > card.memory or now.cores > card.cores or now.slots > card.slots:
                self.over.append(f"card {card.index} holds {now}, of {card.memory} MiB, {card.cores} %, {card.slots}")
