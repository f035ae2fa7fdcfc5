"""Finds out which container is about to start.

PreStartContainer passes only ids; the kubelet's record says which containers hold them.

Source: k8s.io/kubernetes pkg/kubelet/cm/devicemanager: the kubelet writes the checkpoint within the admission of each
container, so before its PreStartContainer. An app container that reuses the ids of an ordinary init container has an
entry of its own, with an answer of its own. Where the answer is a mount that follows the ids, the checkpoint does not
say which of the two starts: the container runtime does.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
import msgspec

from device_plugin import cdi, driver, init_order
from device_plugin.cri import Runtime
from device_plugin.refusal import Refusal
from vgpu.kube.objects import Pod, kinds
from vgpu.kubelet import checkpoint
from vgpu.kubelet.podresources_v1 import api_pb2 as podresources
from vgpu.kubelet.podresources_v1.api_pb2_grpc import PodResourcesListerStub

log = logging.getLogger(__name__)

POD_RESOURCES: Final = "pod-resources/kubelet.sock"  #: below the kubelet's root
_PATIENCE: Final = 3.0  #: seconds for a call of pod-resources, which accepts 100 calls a second


class Candidate(msgspec.Struct, frozen=True):
    """A container that holds the ids, and the plugin's answer to its Allocate."""

    pod_uid: str  #: empty: only namespace and name are known
    container: str
    namespace: str = ""
    name: str = ""
    cdi_name: str = ""  #: empty: the answer had mounts instead
    sources: tuple[Path, ...] = ()  #: host paths of those mounts
    driver_files: tuple[Path, ...] = ()  #: those of the mounts that belong to the driver
    device_nodes: bool = False  #: the answer had device nodes: no other component then brings the driver


class Identity:
    """Reads the checkpoint. Where it says nothing, asks pod-resources, which omits ordinary init containers."""

    def __init__(self, kubelet_root: Path, resource: str, runtime: Runtime) -> None:
        self._file = kubelet_root / "device-plugins" / checkpoint.FILE_NAME
        self._socket = kubelet_root / POD_RESOURCES
        self._resource = resource
        self._runtime = runtime
        self._names: dict[frozenset[str], str] = {}

    def remember(self, device_ids: Sequence[str], cdi_name: str) -> None:
        """Stores the answer of Allocate, for the case that the checkpoint does not have it."""
        self._names[frozenset(device_ids)] = cdi_name

    def candidates(self, device_ids: Sequence[str]) -> list[Candidate]:
        """All containers that hold exactly these ids, in any order; raises Refusal."""
        wanted = frozenset(device_ids)
        found = [self._candidate(entry) for entry in self._entries() if entry.ids == wanted]
        return found or self._ask(wanted)

    def starting(self, pod: Pod, sharing: Sequence[str]) -> str | None:
        """Which of these containers of a pod, which hold the same ids, is about to start.

        None: there is no runtime to ask. Raises Refusal when the runtime does not answer.
        """
        order = kinds(pod)
        runs = self._runtime.runs(
            pod.metadata.uid, exit_codes_of=[container.name for container in pod.spec.initContainers]
        )
        if runs is None:
            return None
        found = init_order.starting(order, sharing, runs)
        log.debug("%s/%s starts, of %s", pod.metadata.name, found, ", ".join(sharing))
        return found

    def allocated(self) -> set[tuple[str, str]]:
        """(pod uid, container) of every container that has ids; empty when the checkpoint cannot be read."""
        return {(entry.PodUID, entry.ContainerName) for entry in self._entries()}

    def mounted(self, pod_uid: str) -> dict[str, frozenset[str]]:
        """Container → ids, of the containers of a pod whose answers are mounts."""
        own = [entry for entry in self._entries() if entry.PodUID == pod_uid]
        return {entry.ContainerName: entry.ids for entry in own if not self._candidate(entry).cdi_name}

    def sources(self) -> set[Path]:
        """Host paths that cached answers mount, or will mount.

        Raises OSError or CheckpointError when they cannot be known.
        """
        return {Path(mount.host_path) for entry in self._read() for mount in entry.response.mounts}

    def _entries(self) -> list[checkpoint.Entry]:
        try:
            return self._read()
        except (OSError, checkpoint.CheckpointError) as error:
            log.warning("cannot read the kubelet's checkpoint: %s", error)
            return []

    def _read(self) -> list[checkpoint.Entry]:
        if not self._file.exists():
            raise FileNotFoundError(2, "there is no checkpoint", str(self._file))
        entries = checkpoint.read(self._file).entries
        return [entry for entry in entries if entry.ResourceName == self._resource]

    def _candidate(self, entry: checkpoint.Entry) -> Candidate:
        response = entry.response
        ours = [device.name for device in response.cdi_devices if cdi.is_ours(device.name)]
        return Candidate(
            pod_uid=entry.PodUID,
            container=entry.ContainerName,
            cdi_name=ours[0] if ours else "",
            sources=tuple(Path(mount.host_path) for mount in response.mounts),
            driver_files=tuple(
                Path(mount.host_path)
                for mount in response.mounts
                if mount.container_path.startswith(f"{driver.CONTAINER_DIR}/")
            ),
            device_nodes=bool(response.devices),
        )

    def _ask(self, wanted: frozenset[str]) -> list[Candidate]:
        if not self._socket.is_socket():
            return []
        try:
            with grpc.insecure_channel(f"unix://{self._socket}") as channel:
                answer = PodResourcesListerStub(channel).List(podresources.ListPodResourcesRequest(), timeout=_PATIENCE)
        except grpc.RpcError as error:
            raise Refusal(
                f"the kubelet does not report which container holds the ids: {error}", transient=True
            ) from None
        cdi_name = self._names.get(wanted, "")
        return [
            Candidate("", container.name, pod.namespace, pod.name, cdi_name=cdi_name)
            for pod in answer.pod_resources
            for container in pod.containers
            if wanted == _held(container, self._resource)
        ]


def _held(container: podresources.ContainerResources, resource: str) -> frozenset[str]:
    return frozenset(
        one for devices in container.devices if devices.resource_name == resource for one in devices.device_ids
    )
