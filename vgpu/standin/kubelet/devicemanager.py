"""The kubelet's device manager: registration of plugins, their devices, allocation at admission, the checkpoint.

Order and corner cases follow k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/manager.go (without NUMA hints).
"""

import base64
import logging
import random
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from vgpu.kubelet import checkpoint
from vgpu.kubelet.checkpoint import Checkpoint, Entry
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2, api_pb2_grpc
from vgpu.standin.apiserver.podrules import is_extended
from vgpu.standin.kubelet.pluginclient import Devices, Endpoint, PluginError

log = logging.getLogger(__name__)

VERSION: Final = "v1beta1"
SOCKET: Final = "kubelet.sock"

Reusable = dict[
    str, set[str]
]  #: resource → ids of finished init containers that the next container of the pod may take


class AllocationError(Exception):
    """There are no devices for a container; the pod is rejected with this text."""


class DeviceManager:
    """Serves `<directory>/kubelet.sock` and keeps the checkpoint in the same directory.

    `active` returns the uids of the pods that still hold their devices; `on_change` is called when capacity changes.
    """

    def __init__(self, directory: Path, active: Callable[[], Collection[str]], on_change: Callable[[], None]) -> None:
        self.directory = directory
        self._active = active
        self._on_change = on_change
        self._lock = threading.RLock()
        self._endpoints: dict[str, Endpoint | None] = {}  # None: known from the checkpoint, but not registered since
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}
        self._nodes: dict[str, dict[str, list[str]]] = {}  # resource → id → NUMA nodes
        self._entries: list[Entry] = []
        self._server: Any = None
        self._stopped = False

    @property
    def checkpoint_path(self) -> Path:
        return self.directory / checkpoint.FILE_NAME

    def start(self) -> None:
        """Reads the checkpoint, removes every socket in the directory, as the kubelet does, and serves registration."""
        self.directory.mkdir(parents=True, exist_ok=True)
        known = checkpoint.read(self.checkpoint_path)
        self._entries = list(known.entries)
        for resource in known.registered:
            self._endpoints[resource] = None
            self._healthy[resource], self._unhealthy[resource] = set(), set()
        for path in self.directory.iterdir():
            if path != self.checkpoint_path and not path.is_dir():
                path.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(4, thread_name_prefix="registration"))
        api_pb2_grpc.add_RegistrationServicer_to_server(_Registration(self), self._server)
        self._server.add_insecure_port(f"unix:{self.directory / SOCKET}")
        self._server.start()

    def stop(self) -> None:
        self._stopped = True
        if self._server is not None:
            self._server.stop(grace=None).wait()
        with self._lock:
            endpoints = [one for one in self._endpoints.values() if one is not None]
        for endpoint in endpoints:
            endpoint.stop()

    def register(self, request: api_pb2.RegisterRequest) -> None:
        """Dials the plugin back before the answer. Raises PluginError."""
        if request.version != VERSION:
            raise PluginError(f"requested API version {request.version!r} is not supported by kubelet, {VERSION!r} is")
        if not is_extended(request.resource_name):
            raise PluginError(f"the ResourceName {request.resource_name!r} is invalid")
        socket = self.directory / request.endpoint
        endpoint = Endpoint(request.resource_name, socket, self._devices_changed, self._ended)
        with self._lock:
            before = self._endpoints.get(request.resource_name)
            self._endpoints[request.resource_name] = endpoint
        if before is not None:
            before.stop()
        endpoint.watch()
        log.info("device plugin %s registered for %s", request.endpoint, request.resource_name)

    def _devices_changed(self, endpoint: Endpoint, devices: Devices) -> None:
        with self._lock:
            if self._endpoints.get(endpoint.resource) is not endpoint:
                return
            healthy = {device.ID for device in devices if device.health == "Healthy"}
            self._healthy[endpoint.resource] = healthy
            self._unhealthy[endpoint.resource] = {device.ID for device in devices} - healthy
            self._nodes[endpoint.resource] = {
                device.ID: [str(node.ID) for node in device.topology.nodes] or [checkpoint.NO_NUMA]
                for device in devices
            }
            self._write()
        self._on_change()

    def _ended(self, endpoint: Endpoint) -> None:
        with self._lock:
            if self._stopped or self._endpoints.get(endpoint.resource) is not endpoint:
                return
            self._unhealthy[endpoint.resource] = self._ids(endpoint.resource)
            self._healthy[endpoint.resource] = set()
        log.warning("device plugin of %s has gone: its devices are unhealthy", endpoint.resource)
        self._on_change()

    def _ids(self, resource: str) -> set[str]:
        return self._healthy.get(resource, set()) | self._unhealthy.get(resource, set())

    def capacity(self) -> tuple[dict[str, int], dict[str, int]]:
        """(capacity, allocatable) of the node by resource: number of all ids, and of the healthy ids."""
        with self._lock:
            return (
                {resource: len(self._ids(resource)) for resource in self._healthy},
                {resource: len(ids) for resource, ids in self._healthy.items()},
            )

    def entries(self) -> list[Entry]:
        """All held ids, in the order of allocation."""
        with self._lock:
            return list(self._entries)

    def healthy(self) -> dict[str, set[str]]:
        with self._lock:
            return {resource: set(ids) for resource, ids in self._healthy.items()}

    def manages(self, resource: str) -> bool:
        with self._lock:
            return resource in self._healthy or any(entry.ResourceName == resource for entry in self._entries)

    def _held(self, uid: str, container: str, resource: str) -> frozenset[str]:
        return Checkpoint(self._entries).held_by(uid, container, resource)

    def offered(self, uid: str) -> dict[str, int]:
        """Allocatable for the admission of a pod: for a pod that holds devices, never less than it holds.

        So running pods stay while their plugin is away. Source: sanitizeNodeAllocatable.
        """
        with self._lock:
            offered = {resource: len(ids) for resource, ids in self._healthy.items()}
            if any(entry.PodUID == uid for entry in self._entries):
                for resource, count in offered.items():
                    offered[resource] = max(count, len(self._in_use(resource)))
            return offered

    def _in_use(self, resource: str) -> set[str]:
        return {one for entry in self._entries if entry.ResourceName == resource for one in entry.ids}

    def allocate(self, uid: str, container: Mapping[str, Any], reusable: Reusable, *, is_init: bool) -> None:
        """Allocates devices for one container, at admission. Raises AllocationError.

        Call it for the containers of a pod in order, init containers first, with the same `reusable`: an ordinary init
        container (`is_init`) leaves its ids there for later containers.
        """
        limits = (container.get("resources") or {}).get("limits") or {}
        for resource, value in limits.items():
            if self.manages(resource):
                self._allocate(uid, container["name"], resource, int(value), reusable.setdefault(resource, set()))
        with self._lock:
            for resource, ids in reusable.items():
                held = self._held(uid, container["name"], resource)
                if is_init:
                    ids |= held
                else:
                    ids -= held

    def _allocate(self, uid: str, container: str, resource: str, needed: int, reusable: set[str]) -> None:
        active = self._active()
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.PodUID in active]
            held = self._held(uid, container, resource)
            if held and len(held) != needed:
                text = f"changed request for resource {resource!r} from {len(held)} to {needed}"
                raise AllocationError(f"pod {uid!r} container {container!r} {text}")
            endpoint = self._endpoints.get(resource)
            healthy = self._healthy.get(resource, set())
            if resource not in self._healthy:
                raise AllocationError(f"cannot allocate unregistered device {resource}")
            if not healthy or endpoint is None:
                text = f"no healthy devices present; cannot allocate unhealthy devices {resource}"
                raise AllocationError(text)
            if not held <= healthy:
                text = "previously allocated devices are no longer healthy; cannot allocate unhealthy devices"
                raise AllocationError(f"{text} {resource}")
            if held or not needed:
                return
            in_use = self._in_use(resource)
        chosen = set(_some(reusable, needed))
        try:
            if len(chosen) < needed:
                chosen |= self._choose(endpoint, healthy - in_use, chosen, needed)
            response = endpoint.allocate(sorted(chosen))
        except PluginError as error:
            raise AllocationError(str(error)) from None
        with self._lock:
            numa: dict[str, list[str]] = {}
            for one in sorted(chosen):
                for node in self._nodes[resource].get(one, [checkpoint.NO_NUMA]):
                    numa.setdefault(node, []).append(one)
            encoded = base64.b64encode(response.SerializeToString()).decode()
            self._entries.append(Entry(uid, container, resource, numa, encoded))
            self._write()

    @staticmethod
    def _choose(endpoint: Endpoint, available: set[str], chosen: set[str], needed: int) -> set[str]:
        """The ids that are needed beyond `chosen`: the plugin's preferred ids, else any ids."""
        missing = needed - len(chosen)
        if len(available) < missing:
            raise AllocationError(
                f"requested number of devices unavailable for {endpoint.resource}. Requested: {missing},"
                f" Available: {len(available)}"
            )
        preferred = endpoint.preferred(sorted(available | chosen), sorted(chosen), needed)
        first = _some((preferred & available) - chosen, missing)
        return {*first, *_some(available - chosen - set(first), missing - len(first))}

    def pre_start(self, uid: str, container: Mapping[str, Any]) -> None:
        """Must be called before each creation of a container. Raises PluginError."""
        for resource in (container.get("resources") or {}).get("limits") or {}:
            if not self.manages(resource):
                continue
            with self._lock:
                if resource not in self._endpoints:
                    raise PluginError(f"endpoint not found in cache for a registered resource: {resource}")
                endpoint = self._endpoints[resource]
                held = self._held(uid, container["name"], resource)
            if endpoint is None:
                continue  # after a restart of the kubelet, until the plugin has registered again
            if not held:
                raise PluginError(
                    f"no devices found allocated in local cache for pod {uid}, container {container['name']}"
                )
            endpoint.pre_start(sorted(held))

    def responses(self, uid: str, container: str) -> list[api_pb2.ContainerAllocateResponse]:
        """The cached answers to Allocate of one container."""
        with self._lock:
            return [one.response for one in self._entries if (one.PodUID, one.ContainerName) == (uid, container)]

    def _write(self) -> None:
        registered: dict[str, list[str] | None] = {name: list(ids) for name, ids in self._healthy.items()}
        checkpoint.write(self.checkpoint_path, Checkpoint(self._entries, registered))


def _some(ids: Collection[str], count: int) -> list[str]:
    """Up to `count` of the ids. The kubelet walks a Go map, so no plugin may rely on an order."""
    return random.sample(sorted(ids), min(count, len(ids)))


class _Registration(api_pb2_grpc.RegistrationServicer):
    def __init__(self, manager: DeviceManager) -> None:
        self._manager = manager

    def Register(self, request: api_pb2.RegisterRequest, context: grpc.ServicerContext) -> api_pb2.Empty:
        try:
            self._manager.register(request)
        except PluginError as error:
            context.abort(grpc.StatusCode.UNKNOWN, str(error))
        return api_pb2.Empty()
