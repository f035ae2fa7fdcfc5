"""`helm upgrade` changes `schedulerName`: pods of the earlier name keep what they hold."""

from typing import Final

from tests.cluster.checks.chart import upgrade, values
from tests.cluster.checks.health import runs_on, unschedulable
from tests.cluster.checks.records import cards
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.devices import Gpu

NEW_NAME: Final = "vgpu-renamed"
SECONDS: Final = 120


def holds_what_it_held(node: Node) -> str:
    """Two pods fill one card; the other card is empty, so that the node's totals refuse no pod.

    A pod under the new name that wants the full card waits, and gets the place of a pod that ends. After the change
    back to the earlier name, the same holds.
    """
    kubectl = node.kubectl
    card = min(cards(node).values(), key=lambda gpu: gpu.index)
    first = [f"before-{at}" for at in range(2)]
    kubectl.create(*(_pod(name, card) for name in first))
    holders = [_running(node, name) for name in first]
    reasons = []
    for scheduler in (NEW_NAME, names.SCHEDULER_NAME):
        upgrade(node, values(node) | {"schedulerName": scheduler})
        mine = f"of-{scheduler}"
        kubectl.create(_pod(mine, card))
        found = kubectl.until("refused a full card", _full, "pod", mine, seconds=SECONDS)
        assert found["spec"]["schedulerName"] == scheduler
        reasons.append(_why(found))
        for one in holders:
            runs_on(node, one)
        kubectl.delete("pod", holders.pop(0)["metadata"]["name"])
        holders.append(_running(node, mine))
    kubectl.delete("pod", *(one["metadata"]["name"] for one in holders))
    return f"a pod of the new name waited: {reasons[0]}"


def _pod(name: str, card: Gpu) -> Object:
    """Half of that card."""
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: card.memory // 2}
    annotations = {names.USE_GPU_UUID: card.uuid}
    resources = {"resources": {"limits": limits}}
    return pod(name, CLIENT, ["sleep", "3600"], metadata={"annotations": annotations}, container=resources)


def _why(found: Object) -> str:
    """kube-scheduler's message about the pod."""
    conditions = found["status"].get("conditions", ())
    return next((str(one.get("message")) for one in conditions if one["type"] == "PodScheduled"), "")


def _full(found: Object) -> bool:
    """Whether the card is full, by its records.

    Right after a replacement of the agent, the node has no slices at all for a moment.
    """
    return unschedulable(found) and "cards fit" in _why(found)


def _running(node: Node, name: str) -> Object:
    return node.kubectl.until("running", lambda found: phase(found) == "Running", "pod", name, seconds=SECONDS)
