"""The bodies of HTTP requests: kube-scheduler's extender v1 and the pods in it.

Parsing is strict, but skips unknown fields.

Source: k8s.io/kube-scheduler/extender/v1 "types.go" (Go names without JSON tags) and Kubernetes' core/v1.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
Quantity = str | int | float


class BadBody(ValueError):
    """The body of a request is not valid; the text is one sentence."""


class ObjectMeta(msgspec.Struct, frozen=True):
    name: str | None = None
    generateName: str | None = None
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Resources(msgspec.Struct, frozen=True):
    limits: dict[str, Quantity] | None = None
    requests: dict[str, Quantity] | None = None


class EnvVar(msgspec.Struct, frozen=True):
    name: str
    value: str | None = None
    valueFrom: dict[str, Any] | None = None


class SecurityContext(msgspec.Struct, frozen=True):
    privileged: bool | None = None


class Container(msgspec.Struct, frozen=True):
    name: str
    restartPolicy: str | None = None
    resources: Resources | None = None
    env: list[EnvVar] | None = None
    securityContext: SecurityContext | None = None


class PodSpec(msgspec.Struct, frozen=True):
    nodeName: str | None = None
    schedulerName: str | None = None
    initContainers: list[Container] | None = None
    containers: list[Container] | None = None
    ephemeralContainers: list[Container] | None = None


class Pod(msgspec.Struct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()

    def mapping(self) -> Mapping[str, Any]:
        """The pod in the form that vgpu.resources reads."""
        mapping: Mapping[str, Any] = msgspec.to_builtins(self)
        return mapping

    @property
    def label(self) -> str:
        """namespace/name for messages."""
        name = self.metadata.name or f"{self.metadata.generateName or ''}*"
        return f"{self.metadata.namespace or 'default'}/{name}"


class NodeList(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw] | None = None


class NodeWithName(msgspec.Struct, frozen=True):
    metadata: ObjectMeta


class ExtenderArgs(msgspec.Struct, frozen=True):
    """Body of /filter and /prioritize: the pod, and nodes by name (nodeCacheCapable) or as whole objects."""

    Pod: Pod
    Nodes: NodeList | None = None
    NodeNames: list[str] | None = None


class ExtenderFilterResult(msgspec.Struct, frozen=True):
    Nodes: dict[str, list[msgspec.Raw]] | None = None
    NodeNames: list[str] | None = None
    FailedNodes: dict[str, str] = {}
    FailedAndUnresolvableNodes: dict[str, str] = {}
    Error: str = ""


class HostPriority(msgspec.Struct, frozen=True):
    Host: str
    Score: int


class ExtenderBindingArgs(msgspec.Struct, frozen=True):
    PodName: str
    PodNamespace: str
    PodUID: str
    Node: str


class ExtenderBindingResult(msgspec.Struct, frozen=True):
    Error: str = ""


def parse(body: bytes, type_: type[T]) -> T:
    """Decodes a body; raises BadBody that says where the body is wrong and what was expected."""
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise BadBody(f"the body is not {type_.__name__}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not JSON: {error}") from None


def node_names(args: ExtenderArgs) -> tuple[list[str], list[msgspec.Raw] | None]:
    """Names of the nodes in question, and the raw nodes where the request contains whole objects."""
    if args.NodeNames is not None:
        return args.NodeNames, None
    if args.Nodes is None:
        raise BadBody("the body is not ExtenderArgs: it needs NodeNames or Nodes")
    items = args.Nodes.items or []
    return [parse(bytes(item), NodeWithName).metadata.name or "" for item in items], items
