"""The ways by which cards reach containers, changed on a node that runs."""

from pathlib import Path
from typing import Final

from tests.cluster.checks.chart import NAMESPACE, SECONDS, upgrade, values
from tests.cluster.checks.sight import SEEN, last_words
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import phase, pod
from tests.cluster.node import Node
from vgpu import names

MIB: Final = 1300
CHOSEN: Final = "cards reach containers by "


def other_ways(node: Node) -> str:
    """Device nodes and mounts, what the agent chooses by itself, and back: each start has its slice."""
    best = "cdi" if node.versions.containerd else "device-specs"  # containerd 1.6 knows no CDI, NVIDIA's is not there
    wanted = {"device-specs": "device-specs", "auto": best, node.versions.strategy: node.versions.strategy}
    told = []
    for strategy, chosen in wanted.items():
        changed = values(node)
        changed["devicePlugin"]["deviceListStrategy"] = strategy
        took = upgrade(node, changed)
        name = f"by-{strategy}"
        limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
        command = ["sh", "-c", f"{SEEN} > /dev/termination-log"]
        node.kubectl.create(pod(name, CLIENT, command, container={"resources": {"limits": limits}}))
        found = node.kubectl.until("done", lambda one: phase(one) == "Succeeded", "pod", name, seconds=SECONDS)
        assert last_words(found) == f"{MIB}\n", last_words(found)
        assert _chosen() == chosen, f"{strategy}: cards came by {_chosen()}, not by {chosen}"
        node.kubectl.delete("pod", name)
        told.append(f"{strategy} ({chosen}) after {took:.1f} s")
    return ", ".join(told)


def _chosen() -> str:
    """What the newest agent has chosen, by its log."""
    logs = Path("/var/log/pods").glob(f"{NAMESPACE}_vgpu-device-plugin-*/device-plugin/*.log")
    newest = max(logs, key=lambda log: log.stat().st_mtime)
    said = [line.partition(CHOSEN)[2] for line in newest.read_text(errors="replace").splitlines() if CHOSEN in line]
    return said[-1].partition(":")[0] if said else ""
