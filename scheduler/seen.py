"""The fields of pods and nodes that the scheduler reads: only these fields are decoded, and no object is kept."""

import logging
import sys
from typing import Final

import msgspec

from scheduler.cluster import Claim, Holding
from vgpu import allocation, devices, names
from vgpu.allocation import Kind
from vgpu.kube import agentmark
from vgpu.kube.agentmark import AgentMark

log = logging.getLogger(__name__)


class PodMarks(msgspec.Struct, frozen=True, gc=False):
    allocation: str | None = msgspec.field(name=names.ALLOCATION, default=None)


class PodMeta(msgspec.Struct, frozen=True, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    annotations: PodMarks = PodMarks()


class Container(msgspec.Struct, frozen=True, gc=False):
    name: str = ""
    restartPolicy: str = ""  #: "Always" makes an init container a sidecar


class PodSpec(msgspec.Struct, frozen=True, gc=False):
    nodeName: str = ""
    initContainers: list[Container] = []
    containers: list[Container] = []


class PodStatus(msgspec.Struct, frozen=True, gc=False):
    phase: str = "Pending"


class Pod(msgspec.Struct, frozen=True, gc=False):
    """The fields of a pod that concern its slices."""

    metadata: PodMeta = PodMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def finished(self) -> bool:
        """Succeeded or Failed: none of the pod's containers will run again."""
        return self.status.phase in ("Succeeded", "Failed")


class NodeMarks(msgspec.Struct, frozen=True, gc=False):
    devices: str = msgspec.field(name=names.DEVICES, default="")
    cordon: str = msgspec.field(name=names.CORDON, default="")
    agent: str | None = msgspec.field(name=names.AGENT, default=None)


class NodeMeta(msgspec.Struct, frozen=True, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    annotations: NodeMarks = NodeMarks()


class Node(msgspec.Struct, frozen=True, gc=False):
    metadata: NodeMeta = NodeMeta()


class Meta(msgspec.Struct, frozen=True, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""


class Brief(msgspec.Struct, frozen=True, gc=False):
    """Any object: its identity and version."""

    metadata: Meta = Meta()


class SeenPod(msgspec.Struct, frozen=True, gc=False):
    """The facts about a pod that are kept until the state takes them over."""

    uid: str
    namespace: str
    name: str
    version: int
    holding: Holding | None  #: None: the pod is not bound, has no record, or is finished
    finished: bool


class SeenNode(msgspec.Struct, frozen=True, gc=False):
    name: str
    version: int
    inventory: devices.Inventory  #: empty when the node has no inventory, or it cannot be read
    cordoned: frozenset[str]
    mark: AgentMark


def number(version: str) -> int:
    """A resourceVersion that can be compared; 0: it cannot be compared.

    Source: KEP-5504: always a number since 1.35, before that with etcd.
    """
    return int(version) if version.isdecimal() else 0


def holding_of(pod: Pod) -> Holding | None:
    """What a pod holds according to its record; None when the pod is not bound, has no record or is finished.

    A pod that is being deleted holds its slices until it is gone, because its processes may still run.
    """
    meta = pod.metadata
    record = meta.annotations.allocation
    if record is None or not pod.spec.nodeName or pod.finished:
        return None
    try:
        found = allocation.decode(record)
    except ValueError as error:
        log.warning("pod %s/%s: %s", meta.namespace, meta.name, error)
        return None
    order = [
        (each.name, Kind.SIDECAR if each.restartPolicy == "Always" else Kind.INIT) for each in pod.spec.initContainers
    ]
    order += [(each.name, Kind.APP) for each in pod.spec.containers]
    held = allocation.held((kind, found.of(name)) for name, kind in order)
    node, version = sys.intern(pod.spec.nodeName), number(meta.resourceVersion)
    if not found.moving:
        return Holding(node, {sys.intern(uuid): each for uuid, each in held.items()}, version=version)
    now, then = (
        allocation.held((kind, slices.get(name, ())) for name, kind in order)
        for slices in (found.containers, found.moved().containers)
    )
    claim = Claim(meta.namespace, meta.name, meta.resourceVersion, found, now, then)
    return Holding(node, held, claim=claim, version=version)


def seen_pod(pod: Pod) -> SeenPod:
    meta = pod.metadata
    version = number(meta.resourceVersion)
    return SeenPod(meta.uid, sys.intern(meta.namespace), meta.name, version, holding_of(pod), pod.finished)


def seen_node(node: Node) -> SeenNode:
    meta = node.metadata
    marks = meta.annotations
    inventory = devices.Inventory()
    if marks.devices:
        try:
            inventory = devices.decode_inventory(marks.devices)
        except ValueError as error:
            log.warning("node %s: %s", meta.name, error)
    cordoned = frozenset(part.strip() for part in marks.cordon.split(",") if part.strip())
    slim = devices.Inventory(tuple(_slim(gpu) for gpu in inventory.devices))
    return SeenNode(sys.intern(meta.name), number(meta.resourceVersion), slim, cordoned, agentmark.read(marks.agent))


_UNUSED: Final = {"links": {}, "pci": "", "trouble": ""}


def _slim(gpu: devices.Gpu) -> devices.Gpu:
    """The card without the fields that placement does not read; equal models become one string."""
    return msgspec.structs.replace(gpu, uuid=sys.intern(gpu.uuid), model=sys.intern(gpu.model), **_UNUSED)
