"""The chart in the cluster."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT, PRODUCT
from tests.cluster.kubectl import Object, phase, pod, ready
from tests.cluster.node import Node
from tests.tools import helm
from vgpu import names

CARDS = 2
PROFILE = f"T4x{CARDS}"
QUIET_SECONDS = 40  #: after this time, a card that failed is used again
SPLIT = 40  #: slices per card: enough for the pods of every check on one node
NAMESPACE = "kube-system"
LIBRARIES: Final = Path("/usr/local/vgpu")  #: on the host
SECONDS = 180  #: three times the allowed time of an installation


def values(node: Node) -> dict[str, Any]:
    """Values of the installation."""
    name, _, tag = PRODUCT.rpartition(":")
    registry, _, repository = name.partition("/")
    return {
        "simulate": PROFILE,
        "image": {"registry": registry, "repository": repository, "tag": tag, "pullPolicy": "Never"},
        "devicePlugin": {
            "deviceListStrategy": node.versions.strategy,
            "deviceSplitCount": SPLIT,
            "recoverySeconds": QUIET_SECONDS,
        },
        "scheduler": {"replicas": 1, "kubeScheduler": {"image": {"pullPolicy": "Never"}}},
    }


def install(node: Node) -> str:
    """`helm install`, and every pod of the chart ready."""
    command = [node.helm, "install", "vgpu", str(helm.CHART), "-n", NAMESPACE, "-f", "-"]
    begin = time.monotonic()
    node.kubectl.program(command, stdin=json.dumps(values(node)), timeout=SECONDS)
    _rolled_out(node)
    took = time.monotonic() - begin
    assert took < SECONDS, f"all ready after {took:.1f} s"
    pods = node.kubectl.items("pods", "-n", NAMESPACE)
    assert pods
    assert all(ready(pod) for pod in pods)
    return f"all ready after {took:.1f} s"


def upgrade(node: Node, changed: Mapping[str, Any]) -> float:
    """`helm upgrade` with these values; seconds until the parts are ready."""
    command = [node.helm, "upgrade", "vgpu", str(helm.CHART), "-n", NAMESPACE, "-f", "-"]
    return after(node, command, json.dumps(changed))


def after(node: Node, command: Sequence[str], stdin: str | None = None) -> float:
    """Runs a program that changes the release; seconds until the parts are ready."""
    begin = time.monotonic()
    node.kubectl.program(command, stdin=stdin, timeout=SECONDS)
    _rolled_out(node)
    return time.monotonic() - begin


def _rolled_out(node: Node) -> None:
    for name in ("deployment/vgpu-scheduler", "daemonset/vgpu-device-plugin"):
        waited = f"--timeout={SECONDS}s"
        node.kubectl.run("rollout", "status", name, "-n", NAMESPACE, waited, timeout=SECONDS + 10)


def node_tells_its_cards(node: Node) -> str:
    """Capacity, allocatable and the inventory of the node."""

    def published(found: Object) -> bool:
        return all(
            int(found["status"]["allocatable"].get(name, 0)) > 0
            for name in (
                "nvidia.com/gpu",
                "vgpu.io/memory",
                "vgpu.io/cores",
                "nvidia.com/gpumem",
                "nvidia.com/gpucores",
            )
        )

    found = node.kubectl.until("published", published, "node", NODE, seconds=120)
    assert found["metadata"]["labels"]["vgpu.io/present"] == "true"
    assert len(json.loads(found["metadata"]["annotations"]["vgpu.io/devices"])["devices"]) == CARDS
    allocatable = found["status"]["allocatable"]
    assert allocatable["vgpu.io/cores"] == str(100 * CARDS)
    return f"{allocatable['nvidia.com/gpu']} slices, {allocatable['vgpu.io/memory']} MiB"


def helm_test(node: Node) -> str:
    """`helm test`: a pod with a slice."""
    begin = time.monotonic()
    command = [node.helm, "test", "vgpu", "-n", NAMESPACE, "--logs", "--timeout", f"{SECONDS}s"]
    node.kubectl.program(command, timeout=SECONDS + 10)
    return f"passed after {time.monotonic() - begin:.1f} s"


def uninstall(node: Node) -> str:
    """`helm uninstall` removes from the node what the agents published, and does not touch a running container."""
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000}
    probe = ["sh", "-c", "while vgpu probe --over --expect-memory=1000; do sleep 1; done; sleep 3600"]
    node.kubectl.create(pod("stays", CLIENT, probe, container={"resources": {"limits": limits}}))
    node.kubectl.until("running", lambda found: phase(found) == "Running", "pod", "stays", seconds=SECONDS)
    told = sorted(_conditions(node.kubectl.get("node", NODE)))
    begin = time.monotonic()
    node.kubectl.program([node.helm, "uninstall", "vgpu", "-n", NAMESPACE, "--wait"], timeout=SECONDS * 2)
    took = time.monotonic() - begin

    def clean(found: Object) -> bool:
        status, meta = found["status"], found["metadata"]
        ours = {"vgpu.io/memory", "vgpu.io/cores", "nvidia.com/gpumem", "nvidia.com/gpucores"}
        left = ours & {*status["capacity"], *status["allocatable"]}
        marks = {"vgpu.io/present", "vgpu.io/devices", "vgpu.io/mode"} & {*meta["labels"], *meta["annotations"]}
        return not left and not marks and not _conditions(found)

    node.kubectl.until("clean", clean, "node", NODE, seconds=SECONDS)
    before = len(node.kubectl.logs("stays").splitlines())

    def goes_on(found: Object) -> bool:
        return phase(found) == "Running" and len(node.kubectl.logs("stays").splitlines()) > before

    node.kubectl.until("goes on within its limits", goes_on, "pod", "stays", seconds=SECONDS)
    assert list(LIBRARIES.glob("libvgpu-*.so")), "the library of a running container is gone"
    node.kubectl.delete("pod", "stays")
    return f"{took:.1f} s; of its conditions the node had {', '.join(told) or 'none'}"


def _conditions(found: Object) -> set[str]:
    """The conditions of a node that agents write."""
    return {one["type"] for one in found["status"]["conditions"]} & {*names.CONDITIONS}
