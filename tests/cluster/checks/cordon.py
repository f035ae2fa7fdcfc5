"""Cards, and a whole node, that accept no new pods."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from tests.cluster.checks.health import runs_on, unschedulable
from tests.cluster.checks.records import cards, holds
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.kube.objects import Pod

ROOT: Final = Path(__file__).parents[3]
MIB: Final = 1000
SECONDS: Final = 120


def of_a_card(node: Node) -> str:
    """`vgpu cordon`: a pod on the card goes on, no new pod comes, and the node counts only what the
    card's pods hold.
    """
    kubectl = node.kubectl
    closed, other = sorted(cards(node).values(), key=lambda gpu: gpu.index)
    kubectl.create(_pod("stays", {names.USE_GPU_UUID: closed.uuid}))
    stays = _running(node, "stays")
    _vgpu(node, "cordon", closed.uuid)
    try:
        _memory(node, other.memory + MIB)
        kubectl.create(_pod("elsewhere"), _pod("waits", {names.USE_GPU_UUID: closed.uuid}))
        (uuid,) = holds(msgspec.convert(_running(node, "elsewhere"), Pod))
        assert uuid == other.uuid, "a new pod came to a card that takes none"
        found = kubectl.until("refused a place", unschedulable, "pod", "waits", seconds=SECONDS)
        why = next(one["message"] for one in found["status"]["conditions"] if one["type"] == "PodScheduled")
        runs_on(node, stays)
    finally:
        _vgpu(node, "uncordon", closed.uuid)
    _memory(node, other.memory + closed.memory)
    _running(node, "waits")
    kubectl.delete("pod", "stays", "elsewhere", "waits")
    return f"meanwhile: {why}"


def of_the_node(node: Node) -> str:
    """`kubectl cordon`: a GPU pod goes on with its slice; a new pod waits until the node accepts pods again."""
    kubectl = node.kubectl
    kubectl.create(_pod("stays"))
    stays = _running(node, "stays")
    kubectl.run("cordon", NODE)
    try:
        kubectl.create(_pod("waits"))
        kubectl.until("refused a place", unschedulable, "pod", "waits", seconds=SECONDS)
        runs_on(node, stays)
    finally:
        kubectl.run("uncordon", NODE)
    _running(node, "waits")
    kubectl.delete("pod", "stays", "waits")
    return "a pod ran on, another one waited"


def _pod(name: str, annotations: Object | None = None) -> Object:
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
    return pod(
        name,
        CLIENT,
        ["sleep", "3600"],
        metadata={"annotations": annotations or {}},
        container={"resources": {"limits": limits}},
    )


def _running(node: Node, name: str) -> Object:
    return node.kubectl.until("running", lambda found: phase(found) == "Running", "pod", name, seconds=SECONDS)


def _memory(node: Node, wanted: int) -> None:
    """Waits until the node has this many MiB for all pods together."""

    def told(found: Object) -> bool:
        return int(found["status"]["allocatable"].get(names.RESOURCE_TOTAL_MEMORY, 0)) == wanted

    node.kubectl.until(f"offering {wanted} MiB", told, "node", NODE, seconds=SECONDS)


def _vgpu(node: Node, command: str, card: str) -> None:
    """Runs the command as an administrator does."""
    line = [sys.executable, "-m", "vgpu", command, f"--kubeconfig={node.kubectl.kubeconfig}", NODE, card]
    environ = {**os.environ, **node.env}
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
