"""The chart's values: the configuration of all parts, plus values that only Kubernetes needs.

`python -m vgpu.chart` writes values.yaml, values.schema.json and templates/_defaults.tpl of charts/vgpu from these
types.
"""

import inspect
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from vgpu import comments, config, names

CHART_DIR: Final = Path("charts/vgpu")
NodePort = Annotated[int, msgspec.Meta(ge=1, le=65535)]
PodPort = Annotated[int, msgspec.Meta(ge=1024, le=65535, description="1024 to 65535")]
ObjectName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?$",
        description="up to 40 lower case letters, digits and `-`",
    ),
]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
ServiceType = Literal["NodePort", "ClusterIP"]
Digest = Annotated[
    str, msgspec.Meta(pattern=r"^(sha256:[0-9a-f]{64})?$", description="sha256: and 64 hexadecimal digits")
]
Duration = Annotated[str, msgspec.Meta(pattern=r"^([0-9]+(ms|s|m|h))+$", description="such as 30s or 1m")]
_HEAD: Final = "# Written by `python -m vgpu.chart` from vgpu/config.py and vgpu/chart.py: change it there.\n"


def _requests(cpu: str, memory: str) -> Any:
    """A field whose default requests this much of a node and sets no limit."""
    return msgspec.field(default_factory=lambda: {"requests": {"cpu": cpu, "memory": memory}})


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The image of the node agent and of the scheduler extender."""

    registry: str = (
        ""  #: host of the registry that you pushed the image to; required, unless global.imageRegistry is set
    )
    repository: str = "vgpu"  #: name below the registry
    tag: str = ""  #: empty: the chart's appVersion
    digest: Digest = ""  #: sha256:… of the exact image; replaces the tag
    pullPolicy: PullPolicy = "IfNotPresent"  #: when the kubelet pulls


class KubeSchedulerImage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stock kube-scheduler."""

    registry: str = "registry.k8s.io"  #: host of the registry
    repository: str = "kube-scheduler"  #: name below the registry
    tag: str = ""  #: empty: the version of the cluster without a vendor's suffix
    digest: Digest = ""  #: sha256:… of the exact image; replaces the tag
    pullPolicy: PullPolicy = "IfNotPresent"  #: when the kubelet pulls


class KubeScheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kube-scheduler container in the extender's pod."""

    image: KubeSchedulerImage = KubeSchedulerImage()
    resources: dict[str, Any] = _requests("50m", "64Mi")  #: container resources


