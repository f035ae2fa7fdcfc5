"""The ways by which cards reach containers, changed on a node that runs."""

from contextlib import suppress
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
    try:
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
    finally:
        upgrade(node, values(node))  # nothing to do where all went well
    return ", ".join(told)


def _chosen() -> str:
    """What the newest agent has chosen, by its log."""
    logs = Path("/var/log/pods").glob(f"{NAMESPACE}_vgpu-device-plugin-*/device-plugin/*.log")
    newest = (0.0, "")
    for log in logs:
        with suppress(FileNotFoundError):  # of a pod that goes meanwhile
            newest = max(newest, (log.stat().st_mtime, log.read_text(errors="replace")))
    said = [line.partition(CHOSEN)[2] for line in newest[1].splitlines() if CHOSEN in line]
    return said[-1].partition(":")[0] if said else ""
