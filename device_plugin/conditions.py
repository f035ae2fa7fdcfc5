"""Conditions of this node that report a problem. A condition that was never true is not written at all."""

from collections.abc import Sequence

import msgspec

from vgpu.kube import writes
from vgpu.kube.client import KubeClient
from vgpu.kube.objects import Condition


class Finding(msgspec.Struct, frozen=True):
    """What a condition should say now."""

    type: str
    message: str  #: empty: all is well
    reason: str  #: one CamelCase word, used where there is a problem
    fixed: str  #: the word used where there is no problem
    well: str  #: the message used where there is no problem


def put(client: KubeClient, node: str, known: Sequence[Condition], finding: Finding) -> bool:
    """Writes the condition where the node has another one; returns whether it wrote. Raises ApiError."""
    before = next((one for one in known if one.type == finding.type), None)
    if before is None and not finding.message:
        return False
    status, reason = ("True", finding.reason) if finding.message else ("False", finding.fixed)
    message = finding.message or finding.well
    if before is not None and (before.status, before.message) == (status, message):
        return False
    changed = before is None or before.status != status
    writes.patch_node_condition(client, node, finding.type, status, reason, message, changed=changed)
    return True
