"""One pod with a slice: what it sees, and what the node's metrics show about it."""

import json
import urllib.request

from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.namespaces import ADDRESS
from tests.cluster.node import Node
from vgpu import names

MIB = 1 << 20
MEMORY = 3000 * MIB
CORES = 30
SLICE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": MEMORY // MIB, "nvidia.com/gpucores": CORES}
SECONDS = 120
FOREIGN = "vgpu_card_foreign_processes"
OBSERVED = "vgpu_container_observed_gpu_seconds_total"
UNTRACKED = "vgpu_container_untracked_bytes"
TOLERANCE = 6  #: percentage points of the core share: three times the bar


def slice_pod(name: str, *command: str) -> Object:
    """A pod of one container that asks for SLICE."""
    return pod(name, CLIENT, command, container={"resources": {"limits": SLICE}})


def sees_its_slice(node: Node) -> str:
    """CUDA and NVML report the slice; the free part can be allocated, one byte more is refused; the core
    share holds.
    """
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
        lines[:] = [line for line in metrics() if 'pod="idle"' in line]
        events = node.kubectl.events("idle")
        return phase(found) == "Running" and bool(lines) and any(one.startswith("VgpuAllocated") for one in events)

    node.kubectl.until("running and told of", told, "pod", "idle", seconds=SECONDS)
    limits = [float(line.split()[-1]) for line in lines if line.startswith("vgpu_container_memory_limit_bytes{")]
    assert limits == [MEMORY], lines
    node.kubectl.delete("pod", "idle")
    return f"{len(lines)} series"


def is_no_stranger(node: Node) -> str:
    """The driver's process belongs to its container: it is not foreign; memory that was not charged is settled."""
    node.kubectl.create(slice_pod("known", "vgpu", "probe", "--cores", "--seconds", "8"))
    seen: dict[str, float] = {}  # name of a metric → its largest value; for untracked memory the last value

    def done(found: Object) -> bool:
        for line in metrics():
            name, value = line.partition("{")[0], float(line.split()[-1])
            if name == FOREIGN or (name in (OBSERVED, UNTRACKED) and 'pod="known"' in line):
                seen[name] = value if name == UNTRACKED else max(seen.get(name, 0), value)
        return phase(found) == "Succeeded"

    node.kubectl.until("done", done, "pod", "known", seconds=SECONDS)
    assert seen.get(OBSERVED), f"the agent finds no GPU time of the container in what the driver tells: {seen}"
    assert (seen[FOREIGN], seen[UNTRACKED]) == (0, 0), seen
    events = [one for one in node.kubectl.items("events", "-A") if one.get("reason") == names.EVENT_FOREIGN]
    assert not events, [one.get("message") for one in events]
    node.kubectl.delete("pod", "known")
    return f"{seen[OBSERVED]:.1f} s of GPU time, as the driver tells it"


def metrics() -> list[str]:
    """The node's samples."""
    with urllib.request.urlopen(f"http://{ADDRESS}:31992/metrics", timeout=30) as answer:
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
