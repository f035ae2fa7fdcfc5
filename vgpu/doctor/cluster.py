"""Checks of a cluster. Pure: facts in, findings out."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

import msgspec

from vgpu import names
from vgpu.devices import Inventory, decode_inventory
from vgpu.doctor.certificates import judge
from vgpu.doctor.findings import Finding, minor, ok, some, unseen, wrong
from vgpu.kube.objects import Node
from vgpu.resources import parse_quantity

OLDEST: Final = (1, 30)  #: oldest version of Kubernetes: ValidatingAdmissionPolicy
SCHEDULER, AGENT = "scheduler", "device-plugin"  #: app.kubernetes.io/component
#: Parts of the image names of device plugins that serve the same cards
OTHER_PLUGINS: Final = (
    "k8s-device-plugin", "nvidia-device-plugin", "nvidia-gpu-device-plugin", "k8s-vdevice", "hami", "volcano-vgpu",
    "gpushare-plugin", "gpu-manager",
)  # fmt: skip
#: The API server's message about a Service that it should call
_NO_SERVICE: Final = re.compile(r'service "[^"]*" not found')
UNENFORCED: Final = names.CONDITION_UNENFORCED
#: Condition of a node → area of the finding
_CONDITIONS: Final = {UNENFORCED: "settings", names.CONDITION_CONFLICT: "conflict"}
#: The oldest runtime versions that accept CDI names from a kubelet, where their settings allow it
_TAKES_CDI: Final = {"containerd": (1, 7), "cri-o": (1, 28), "docker": (math.inf, 0)}
_NO_MODE: Final = f"check that the agent there is ready and has this version; it writes annotation {names.MODE}"
#: Containers of the same images that serve no device plugin
HARMLESS: Final = ("gpu-feature-discovery", "mps-control-daemon", "config-manager")


class Webhook(msgspec.Struct, frozen=True):
    """A MutatingWebhookConfiguration that calls the webhook for pods."""

    configuration: str
    service: str = ""  #: NAMESPACE/NAME
    bundle: bytes = b""  #: PEM
    resource: str = names.RESOURCE_GPU
    scheduler_name: str = names.SCHEDULER_NAME


class Part(msgspec.Struct, frozen=True):
    """A pod of the release, or a pod of another device plugin."""

    component: str  #: "" for another device plugin
    pod: str  #: NAMESPACE/NAME
    node: str = ""
    ready: bool = False
    version: str = ""
    images: tuple[str, ...] = ()
    tls_secret: str = ""  #: NAMESPACE/NAME of the webhook's certificate, if this pod serves the webhook

    @property
    def named(self) -> str:
        namespace, _, name = self.pod.partition("/")
        return f"-n {namespace} {name}"


class Trial(msgspec.Struct, frozen=True):
    """The result of a dry run that creates a GPU pod."""

    translated: bool = False
    error: str = ""
    namespace: str = "default"


class Cluster(msgspec.Struct, frozen=True):
    """What the doctor could read; None: it could not, and `refused` says why."""

    version: str | None = None  #: version of the API server
    webhooks: tuple[Webhook, ...] | None = None
    parts: tuple[Part, ...] | None = None
    nodes: tuple[Node, ...] | None = None
    trial: Trial | None = None
    service: bool | None = None  #: whether the Service of the webhook exists
    served: bytes | None = None  #: PEM of the webhook's certificate
    refused: Mapping[str, str] = {}

    def why(self, what: str) -> str:
        return self.refused.get(what, "the doctor did not request it")


def examine(cluster: Cluster, now: datetime, own_version: str) -> list[Finding]:
    """All findings about a cluster, causes before their effects."""
    found = [
        *_api_server(cluster),
        *_scheduler(cluster),
        *_webhook(cluster),
        *_certificate(cluster, now),
        *_agents(cluster),
        *_nodes(cluster),
    ]
    if not any(one.area == "conflict" for one in found):
        found.append(_no_conflict(cluster))
    return [*found, *_versions(cluster, own_version)]


def _api_server(cluster: Cluster) -> Iterator[Finding]:
    if cluster.version is None:
        yield unseen("kubernetes", cluster.why("version"))
    elif (number := minor(cluster.version)) is not None and number < OLDEST:
        yield wrong(
            "kubernetes",
            f"{cluster.version} has no ValidatingAdmissionPolicy: any user could forge records of slices",
            "upgrade the cluster to 1.30 or newer",
        )
    else:
        yield ok("kubernetes", cluster.version)


def _scheduler(cluster: Cluster) -> Iterator[Finding]:
    if cluster.parts is None:
        yield unseen("scheduler", cluster.why("pods"), "give this account the right to list pods")
        return
    found = [part for part in cluster.parts if part.component == SCHEDULER]
    if not found:
        yield wrong(
            "scheduler",
            "the cluster has no pod of the scheduler",
            "helm install vgpu charts/vgpu -n kube-system --set image.registry=…",
        )
    elif not any(part.ready for part in found):
        yield wrong(
            "scheduler", f"none of its {len(found)} pods is ready", f"run kubectl describe pod {found[0].named}"
        )
    else:
        yield ok("scheduler", f"{sum(part.ready for part in found)} of {len(found)} pods ready")


def _webhook(cluster: Cluster) -> Iterator[Finding]:
    if cluster.webhooks is None:
        yield unseen(
            "webhook", cluster.why("webhooks"), "give this account the right to list mutatingwebhookconfigurations"
        )
    elif not cluster.webhooks:
        yield wrong(
            "webhook", "no MutatingWebhookConfiguration calls the webhook", "run helm upgrade for the release again"
        )
        return
    trial = cluster.trial
    if trial is None:
        yield unseen("webhook", f"cannot create a GPU pod as a dry run: {cluster.why('trial')}")
    elif trial.translated and cluster.service is False:
        service = next((hook.service for hook in cluster.webhooks or ()), "")
        yield wrong(
            "webhook",
            "the API server calls the webhook only over an open connection, which will end",
            f"Service {service} is missing: run helm upgrade for the release again",
        )
    elif trial.translated:
        yield ok("webhook", f"the webhook processes GPU pods in namespace {trial.namespace} (dry run)")
    elif "failed calling webhook" in trial.error:
        service = next((hook.service for hook in cluster.webhooks or ()), "")
        todo = f"check that the scheduler is ready and that the API server can reach port 443 of Service {service}"
        if _NO_SERVICE.search(trial.error):
            todo = f"Service {service} is missing: run helm upgrade for the release again"
        elif "x509" in trial.error or "certificate" in trial.error:
            todo = "check the log of the scheduler, or of cert-manager, which writes caBundle"
        yield wrong("webhook", f"the API server cannot call the webhook: {trial.error}", todo)
    elif trial.error:
        yield unseen("webhook", f"cannot create a GPU pod as a dry run: {trial.error}")
    else:
        yield wrong(
            "webhook",
            f"a GPU pod in namespace {trial.namespace} bypasses the webhook",
            f"check whether the namespace has the label {names.WEBHOOK_LABELS[0]}: {names.WEBHOOK_IGNORE}",
        )


def _certificate(cluster: Cluster, now: datetime) -> Iterator[Finding]:
    for hook in cluster.webhooks or ():
        served = cluster.served
        yield judge(hook.bundle, served, hook.service, now, refused="" if served else cluster.why("secret"))


def _agents(cluster: Cluster) -> Iterator[Finding]:
    if cluster.parts is None:
        yield unseen("agents", cluster.why("pods"))
        return
    agents = [part for part in cluster.parts if part.component == AGENT]
    idle = [part for part in agents if not part.ready]
    if not agents:
        yield wrong(
            "agents", "the cluster has no pod of the node agent", "check that devicePlugin.nodeSelector selects nodes"
        )
    elif idle:
        nodes = some(sorted(part.node or part.pod for part in idle))
        yield wrong("agents", f"not ready on {nodes}", f"run kubectl describe pod {idle[0].named}")
    else:
        yield ok("agents", f"ready on {len(agents)} nodes")
    for part in cluster.parts:
        if not part.component and part.node in {agent.node for agent in agents}:
            yield wrong(
                "conflict",
                f"pod {part.pod} ({some(list(part.images))}) is another device plugin on node {part.node}",
                "remove it from the nodes that vgpu serves: only one plugin may serve a card",
            )


def _no_conflict(cluster: Cluster) -> Finding:
    """The finding for a cluster without signs of another device plugin."""
    if cluster.parts is None or cluster.nodes is None:
        return unseen("conflict", cluster.why("pods" if cluster.parts is None else "nodes"))
    return ok("conflict", "no pod or node status shows another device plugin on the nodes of the agents")


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    if cluster.nodes is None:
        yield unseen("plugin", cluster.why("nodes"), "give this account the right to list nodes")
        return
    resource = cluster.webhooks[0].resource if cluster.webhooks else names.RESOURCE_GPU
    cards, serving, runtimes = 0, 0, defaultdict(list)
    for node in cluster.nodes:
        told = list(_node(node, resource))
        yield from told
        inventory = _inventory(node)
        if inventory is not None and inventory.devices:
            cards += len(inventory.devices)
            serving += not told
            info = node.status.nodeInfo
            mode = node.metadata.annotations.get(names.MODE, "")
            runtimes[info.containerRuntimeVersion, info.kubeletVersion, mode].append(node.metadata.name)
    if serving:
        yield ok("plugin", f"registered on {serving} nodes; {cards} cards in the cluster")
    elif not cards:
        yield wrong(
            "plugin",
            f"none of the {len(cluster.nodes)} nodes publishes GPUs",
            "check the agent's log on a node with a card; without NVML there, set devicePlugin.runtimeClassName=nvidia",
        )
    for (runtime, kubelet, mode), where in sorted(runtimes.items()):
        yield _runtime(runtime, kubelet, mode, where)
    yield from _settings([node for node in cluster.nodes if (found := _inventory(node)) and found.devices])


def _settings(nodes: list[Node]) -> Iterator[Finding]:
    """Findings about nodes with cards; wrong settings are conditions of their nodes."""
    silent = [node.metadata.name for node in nodes if names.MODE not in node.metadata.annotations]
    safe = [node.metadata.name for node in nodes if node.metadata.name not in silent and not _says(node, UNENFORCED)]
    if safe:
        yield ok("settings", f"the container runtime shows containers only their own cards, on {some(safe)}")
    if silent:
        yield unseen("settings", f"the agent has not published its mode on {some(silent)}", _NO_MODE)


def _says(node: Node, condition: str) -> bool:
    return any(each.type == condition and each.status == "True" for each in node.status.conditions)


def _node(node: Node, resource: str) -> Iterator[Finding]:
    """What is wrong with one node."""
    name = node.metadata.name
    inventory = _inventory(node)
    if inventory is None:
        yield wrong(
            "plugin",
            f"cannot read annotation {names.DEVICES} of node {name}",
            "check that agent and doctor have the same version",
        )
    elif inventory.devices:
        slots = sum(gpu.slots for gpu in inventory.devices)
        offered = int(parse_quantity(node.status.capacity.get(resource, 0)))
        if not offered:
            yield wrong(
                "plugin",
                f"node {name} has {len(inventory.devices)} cards but offers no {resource}: its kubelet has no plugin",
                "check that the agent there is ready and that devicePlugin.kubeletRoot is the kubelet's --root-dir",
            )
        elif any(gpu.healthy for gpu in inventory.devices) and not int(
            parse_quantity(node.status.allocatable.get(resource, offered))
        ):
            # The kubelet keeps the capacity for some minutes, in case the plugin comes back
            yield wrong(
                "plugin",
                f"node {name} no longer offers {resource}: its kubelet has lost the plugin",
                "check that the agent there is ready, and read its log",
            )
        elif offered != slots:
            yield wrong(
                "conflict",
                f"node {name} offers {offered} of {resource}, but its cards have {slots} slots",
                "if another device plugin serves that name there, remove it; else wait for the agent's restart",
            )
    for condition in node.status.conditions:
        if condition.type in names.CONDITIONS and condition.status == "True":
            area = _CONDITIONS.get(condition.type, "cards")
            yield wrong(area, f"node {name}: {condition.message}", f"see {condition.type} in docs/troubleshooting.md")


def _inventory(node: Node) -> Inventory | None:
    """The node's inventory; empty where the node publishes no cards, None where the annotation cannot be read."""
    text = node.metadata.annotations.get(names.DEVICES)
    try:
        return decode_inventory(text) if text else Inventory()
    except ValueError:
        return None


