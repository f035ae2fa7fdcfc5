"""Keeps the kubelet's Node object: registration, capacity and allocatable."""

import logging
import os
import platform
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from vgpu.kube.client import MERGE_PATCH, STRATEGIC_PATCH, ApiError, KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import RawObject
from vgpu.standin.apiserver.podrules import canonical, is_extended
from vgpu.standin.kubelet.podstatus import stamp

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.3

#: (capacity, allocatable) of device plugin resources
DeviceCapacity = Callable[[], tuple[dict[str, int], dict[str, int]]]


def _machine(reserved: int = 0) -> dict[str, str]:
    """The node's resources without any plugin, less `reserved` MiB of memory."""
    kib = max(0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024 - reserved * 1024)
    return {"cpu": str(os.cpu_count()), "memory": f"{kib}Ki", "pods": "110", "ephemeral-storage": "100Gi"}


class NodeStatus:
    """Copies extended resources in the node's capacity to allocatable, as the kubelet does."""

    def __init__(self, client: KubeClient, name: str, devices: DeviceCapacity, reserved: int = 0) -> None:
        """`reserved`: MiB of memory that pods cannot have (systemReserved)."""
        self._reserved = reserved
        self._client = client
        self._name = name
        self._devices = devices
        self._path = f"/api/v1/nodes/{name}"
        self._status: dict[str, Any] = {}
        self._version = 0  # version of `_status`: an answer and the watch report the same changes, in any order
        self._lock = threading.Lock()
        self._reset = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"node {name}", daemon=True)
        self._informer = Informer(
            client, "/api/v1/nodes", RawObject,
            params={"fieldSelector": f"metadata.name={name}"}, on_change=self._seen,
        )  # fmt: skip

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._informer.stop()

    def changed(self) -> None:
        """Must be called when device plugin resources have changed."""
        self._wake.set()

    def zero_extended(self) -> None:
        """The kubelet starts without a checkpoint: what was published for the node does not count any more."""
        self._reset = True
        self._wake.set()

    def allocatable(self) -> dict[str, str]:
        """Allocatable as last written or seen."""
        found: dict[str, str] = dict(self._status.get("allocatable") or {})
        return found

    def _seen(self, _: str, node: RawObject) -> None:
        self._take(node)
        self._wake.set()

    def _take(self, node: RawObject) -> None:
        with self._lock:
            version = int(node.metadata.resourceVersion)
            if version >= self._version:
                self._status, self._version = node.status, version

    def _run(self) -> None:
        registered = False
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                if not registered:
                    self._register()
                    registered = True
                    self._informer.start()
                self._publish()
            except ApiError as error:
                log.warning("node %s: %s", self._name, error)
                self._stopping.wait(RETRY_SECONDS)
                continue
            self._wake.wait()

    def _register(self) -> None:
        labels = {
            "kubernetes.io/hostname": self._name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        }
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": stamp()}
        status = {
            "capacity": _machine(),
            "allocatable": _machine(self._reserved),
            "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "operatingSystem": "linux"},
        }
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._name, "labels": labels},
            "status": status,
        }
        try:
            self._client.request("POST", "/api/v1/nodes", body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            self._client.request(
                "PATCH", f"{self._path}/status", body={"status": {"conditions": [ready]}}, content_type=STRATEGIC_PATCH
            )
        self._take(msgspec.json.decode(self._client.get(self._path), type=RawObject))

    def _publish(self) -> None:
        known = self._status
        plugin_capacity, plugin_allocatable = self._devices()
        published = {name: value for name, value in (known.get("capacity") or {}).items() if is_extended(name)}
        if self._reset:
            published = dict.fromkeys(published, "0")
        capacity = _machine() | published | {name: str(count) for name, count in plugin_capacity.items()}
        allocatable = (
            _machine(self._reserved) | published | {name: str(count) for name, count in plugin_allocatable.items()}
        )
        patch: dict[str, Any] = {}
        for part, wanted in (("capacity", capacity), ("allocatable", allocatable)):
            before = known.get(part) or {}
            exact = {name: canonical(value) for name, value in wanted.items()}
            changes = {name: value for name, value in exact.items() if before.get(name) != value}
            changes |= dict.fromkeys(before.keys() - wanted.keys())
            if changes:
                patch[part] = changes
        if patch:
            answer = self._client.request(
                "PATCH", f"{self._path}/status", body={"status": patch}, content_type=MERGE_PATCH
            )
            self._take(msgspec.json.decode(answer, type=RawObject))
        self._reset = False
