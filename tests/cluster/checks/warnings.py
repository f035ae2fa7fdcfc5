"""Warnings for a user: from the webhook, and from the API server itself for pods that ask for no GPU."""

import json
from typing import Any, Final

from tests.cluster.checks.first_pod import slice_pod
from tests.cluster.checks.refusals import refused
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import pod
from tests.cluster.node import Node

SPACE: Final = "ranged"  #: a namespace whose LimitRange gives every container memory of a card


def _warned(node: Node, body: dict[str, Any], *words: str) -> None:
    """A dry run of the creation returns a warning with these words."""
    create = ("create", "--dry-run=server", "--warnings-as-errors", "-f", "-")
    refused(lambda: node.kubectl.run(*create, stdin=json.dumps(body)), "Warning:", *words)


def ignored_keys(node: Node) -> str:
    """Amounts as annotations, for a pod that asks for a GPU and for one that does not; an unknown model."""
    notes = {"annotations": {"nvidia.com/gpucores": "30"}}
    asks, plain = slice_pod("warned", "true"), pod("warned", CLIENT, ["true"], metadata=notes)
    asks["metadata"].update(notes)
    _warned(node, asks, "metadata.annotations[nvidia.com/gpucores] has no effect")
    _warned(node, plain, "ValidatingAdmissionPolicy", "have no effect as annotations or labels")
    asks["metadata"]["annotations"] = {"nvidia.com/use-gputype": "Tesla-X1"}
    _warned(node, asks, 'no card of this cluster matches "Tesla-X1"; the cluster has')
    return "by the webhook and by the policy"


def limit_range(node: Node) -> str:
    """The user gets a warning about a LimitRange's default, and a container that wants no card declines it."""
    amount = {"nvidia.com/gpumem": "100"}
    default = {"type": "Container", "default": amount, "defaultRequest": amount}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
    limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "gpus", "namespace": SPACE}}
    node.kubectl.create(space, limits | {"spec": {"limits": [default]}})
    node.kubectl.until("made", bool, "serviceaccount", "default", namespace=SPACE)  # before that, no pod can be created
    body = slice_pod("ranged", "true")
    body["metadata"]["namespace"] = SPACE
    log: dict[str, Any] = {"name": "log", "image": CLIENT, "command": ["true"], "resources": {}}
    body["spec"]["containers"].append(log)
    _warned(node, body, "spec.containers[log] gets a card because a LimitRange of the namespace sets")
    log["resources"]["limits"] = {"nvidia.com/gpu": "0"}
    _warned(node, body, "spec.containers[log] asks for no card", "admission removes")
    create = ("create", "--dry-run=server", "-f", "-", "-o", "json")
    made = json.loads(node.kubectl.run(*create, stdin=json.dumps(body)))
    found = made["spec"]["containers"][-1]["resources"]["limits"]
    assert found == {"nvidia.com/gpu": "0"}, found
    node.kubectl.delete("namespace", SPACE, now=False)
    return f"{found}"