def _runtime(runtime: str, kubelet: str, mode: str, nodes: list[str]) -> Finding:
    where = f"{runtime} with kubelet {kubelet} on {some(nodes)}"
    name, _, version = runtime.partition("://")
    number, kubelets = minor(version), minor(kubelet)
    if kubelets is not None and kubelets < OLDEST:
        return wrong("runtime", where, "upgrade the kubelet to 1.30 or newer")
    if not mode:
        return unseen("runtime", f"{where}: the agent has not published how cards reach containers", _NO_MODE)
    if mode.startswith("cdi:") and number is not None and number < _TAKES_CDI.get(name, (0, 0)):
        return wrong("runtime", f"{where} does not support CDI names", "leave devicePlugin.deviceListStrategy at auto")
    return ok("runtime", f"{where}: cards reach containers by {mode}")


def _versions(cluster: Cluster, own: str) -> Iterator[Finding]:
    parts = [part for part in cluster.parts or () if part.component]
    released = sorted({part.version for part in parts if part.version})
    if len(released) > 1:
        yield wrong(
            "versions",
            f"parts of vgpu have different versions: {', '.join(released)}",
            "wait for the upgrade: kubectl rollout status",
        )
    elif released:
        note = "" if released[0] == own else f"; this command is {own}"
        yield ok("versions", f"vgpu {released[0]}{note}")
    server = minor(cluster.version or "")
    for tag in sorted({_tag(image) for part in parts for image in part.images if "kube-scheduler" in image}):
        number = minor(tag)
        if server and number and not (server[0] == number[0] and 0 <= server[1] - number[1] <= 1):
            yield wrong(
                "versions",
                f"kube-scheduler {tag} with API server {cluster.version}",
                "run helm upgrade: without scheduler.kubeScheduler.image.tag the chart uses the version of the cluster",
            )
    drivers = defaultdict(list)
    for node in cluster.nodes or ():
        inventory = _inventory(node)
        if inventory is not None and inventory.driver:
            drivers[inventory.driver, inventory.cuda].append(node.metadata.name)
    for (driver, cuda), nodes in sorted(drivers.items()):
        yield ok("versions", f"driver {driver} (CUDA {cuda or 'unknown'}) on {some(nodes)}")


def _tag(image: str) -> str:
    return image.rpartition(":")[2]
