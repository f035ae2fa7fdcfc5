"""The fields of Kubernetes objects that vgpu reads. Unknown fields are skipped while decoding, which makes it fast.

Names are those of the Kubernetes API, so that a reader finds them in its reference.
"""

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from vgpu.allocation import Kind


class OwnerReference(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    apiVersion: str = ""
    controller: bool = False


class Meta(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str = ""
    namespace: str = ""  #: empty for objects without namespace, such as nodes
    uid: str = ""
    resourceVersion: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creationTimestamp: str | None = None  #: RFC 3339
    deletionTimestamp: str | None = None  #: RFC 3339; set: the object is being deleted
    deletionGracePeriodSeconds: int | None = None
    ownerReferences: list[OwnerReference] = []


class Named(Protocol):
    """The metadata that identifies every object."""

    @property
    def name(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    @property
    def resourceVersion(self) -> str: ...


class HasMeta(Protocol):
    @property
    def metadata(self) -> Named: ...


Quantity = str | int | float  #: the API server writes strings; manifests may hold numbers


class Resources(msgspec.Struct, frozen=True, omit_defaults=True):
    limits: dict[str, Quantity] = {}
    requests: dict[str, Quantity] = {}


class Variable(msgspec.Struct, frozen=True, omit_defaults=True):
    """A variable of a container; a variable with `valueFrom` has no value here."""

    name: str = ""
    value: str = ""


class Container(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str = ""
    restartPolicy: str = ""  #: "Always" makes an init container a sidecar
    restartPolicyRules: list[dict[str, Any]] = []
    resources: Resources = Resources()
    env: list[Variable] = []


class PodSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    nodeName: str = ""
    schedulerName: str = ""
    initContainers: list[Container] = []
    containers: list[Container] = []
    priority: int = 0
    restartPolicy: str = "Always"


class Condition(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Terminated(msgspec.Struct, frozen=True, omit_defaults=True):
    exitCode: int = 0


class ContainerState(msgspec.Struct, frozen=True, omit_defaults=True):
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str = ""
    containerID: str = ""
    state: ContainerState = ContainerState()


class PodStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    nominatedNodeName: str = ""
    conditions: list[Condition] = []
    containerStatuses: list[ContainerStatus] = []  #: of application containers


class Pod(msgspec.Struct, frozen=True, omit_defaults=True):
    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def finished(self) -> bool:
        """Succeeded or Failed: none of the pod's containers will run again."""
        return self.status.phase in ("Succeeded", "Failed")


class NodeSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    unschedulable: bool = False


class NodeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    kubeletVersion: str = ""
    containerRuntimeVersion: str = ""  #: NAME://VERSION


class NodeStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    capacity: dict[str, Quantity] = {}
    allocatable: dict[str, Quantity] = {}
    conditions: list[Condition] = []
    nodeInfo: NodeInfo = NodeInfo()


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    metadata: Meta = Meta()
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class RawObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any object: typed metadata, and the rest as raw JSON."""

    metadata: Meta = Meta()
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


T = TypeVar("T")


class ListMeta(msgspec.Struct, frozen=True):
    resourceVersion: str = ""
    continue_: str = msgspec.field(name="continue", default="")


class ObjectList(msgspec.Struct, Generic[T], frozen=True):
    """Answer to a list request."""

    items: list[T] | None = None  #: null means an empty list
    metadata: ListMeta = ListMeta()


def kinds(pod: Pod) -> list[tuple[str, Kind]]:
    """(name, kind) of every container in the order of the spec, init containers first."""
    first = [
        (container.name, Kind.SIDECAR if container.restartPolicy == "Always" else Kind.INIT)
        for container in pod.spec.initContainers
    ]
    return first + [(container.name, Kind.APP) for container in pod.spec.containers]
