"""A kubelet for this machine: real device-plugin and pod-resources protocols, containers as local processes.

Below `root`, it has the same folders as a kubelet: device-plugins/ (sockets and the checkpoint), pod-resources/, pods/
and logs/<namespace>_<pod>_<container>.log.
"""

import logging
import threading
import time
from fractions import Fraction
from pathlib import Path

import msgspec

from vgpu.kube import writes
from vgpu.kube.client import KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import RawObject
from vgpu.resources import parse_quantity
from vgpu.standin.apiserver.podrules import canonical, is_extended, requested
from vgpu.standin.kubelet.devicemanager import AllocationError, DeviceManager, Reusable
from vgpu.standin.kubelet.nodestatus import NodeStatus
from vgpu.standin.kubelet.podresources import PodResources
from vgpu.standin.kubelet.podworker import Pod, PodWorker

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  #: bytes; a unix socket address may have 107, and gRPC adds some


class Kubelet:
    """One node. `start` returns once plugins can register; the API server may be away at that time."""

    def __init__(self, client: KubeClient, node_name: str, root: Path, cdi_dir: Path, reserved: int = 0) -> None:
        """`reserved`: MiB of memory that pods cannot have.

        Raises ValueError when `root` is too long for the sockets below it.
        """
        if len(str(root / "device-plugins" / "kubelet.sock")) > MAX_SOCKET_PATH:
            raise ValueError(f"{root}: too long for a unix socket below it, use a path of at most 70 bytes")
        self.client = client
        self.node_name = node_name
        self.root = root
        self.cdi_dir = cdi_dir
        self._workers: dict[str, PodWorker] = {}
        self._lock = threading.RLock()
        self._admission = threading.Lock()
        self._stopping = False
        self._devices = self._device_manager()
        self._resources = PodResources(root / "pod-resources", self._devices, self._active_pods)
        self._node = NodeStatus(client, node_name, lambda: self._devices.capacity(), reserved)
        self._informer = Informer(
            client, "/api/v1/pods", RawObject,
            params={"fieldSelector": f"spec.nodeName={node_name}"}, on_change=self._changed,
        )  # fmt: skip

    def _device_manager(self) -> DeviceManager:
        return DeviceManager(self.root / "device-plugins", self._active_uids, lambda: self._node.changed())

    @property
    def devices(self) -> DeviceManager:
        return self._devices

    def start(self) -> None:
        self._serve()
        self._node.start()
        self._informer.start()

    def _serve(self) -> None:
        if not self._devices.checkpoint_path.exists():
            self._node.zero_extended()
        self._devices.start()
        self._resources.start()

    def stop(self) -> None:
        """Switches the machine off: kills every container; the pods stay as they are in the API server."""
        self._stopping = True
        self._devices.stop()  # ends a call to a plugin for which an admission may be waiting
        self._informer.stop()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            worker.abandon()
        self._resources.stop()
        self._node.stop()

    def restart(self) -> None:
        """Restarts the kubelet without its containers.

        Connections and sockets end, plugins must register again, and allocations are read from the checkpoint. Running
        containers stay. Their pods are admitted again, and pods that no longer fit become Failed.
        """
        with self._admission, self._lock:
            self._devices.stop()
            self._resources.stop()
            self._devices = self._device_manager()
            self._resources = PodResources(self.root / "pod-resources", self._devices, self._active_pods)
            self._serve()
            self._node.changed()
            for uid, worker in list(self._workers.items()):
                if worker.finished:
                    continue
                refused = self._lack(worker.pod, besides=uid)
                if refused:
                    log.warning("pod %s: %s", worker.pod["metadata"]["name"], refused[1])
                    worker.reject(*refused)

    def _active_uids(self) -> set[str]:
        with self._lock:
            return {uid for uid, worker in self._workers.items() if not worker.finished}

    def _active_pods(self) -> list[Pod]:
        with self._lock:
            return [worker.pod for worker in self._workers.values() if not worker.finished]

    def _changed(self, change: str, item: RawObject) -> None:
        pod: Pod = msgspec.to_builtins(item)
        uid = item.metadata.uid
        with self._lock:
            worker = self._workers.get(uid)
            if change == "gone":
                if worker is not None:
                    worker.vanished()
                return
            if worker is not None:
                worker.update(pod)
                return
            if self._stopping or item.status.get("phase") in ("Succeeded", "Failed"):
                return
            worker = self._workers[uid] = PodWorker(self, pod, self._ended)
        if item.metadata.deletionTimestamp is None:
            with self._admission:
                self._admit(worker)
        worker.start()

    def _ended(self, worker: PodWorker) -> None:
        with self._lock:
            self._workers.pop(worker.uid, None)

    def _admit(self, worker: PodWorker) -> None:
        """Admits a pod as the kubelet does: first the node's resources, then devices for each container in order."""
        refused = self._lack(worker.pod, besides=worker.uid) or self._allocate(worker.pod)
        if refused and not self._stopping:
            meta = worker.pod["metadata"]
            about = writes.pod_reference(meta["namespace"], meta["name"], meta["uid"])
            worker.reject(*refused)
            writes.emit_event(self.client, about, *refused, reporting="kubelet", host=self.node_name)

    def _lack(self, pod: Pod, *, besides: str) -> tuple[str, str] | None:
        """(reason, message) when the node lacks an extended resource for the pod, next to the other active pods."""
        offered = {name: parse_quantity(value) for name, value in self._node.allocatable().items()}
        offered |= {name: Fraction(count) for name, count in self._devices.offered(besides).items()}
        others = [requested(one) for one in self._active_pods() if one["metadata"]["uid"] != besides]
        for name, wanted in requested(pod).items():
            if not is_extended(name) or name not in offered or not wanted:
                continue
            used = sum((one.get(name, Fraction()) for one in others), Fraction())
            if used + wanted > offered[name]:
                text = f"Node didn't have enough resource: {name}, requested: {canonical(int(wanted))}"
                figures = f"used: {canonical(int(used))}, capacity: {canonical(int(offered[name]))}"
                return f"OutOf{name}", f"Pod was rejected: {text}, {figures}"
        return None

    def _allocate(self, pod: Pod) -> tuple[str, str] | None:
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        reusable: Reusable = {}
        started = time.monotonic()
        try:
            for container in spec.get("initContainers") or ():
                is_init = container.get("restartPolicy") != "Always"
                self._devices.allocate(uid, container, reusable, is_init=is_init)
            for container in spec["containers"]:
                self._devices.allocate(uid, container, reusable, is_init=False)
        except AllocationError as error:
            text = f"Pod was rejected: Allocate failed due to {error}, which is unexpected"
            return "UnexpectedAdmissionError", text
        log.debug("pod %s admitted in %.1f ms", pod["metadata"]["name"], 1000 * (time.monotonic() - started))
        return None
