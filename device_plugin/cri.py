"""What the container runtime knows: its version and settings, and how far a pod's containers have come. Read only.

Source: k8s.io/cri-api pkg/apis/runtime/v1/api.proto (vgpu/kubelet/cri_v1); the labels are those that the kubelet gives
to sandboxes and containers (k8s.io/kubelet pkg/types/labels.go).
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import msgspec

from device_plugin.refusal import Refusal
from vgpu.kubelet.cri_v1 import api_pb2 as api
from vgpu.kubelet.cri_v1.api_pb2_grpc import RuntimeServiceStub

log = logging.getLogger(__name__)

#: Below the host's root: containerd, CRI-O, k3s and RKE2, k0s, MicroK8s, cri-dockerd
SOCKETS: Final = (
    "run/containerd/containerd.sock",
    "run/crio/crio.sock",
    "run/k3s/containerd/containerd.sock",
    "run/k0s/containerd.sock",
    "var/snap/microk8s/common/run/containerd.sock",
    "run/cri-dockerd.sock",
)
PATIENCE: Final = 3.0  #: seconds for one call

_POD_UID: Final = "io.kubernetes.pod.uid"
_MISSING: Final = (grpc.StatusCode.UNIMPLEMENTED,)  #: a runtime that implements only an older version of the protocol
_Answer = TypeVar("_Answer")


class Run(msgspec.Struct, frozen=True):
    """The last instance of a container in its pod's newest sandbox."""

    ended: bool = False
    exit_code: int | None = None  #: None: the container runs, or the agent did not ask for exit codes


class Facts(msgspec.Struct, frozen=True):
    """What a runtime reports about itself."""

    name: str = ""  #: containerd, cri-o
    version: str = ""
    config: dict[str, Any] | None = None  #: containerd's, as JSON; None: not reported
    handlers: tuple[str, ...] = ()  #: names of its runtime handlers; empty: not reported


def sockets(host_root: Path, configured: str = "") -> list[Path]:
    """Where to look for the runtime's socket, as seen from here; `configured`: its path on the host."""
    return [host_root / path.lstrip("/") for path in ([configured] if configured else SOCKETS)]


class Runtime:
    """The runtime behind the first of `sockets` that exists.

    Each question uses a new connection, so a restarted runtime is found.
    """

    def __init__(self, sockets: Sequence[Path]) -> None:
        self._sockets = tuple(sockets)

    @property
    def socket(self) -> Path | None:
        for path in self._sockets:
            try:
                if path.is_socket():
                    return path
            except OSError as error:  # a folder that this user may not read
                log.debug("%s: %s", path, error)
        return None

    def runs(self, pod_uid: str, exit_codes_of: Collection[str]) -> dict[str, Run] | None:
        """The last runs in the pod's newest sandbox, by container name.

        None: there is no runtime to ask. Raises Refusal when the runtime fails.
        """

        def ask(stub: Any) -> dict[str, Run]:
            labels = {_POD_UID: pod_uid}
            asked = api.ListPodSandboxRequest(filter=api.PodSandboxFilter(label_selector=labels))
            sandboxes = stub.ListPodSandbox(asked, timeout=PATIENCE).items
            newest = max(sandboxes, key=lambda one: one.created_at).id if sandboxes else ""
            wanted = api.ListContainersRequest(filter=api.ContainerFilter(label_selector=labels, pod_sandbox_id=newest))
            last: dict[str, Any] = {}
            for one in stub.ListContainers(wanted, timeout=PATIENCE).containers:
                known = last.get(one.metadata.name)
                if known is None or _age(known) < _age(one):
                    last[one.metadata.name] = one
            return {name: self._run(stub, one, ask=name in exit_codes_of) for name, one in last.items()}

        try:
            return self._call(ask)
        except grpc.RpcError as error:
            sentence = f"the container runtime does not list the containers of pod {pod_uid}: {_said(error)}"
            raise Refusal(sentence, transient=True) from None

    def _run(self, stub: Any, container: Any, *, ask: bool) -> Run:
        if container.state != api.CONTAINER_EXITED:
            return Run()
        if not ask:
            return Run(ended=True)
        request = api.ContainerStatusRequest(container_id=container.id)
        return Run(True, int(stub.ContainerStatus(request, timeout=PATIENCE).status.exit_code))

    def facts(self) -> Facts | None:
        """The runtime's facts; None: there is no runtime to ask, or it does not answer now."""

        def ask(stub: Any) -> Facts:
            version = stub.Version(api.VersionRequest(), timeout=PATIENCE)
            status = stub.Status(api.StatusRequest(verbose=True), timeout=PATIENCE)
            handlers = tuple(one.name for one in status.runtime_handlers if one.name)
            return Facts(version.runtime_name, version.runtime_version, _config(status.info), handlers)

        try:
            return self._call(ask)
        except grpc.RpcError as error:
            log.debug("the container runtime does not report its settings: %s", _said(error))
            return None

    def _call(self, ask: Callable[[Any], _Answer]) -> _Answer | None:
        socket = self.socket
        if socket is None:
            return None
        # A subchannel pool of its own: a shared pool would keep a dead connection to an earlier runtime at this path in
        # back-off.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
            try:
                return ask(RuntimeServiceStub(channel))
            except grpc.RpcError as error:
                if error.code() in _MISSING:
                    log.warning("the container runtime at %s does not support CRI v1: %s", socket, _said(error))
                    return None
                raise


def _age(container: Any) -> tuple[int, int]:
    return container.created_at, container.metadata.attempt


def _config(info: Any) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(info.get("config", ""))
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None


def _said(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"
