"""A container runtime's CRI service on a unix socket, with containers that a test defines."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec

from vgpu.kubelet.cri_v1 import api_pb2 as api
from vgpu.kubelet.cri_v1.api_pb2_grpc import RuntimeServiceServicer, add_RuntimeServiceServicer_to_server

POD_UID = "io.kubernetes.pod.uid"


class SmallRuntime(RuntimeServiceServicer):
    """Containers are named by pod UID and name; `run` makes the next instance of a container, `exit`
    ends the last one.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.name, self.version = "containerd", "v2.3.7"
        self.config: dict[str, Any] | None = None
        self.handlers: list[str] = []
        self.failure: grpc.StatusCode | None = None  # error of every call
        self._sandboxes: list[api.PodSandbox] = []
        self._containers: list[api.Container] = []
        self._codes: dict[str, int] = {}
        self._clock = 0
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(4))
        add_RuntimeServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        self.socket.unlink(missing_ok=True)

    # What a kubelet would do

    def sandbox(self, uid: str) -> str:
        """Makes a new sandbox of a pod; containers of the earlier sandbox stay until a test removes them."""
        self._clock += 1
        made = f"sandbox-{self._clock}"
        self._sandboxes.append(api.PodSandbox(id=made, created_at=self._clock, labels={POD_UID: uid}))
        return made

    def run(self, uid: str, name: str) -> None:
        own = [one.id for one in self._sandboxes if one.labels[POD_UID] == uid]
        sandbox = own[-1] if own else self.sandbox(uid)
        self._clock += 1
        attempt = sum(one.metadata.name == name and one.labels[POD_UID] == uid for one in self._containers)
        self._containers.append(
            api.Container(
                id=f"container-{self._clock}",
                pod_sandbox_id=sandbox,
                metadata=api.ContainerMetadata(name=name, attempt=attempt),
                state=api.CONTAINER_RUNNING,
                created_at=self._clock,
                labels={POD_UID: uid},
            )
        )

    def exit(self, uid: str, name: str, code: int) -> None:
        found = [one for one in self._containers if one.metadata.name == name and one.labels[POD_UID] == uid]
        found[-1].state = api.CONTAINER_EXITED
        self._codes[found[-1].id] = code

    def remove(self, uid: str, name: str) -> None:
        """Removes a container, as image and container garbage collection does with ended containers."""
        self._containers = [one for one in self._containers if (one.metadata.name, one.labels[POD_UID]) != (name, uid)]

    # The service

    def _check(self, context: grpc.ServicerContext) -> None:
        if self.failure is not None:
            context.abort(self.failure, "the runtime is out of order")

    def Version(self, request: Any, context: grpc.ServicerContext) -> api.VersionResponse:  # noqa: ARG002 signature of gRPC
        self._check(context)
        return api.VersionResponse(runtime_name=self.name, runtime_version=self.version, runtime_api_version="v1")

    def Status(self, request: Any, context: grpc.ServicerContext) -> api.StatusResponse:
        self._check(context)
        told = request.verbose and self.config is not None
        return api.StatusResponse(
            info={"config": msgspec.json.encode(self.config).decode()} if told else {},
            runtime_handlers=[api.RuntimeHandler(name=name) for name in self.handlers],
        )

    def ListPodSandbox(self, request: Any, context: grpc.ServicerContext) -> api.ListPodSandboxResponse:
        self._check(context)
        wanted = request.filter.label_selector[POD_UID]
        return api.ListPodSandboxResponse(items=[one for one in self._sandboxes if one.labels[POD_UID] == wanted])

    def ListContainers(self, request: Any, context: grpc.ServicerContext) -> api.ListContainersResponse:
        self._check(context)
        uid, sandbox = request.filter.label_selector[POD_UID], request.filter.pod_sandbox_id
        found = [one for one in self._containers if one.labels[POD_UID] == uid]
        return api.ListContainersResponse(
            containers=[one for one in found if not sandbox or one.pod_sandbox_id == sandbox]
        )

    def ContainerStatus(self, request: Any, context: grpc.ServicerContext) -> api.ContainerStatusResponse:
        self._check(context)
        if request.container_id not in self._codes:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no such container: {request.container_id}")
        return api.ContainerStatusResponse(
            status=api.ContainerStatus(id=request.container_id, exit_code=self._codes[request.container_id])
        )
