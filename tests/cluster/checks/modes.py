"""The ways by which cards reach containers, changed on a running node."""

from functools import partial
from typing import Final

from tests.cluster.checks.chart import SECONDS, upgrade, values
from tests.cluster.checks.sight import SEEN, last_words
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names

MIB: Final = 1300


def other_ways(node: Node) -> str:
    """Device nodes and mounts, the agent's own choice, and back: each start has its slice."""
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
            node.kubectl.until(f"telling {chosen}", partial(_tells, chosen), "node", NODE, seconds=SECONDS)
            node.kubectl.delete("pod", name)
            told.append(f"{strategy} ({chosen}) after {took:.1f} s")
    finally:
        upgrade(node, values(node))  # nothing to do where all went well
    return ", ".join(told)


def _tells(mode: str, found: Object) -> bool:
    """Whether the node's annotation, which its agent writes, names this mode."""
    return str(found["metadata"]["annotations"].get(names.MODE)).startswith(f"{mode}: ")
