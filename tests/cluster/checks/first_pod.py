"""One pod with a slice: what it sees, and what the node's metrics tell of it."""

import json
import urllib.request

from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.namespaces import ADDRESS
from tests.cluster.node import Node

MIB = 1 << 20
MEMORY = 3000 * MIB
CORES = 30
SLICE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": MEMORY // MIB, "nvidia.com/gpucores": CORES}
SECONDS = 120
TOLERANCE = 6  #: percentage points of the core share: three times the bar


def slice_pod(name: str, *command: str) -> Object:
    """A pod of one container that asks for SLICE."""
    return pod(name, CLIENT, command, container={"resources": {"limits": SLICE}})


def sees_its_slice(node: Node) -> str:
    """CUDA and NVML tell the slice; what is free can be allocated, one byte more is refused; the core share holds."""
    node.kubectl.create(slice_pod("first", "vgpu", "probe", "--fill", "--over", "--cores", "--seconds", "5"))
    node.kubectl.until("done", lambda found: phase(found) == "Succeeded", "pod", "first", seconds=SECONDS)
    output = node.kubectl.logs("first")
    (card,) = json.loads(output.splitlines()[0])["cards"]
    for total in ("device_total", "cuda_total", "nvml_total"):
        assert card[total] == MEMORY, f"{total} is {card[total]}, not {MEMORY}: {output}"
    assert card["fill"] == "CUDA_SUCCESS", output
    assert card["over"] == "CUDA_ERROR_OUT_OF_MEMORY", output
    assert abs(card["core_share"] - CORES) <= TOLERANCE, output
    node.kubectl.delete("pod", "first")
    return f"{MEMORY // MIB} MiB, core share {card['core_share']:.1f} % of {CORES} %"


def has_metrics(node: Node) -> str:
    """The node's metrics, through its node port, show a container's slice before its first CUDA call."""
    node.kubectl.create(slice_pod("idle", "sleep", "3600"))
    lines: list[str] = []

    def told(found: Object) -> bool:
        with urllib.request.urlopen(f"http://{ADDRESS}:31992/metrics", timeout=30) as answer:
            lines[:] = [line for line in answer.read().decode().splitlines() if 'pod="idle"' in line]
        events = node.kubectl.events("idle")
        return phase(found) == "Running" and bool(lines) and any(one.startswith("VgpuAllocated") for one in events)

    node.kubectl.until("running and told of", told, "pod", "idle", seconds=SECONDS)
    limits = [float(line.split()[-1]) for line in lines if line.startswith("vgpu_container_memory_limit_bytes{")]
    assert limits == [MEMORY], lines
    node.kubectl.delete("pod", "idle")
    return f"{len(lines)} series"
