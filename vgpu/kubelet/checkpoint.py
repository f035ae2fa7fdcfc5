"""The kubelet's own record of which container holds which device ids: `kubelet_internal_checkpoint`.

Format and checksum: k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go. Each write
replaces the whole file (temporary file and rename), so that a reader never sees half of it.
"""

import base64
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as deviceplugin

FILE_NAME: Final = "kubelet_internal_checkpoint"  #: in <kubeletRoot>/device-plugins
NO_NUMA: Final = "-1"  #: key of the ids whose device has no NUMA node


class CheckpointError(ValueError):
    """The file is not a checkpoint that this version understands; the text names the file."""


class Entry(msgspec.Struct, frozen=True):
    """What one container holds of one resource."""

    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str]] | None = None  #: by NUMA node; an id of several nodes appears under each
    AllocResp: str | None = None  #: base64 of the plugin's ContainerAllocateResponse

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(one for part in (self.DeviceIDs or {}).values() for one in part or ())

    @property
    def response(self) -> deviceplugin.ContainerAllocateResponse:
        """The cached answer to Allocate, which the kubelet uses again at every start of the container."""
        return deviceplugin.ContainerAllocateResponse.FromString(base64.b64decode(self.AllocResp or ""))


class Checkpoint(msgspec.Struct, frozen=True):
    entries: list[Entry] = []
    registered: dict[str, list[str] | None] = {}  #: resource → ids that were healthy when the file was written

    def holders(self, resource: str, ids: Iterable[str]) -> list[tuple[str, str]]:
        """(pod uid, container) of all containers that hold exactly these ids, in the order of their allocation."""
        wanted = frozenset(ids)
        return [
            (entry.PodUID, entry.ContainerName)
            for entry in self.entries
            if entry.ResourceName == resource and entry.ids == wanted
        ]

    def held_by(self, pod_uid: str, container: str, resource: str) -> frozenset[str]:
        """Ids of one container; empty when it holds none."""
        for entry in self.entries:
            if (entry.PodUID, entry.ContainerName, entry.ResourceName) == (pod_uid, container, resource):
                return entry.ids
        return frozenset()


class _Data(msgspec.Struct):
    PodDeviceEntries: list[Entry] | None = None
    RegisteredDevices: dict[str, list[str] | None] | None = None


class _File(msgspec.Struct):
    Data: _Data
    Checksum: int = 0


def _strings(values: Iterable[str] | None) -> str:
    return "<nil>" if values is None else f"[{' '.join(values)}]"


def _entry_text(entry: Entry) -> str:
    numa = entry.DeviceIDs
    ids = (
        "<nil>"
        if numa is None
        else f"map[{' '.join(f'{node}:{_strings(numa[node])}' for node in sorted(numa, key=int))}]"
    )
    raw = None if entry.AllocResp is None else base64.b64decode(entry.AllocResp)
    return (
        f"{{PodUID:(string){entry.PodUID} ContainerName:(string){entry.ContainerName}"
        f" ResourceName:(string){entry.ResourceName} DeviceIDs:(checkpoint.DevicesPerNUMA){ids}"
        f" AllocResp:([]uint8){_strings(None if raw is None else map(str, raw))}}}"
    )


def checksum(data: _Data) -> int:
    """FNV-1a (32 bits) of the text that Go's spew makes of the data; equal to what the kubelet computes."""
    entries = _strings(None if data.PodDeviceEntries is None else map(_entry_text, data.PodDeviceEntries))
    known = data.RegisteredDevices
    registered = (
        "<nil>" if known is None else f"map[{' '.join(f'{name}:{_strings(known[name])}' for name in sorted(known))}]"
    )
    text = (
        f"(checkpoint.checkpointData){{PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries}"
        f" RegisteredDevices:(map[string][]string){registered}}}"
    )
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def decode(content: bytes, source: str = FILE_NAME) -> Checkpoint:
    """Reads a checkpoint; raises CheckpointError naming `source`.

    The checksum is not verified: the rename ensures that the file is whole.
    """
    try:
        data = msgspec.json.decode(content, type=_File).Data
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{source}: {error}") from None
    return Checkpoint(data.PodDeviceEntries or [], data.RegisteredDevices or {})


def encode(checkpoint: Checkpoint) -> bytes:
    data = _Data(checkpoint.entries, checkpoint.registered)
    return msgspec.json.encode(_File(data, checksum(data)))


def read(path: Path) -> Checkpoint:
    """An empty checkpoint where there is no file yet; raises CheckpointError, or OSError when it cannot be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Checkpoint()
    return decode(content, str(path))


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Replaces the file in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encode(checkpoint))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
