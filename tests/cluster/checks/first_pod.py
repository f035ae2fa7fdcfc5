"""One pod with a slice: what it sees, and what the node's metrics tell of it."""

import json
import urllib.request

from tests.cluster.images import CLIENT
from tests.cluster.kubectl import phase, pod
from tests.cluster.namespaces import ADDRESS
from tests.cluster.node import Node

MIB = 3000
CORES = 30
SLICE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": MIB, "nvidia.com/gpucores": CORES}
SECONDS = 60


def sees_its_slice(node: Node) -> str:
    """The driver and NVML tell the slice; one MiB more than it holds is refused; the core share is its own."""
    command = ["vgpu", "probe", "--help"]
    node.kubectl.create(pod("first", CLIENT, command, container={"resources": {"limits": SLICE}}))
    node.kubectl.until("done", lambda found: phase(found) == "Succeeded", "pod", "first", seconds=SECONDS)
    return node.kubectl.logs("first").splitlines()[0]


def has_metrics(node: Node) -> str:
    """The node's metrics show a container's slice before its first CUDA call."""
    node.kubectl.create(pod("idle", CLIENT, ["sleep", "3600"], container={"resources": {"limits": SLICE}}))
    node.kubectl.until("running", lambda found: phase(found) == "Running", "pod", "idle", seconds=SECONDS)
    with urllib.request.urlopen(f"http://{ADDRESS}:31992/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if 'pod="idle"' in line]
    assert lines
    node.kubectl.delete("pod", "idle")
    return json.dumps(len(lines))
