"""Conditions of this node that say what is wrong with it. One that was never true is not written at all."""

from collections.abc import Sequence

import msgspec

from vgpu.kube import writes
from vgpu.kube.client import KubeClient
from vgpu.kube.objects import Condition


class Finding(msgspec.Struct, frozen=True):
    """What a condition should say now."""

    type: str
    message: str  #: empty: all is well
    reason: str  #: one word for programs, where something is wrong
    fixed: str  #: the same where nothing is wrong
    well: str  #: a sentence for that


def put(client: KubeClient, node: str, known: Sequence[Condition], finding: Finding) -> bool:
    """Writes the condition where the node says something else; tells whether it did. Raises ApiError."""
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