class NodeService(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of the nodes; `curl NODE:31992/metrics` answers for that node."""

    type: ServiceType = "NodePort"  #: ClusterIP: reachable inside the cluster only
    httpPort: NodePort | None = names.NODE_PORT_NODE_METRICS  #: node port; null: Kubernetes assigns one


class SchedulerService(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of the scheduler; its webhook is always a ClusterIP service on 443."""

    type: ServiceType = "NodePort"  #: ClusterIP: reachable inside the cluster only
    monitorPort: NodePort | None = names.NODE_PORT_SCHEDULER_METRICS  #: node port; null: Kubernetes assigns one


class SchedulerPorts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Ports of the scheduler's pods; with scheduler.hostNetwork they are the node's, and must be free there."""

    webhook: PodPort = names.PORT_WEBHOOK  #: admission; the firewall must let the API server reach it
    metrics: PodPort = names.PORT_SCHEDULER_METRICS  #: metrics
    health: PodPort = names.PORT_SCHEDULER_HEALTH  #: for the kubelet's probes
    extender: PodPort = names.PORT_EXTENDER  #: placement, on 127.0.0.1 only
    kube_scheduler: PodPort = 10259  #: the kube-scheduler's health; control-plane nodes use this one themselves


class CertManager(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The webhook's certificate by cert-manager, in place of the scheduler's own authority."""

    enabled: bool = False  #: needs cert-manager in the cluster
    issuer_ref: dict[str, str] = msgspec.field(
        default_factory=dict
    )  #: {name, kind, group} of an issuer; empty: a self-signed one of this chart


class Monitoring(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Objects of the Prometheus operator, whose types must be in the cluster."""

    pod_monitor: bool = False  #: both parts are scraped
    prometheus_rule: bool = False  #: alerts: a card fails, a process bypasses limits, a part of vgpu is gone or hangs
    interval: Duration = "15s"  #: between two scrapes
    labels: dict[str, str] = msgspec.field(default_factory=dict)  #: labels by which Prometheus chooses these objects


class NetworkPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may connect to the pods."""

    enabled: bool = True  #: only the webhook and the metrics of the pods can be reached, and agents by schedulers


class GlobalValues(config.Global, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Settings of the whole installation."""

    image_registry: str = ""  #: replaces the registry of every image (air-gapped clusters)
    control_planes: bool = False  #: true: control-plane nodes run both parts, too, as clusters of one node need it


class SchedulerValues(config.Scheduler, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The scheduler: admission, placement, and the kube-scheduler in its pod."""

    replicas: config.Positive = 2  #: one leads the scheduling, all serve the webhook
    failure_policy: Literal["Fail", "Ignore"] = (
        "Fail"  #: while no scheduler answers; Ignore: the API server creates GPU pods unchecked, and they get no card
    )
    host_network: bool = False  #: where the API server reaches nodes only: EKS with an overlay CNI, private clusters
    ports: SchedulerPorts = SchedulerPorts()
    kube_scheduler: KubeScheduler = KubeScheduler()
    cert_manager: CertManager = CertManager()
    service: SchedulerService = SchedulerService()
    resources: dict[str, Any] = _requests("100m", "128Mi")  #: of the extender container
    node_selector: dict[str, str] = msgspec.field(default_factory=dict)  #: labels of nodes that may run the scheduler
    affinity: dict[str, Any] = msgspec.field(
        default_factory=dict
    )  #: affinity of the scheduler's pods; kinds left out: apart from one another, on no control plane or virtual node
    tolerations: tuple[dict[str, Any], ...] = ()  #: taints that the scheduler's pods tolerate
    priority_class_name: str = "system-cluster-critical"  #: empty: none
    pod_annotations: dict[str, str] = msgspec.field(
        default_factory=dict
    )  #: further annotations of the scheduler's pods
    update_strategy: dict[str, Any] = msgspec.field(
        default_factory=dict
    )  #: strategy of the Deployment; empty: a new pod before an old one ends, with hostNetwork after it


class DevicePluginValues(config.DevicePlugin, frozen=True, forbid_unknown_fields=True):
    """The node agent: device plugin, enforcement and metrics of a node."""

    runtimeClassName: str = ""  #: RuntimeClass that gives the agent the driver's libraries, e.g. nvidia
    service: NodeService = NodeService()
    resources: dict[str, Any] = _requests("50m", "96Mi")  #: of the agent's container
    nodeSelector: dict[str, str] = msgspec.field(
        default_factory=dict
    )  #: labels of nodes that run the agent; it is idle where there is no card
    affinity: dict[str, Any] = msgspec.field(
        default_factory=dict
    )  #: affinity of the agent's pods; without nodeAffinity: on no control plane and no virtual node
    tolerations: tuple[dict[str, Any], ...] = ({"operator": "Exists"},)  #: all taints: GPU nodes usually carry some
    priorityClassName: str = "system-node-critical"  #: empty: none
    podAnnotations: dict[str, str] = msgspec.field(default_factory=dict)  #: further annotations of the agent's pods
    updateStrategy: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}
    )  #: strategy of the DaemonSet
    cleanUp: bool = True  #: `helm uninstall` first takes capacity, annotations and labels off the nodes


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another release of this chart in the same cluster."""

    namespace: str  #: where it is installed
    fullname: str  #: its release name, or its fullnameOverride


class Values(config.Config, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Every value of the chart."""

    name_override: ObjectName = ""  #: replaces "vgpu" in the names of objects
    fullname_override: ObjectName = ""  #: replaces the whole prefix of the names of objects
    image: Image = Image()
    image_pull_secrets: tuple[dict[str, str], ...] = ()  #: e.g. [{name: registry-credentials}]
    other_releases: tuple[Release, ...] = ()  #: releases in this cluster that write records too: other names and nodes
    network_policy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    global_: GlobalValues = msgspec.field(name="global", default_factory=GlobalValues)
    scheduler: SchedulerValues = SchedulerValues()
    device_plugin: DevicePluginValues = DevicePluginValues()


def describe(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field name (as in YAML) → its `#:` comment, including fields of the base classes."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base.__module__ not in (config.__name__, __name__):
            continue
        module = sys.modules[base.__module__]
        prefix = f"{base.__qualname__}."
        for name, text in comments.of_module(module).items():
            if name.startswith(prefix):
                texts[name.removeprefix(prefix)] = text
    return {
        encoded: texts[name]
        for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
        if name in texts
    }


def structs(root: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """`root` and every struct that its fields name, each once."""
    seen: dict[type[msgspec.Struct], None] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind not in seen:
                seen[kind] = None
                for hint in typing.get_type_hints(kind).values():
                    visit(hint)
            return
        for argument in typing.get_args(kind):
            visit(argument)

    visit(root)
    return iter(seen)


def schema() -> dict[str, Any]:
    """The JSON schema (draft 7, which every Helm 3 and 4 reads) of the values."""
    (root,), definitions = msgspec.json.schema_components([Values], ref_template="#/definitions/{name}")
    for struct in structs(Values):
        described = definitions[struct.__name__]
        described["description"] = inspect.getdoc(struct)
        for name, text in describe(struct).items():
            described["properties"][name]["description"] = text
    return {"$schema": "http://json-schema.org/draft-07/schema#", **root, "definitions": definitions}


def encode_schema() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def encode_values() -> str:
    """values.yaml: every value with its default and, above it, its meaning."""
    return _HEAD + "\n".join(_lines(Values(), ""))


def _lines(value: msgspec.Struct, indent: str) -> Iterator[str]:
    struct = type(value)
    texts = describe(struct)
    for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
        inner = getattr(value, name)
        if isinstance(inner, msgspec.Struct):
            yield ""
            yield f"{indent}# {(inspect.getdoc(inner) or '').splitlines()[0]}"
            yield f"{indent}{encoded}:"
            yield from _lines(inner, indent + "  ")
            continue
        yield f"{indent}# {texts[encoded]}"
        text = yaml.safe_dump({encoded: msgspec.to_builtins(inner)}, allow_unicode=True, width=10_000)
        yield from (indent + line for line in text.splitlines())
    if not indent:
        yield ""


def encode_defaults() -> str:
    """The defaults as a template, for values of an older chart.

    For each section, the template has its single values, and the rest: lists, maps, and values for which null is
    allowed. A null removes such a value on purpose. So the rest counts only where the whole section is missing.
    """
    found = [{"path": list(path), "single": single, "rest": rest} for path, single, rest in sections(Values(), ())]
    text = yaml.safe_dump(found, allow_unicode=True, width=10_000, sort_keys=False)
    head = f"{{{{- /* {_HEAD.removeprefix('# ').strip()} */ -}}}}\n"
    return f'{head}{{{{- define "vgpu.sections" -}}}}\n{text}{{{{- end -}}}}\n'


def sections(
    value: msgspec.Struct, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]]:
    """(path, single values, the rest) of every section, outer sections first."""
    single: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    inner: list[tuple[str, msgspec.Struct]] = []
    for field in msgspec.structs.fields(type(value)):
        found = getattr(value, field.name)
        if isinstance(found, msgspec.Struct):
            inner.append((field.encode_name, found))
        elif isinstance(found, dict | tuple) or type(None) in typing.get_args(field.type):
            rest[field.encode_name] = msgspec.to_builtins(found)
        else:
            single[field.encode_name] = found
    yield path, single, rest
    for name, section in inner:
        yield from sections(section, (*path, name))


def write(folder: Path) -> list[Path]:
    """Writes the files into the chart's folder and returns their paths."""
    files = {
        folder / "values.yaml": encode_values(),
        folder / "values.schema.json": encode_schema(),
        folder / "templates" / "_defaults.tpl": encode_defaults(),
    }
    for path, text in files.items():
        path.write_text(text)
    return list(files)


if __name__ == "__main__":
    for written in write(CHART_DIR):
        print(written)
