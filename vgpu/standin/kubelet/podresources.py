"""The kubelet's pod-resources service (v1): which container holds which devices.

As in the real kubelet, ordinary init containers are left out and pods carry no uid.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from vgpu.kubelet import checkpoint
from vgpu.kubelet.podresources_v1 import api_pb2, api_pb2_grpc
from vgpu.standin.kubelet.devicemanager import DeviceManager

Pods = Callable[[], Iterable[Mapping[str, Any]]]


def _topology(nodes: Iterable[str]) -> api_pb2.TopologyInfo | None:
    known = [api_pb2.NUMANode(ID=int(node)) for node in nodes if node != checkpoint.NO_NUMA]
    return api_pb2.TopologyInfo(nodes=known) if known else None


class PodResources(api_pb2_grpc.PodResourcesListerServicer):
    """Serves `<directory>/kubelet.sock` about the pods that `pods` gives."""

    def __init__(self, directory: Path, manager: DeviceManager, pods: Pods) -> None:
        self._directory = directory
        self._manager = manager
        self._pods = pods
        self._server: Any = None

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        socket = self._directory / "kubelet.sock"
        socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(4, thread_name_prefix="pod-resources"))
        api_pb2_grpc.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(grace=None).wait()

    def _pod(self, pod: Mapping[str, Any]) -> api_pb2.PodResources:
        meta, spec = pod["metadata"], pod["spec"]
        sidecars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
        containers = []
        for container in (*sidecars, *spec["containers"]):
            devices = [
                api_pb2.ContainerDevices(resource_name=entry.ResourceName, device_ids=ids, topology=_topology([node]))
                for entry in self._manager.entries()
                if (entry.PodUID, entry.ContainerName) == (meta["uid"], container["name"])
                for node, ids in (entry.DeviceIDs or {}).items()
            ]
            containers.append(api_pb2.ContainerResources(name=container["name"], devices=devices))
        return api_pb2.PodResources(name=meta["name"], namespace=meta["namespace"], containers=containers)

    def List(self, _: api_pb2.ListPodResourcesRequest, __: grpc.ServicerContext) -> api_pb2.ListPodResourcesResponse:
        return api_pb2.ListPodResourcesResponse(pod_resources=[self._pod(pod) for pod in self._pods()])

    def Get(
        self, request: api_pb2.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> api_pb2.GetPodResourcesResponse:
        for pod in self._pods():
            meta = pod["metadata"]
            if (meta["namespace"], meta["name"]) == (request.pod_namespace, request.pod_name):
                return api_pb2.GetPodResourcesResponse(pod_resources=self._pod(pod))
        context.abort(grpc.StatusCode.NOT_FOUND, f"pod {request.pod_namespace}/{request.pod_name} not found")
        raise AssertionError("abort raises")

    def GetAllocatableResources(
        self, _: api_pb2.AllocatableResourcesRequest, __: grpc.ServicerContext
    ) -> api_pb2.AllocatableResourcesResponse:
        return api_pb2.AllocatableResourcesResponse(
            devices=[
                api_pb2.ContainerDevices(resource_name=resource, device_ids=[one])
                for resource, ids in self._manager.healthy().items()
                for one in sorted(ids)
            ]
        )
