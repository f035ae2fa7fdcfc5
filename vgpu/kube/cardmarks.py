"""Marks of cards in the annotations of their node: cards that accept no new pods, and repaired cards."""

from collections.abc import Callable, Collection, Sequence

import msgspec

from vgpu import names
from vgpu.devices import Gpu, decode_inventory
from vgpu.kube.client import MERGE_PATCH, ApiError, KubeClient
from vgpu.kube.objects import Node

ATTEMPTS = 5  #: tries when others change the node at the same time


class MarkError(ValueError):
    """A node or card that does not exist; `str()` names the existing ones."""


def listed(text: str) -> frozenset[str]:
    """The UUIDs of a comma list."""
    return frozenset(one.strip() for one in text.split(",") if one.strip())


def change(
    client: KubeClient,
    node: str,
    annotation: str,
    cards: Sequence[str],
    with_these: Callable[[frozenset[str], frozenset[str]], Collection[str]],
) -> list[Gpu]:
    """Makes a node's list `with_these(known, chosen)` and returns the chosen cards, by UUID or index in `cards`.

    Raises MarkError, and ApiError as the API server gives it.
    """
    for attempt in range(ATTEMPTS):
        try:
            found = msgspec.json.decode(client.get(f"/api/v1/nodes/{node}"), type=Node)
        except ApiError as error:
            if error.status == 404:
                raise MarkError(f"there is no node {node}") from None
            raise
        chosen = choose(found, cards)
        marks = found.metadata.annotations
        uuids = with_these(listed(marks.get(annotation, "")), frozenset(gpu.uuid for gpu in chosen))
        value = ",".join(sorted(uuids)) or None
        body = {"metadata": {"resourceVersion": found.metadata.resourceVersion, "annotations": {annotation: value}}}
        try:
            client.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)
        except ApiError as error:
            if error.status == 409 and attempt + 1 < ATTEMPTS:
                continue
            raise
        return chosen
    raise AssertionError("the last attempt returns or raises")


def choose(node: Node, cards: Sequence[str]) -> list[Gpu]:
    """The node's cards with these UUIDs or indices; raises MarkError naming the existing cards."""
    name, text = node.metadata.name, node.metadata.annotations.get(names.DEVICES)
    if text is None:
        raise MarkError(f"node {name} has no cards")
    try:
        known = decode_inventory(text).devices
    except ValueError as error:
        raise MarkError(f"node {name}: {error}") from None
    chosen = []
    for card in cards:
        found = next((gpu for gpu in known if card in (gpu.uuid, str(gpu.index))), None)
        if found is None:
            there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in known)
            raise MarkError(f"node {name} has no card {card}; it has {there}")
        chosen.append(found)
    return chosen
