"""The node's report about its own memory decides, again and again, whether memory of cards is scaled."""

from typing import Any, cast

import pytest

from device_plugin import backing
from device_plugin.cards import Cards
from device_plugin.publish import Publisher, capacity
from vgpu import names
from vgpu.allocation import Held
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory, decode_inventory
from vgpu.kube.objects import Node, NodeStatus
from vgpu.tier import Scaling

T4 = Gpu("GPU-a", 0, "Tesla T4", 15000, physical=15000)
WANTED = Scaling(2.0, host_memory=16384)
UNUSED = cast(Any, None)


def node(kept: int | None) -> Node:
    """A node of 64 GiB whose kubelet keeps this many MiB from pods."""
    if kept is None:
        return Node()
    return Node(status=NodeStatus(capacity={"memory": "64Gi"}, allocatable={"memory": f"{65536 - kept}Mi"}))


@pytest.mark.parametrize(
    ("scaling", "kept", "verdict"),
    [
        (WANTED, 16384, ""),
        (WANTED, 16383, "raise memory in its systemReserved by 1 MiB"),
        (Scaling(2.0), 16384, "devicePlugin.hostMemory"),
        (Scaling(), 0, ""),
        (WANTED, None, None),
    ],
)
def test_what_the_node_says(scaling: Scaling, kept: int | None, verdict: str | None) -> None:
    found = backing.verdict([T4], scaling, node(kept))
    assert (found is None) == (verdict is None)
    assert found is None or (verdict in found if verdict else not found)


def test_huge_pages_are_not_kept_for_the_cards() -> None:
    """The kubelet subtracts huge pages from allocatable memory, but pods may have them (node allocatable, kubelet)."""
    huge = {"hugepages-2Mi": "10Gi", "hugepages-1Gi": "4Gi"}
    status = NodeStatus(capacity={"memory": "64Gi", **huge}, allocatable={"memory": f"{65536 - 16384}Mi", **huge})
    found = backing.verdict([T4], WANTED, Node(status=status))
    assert found
    assert "keeps 2048 MiB from pods: raise memory in its systemReserved by 14336 MiB" in found


class Mirror:
    """An API server with one node that stores what is written to it."""

    def __init__(self) -> None:
        self.annotations: dict[str, str] = {}
        self.capacity: dict[str, str] = {}
        self.conditions: list[dict[str, str]] = []

    def request(self, *_: str, body: Any, **__: object) -> None:
        self.annotations |= body.get("metadata", {}).get("annotations", {})
        self.capacity |= body.get("status", {}).get("capacity", {})
        self.conditions += body.get("status", {}).get("conditions", [])


def test_memory_is_scaled_while_the_node_keeps_host_memory_and_said_why_not() -> None:
    api, cards, told, held = Mirror(), Cards(Inventory(devices=(T4,)), WANTED), list[str](), dict[str, Held]()
    publisher = Publisher(
        cast(Any, api),
        "n",
        Config(),
        cards,
        lambda: held,
        suspect=UNUSED,
        gone=UNUSED,
        heal=UNUSED,
        unbacked=told.append,
    )

    def look(kept: int | None) -> tuple[int, str]:
        """Memory of the card as published, and the sum that kube-scheduler sees."""
        publisher._change("set", node(kept))
        publisher._assert()
        (gpu,) = decode_inventory(api.annotations[names.DEVICES]).devices
        assert gpu.physical_memory == 15000
        return gpu.memory, api.capacity[names.RESOURCE_TOTAL_MEMORY]

    assert look(None) == (15000, "15000"), "not known yet: not more than there is"
    assert (cards.backed, told, api.conditions) == (None, [], [])
    assert look(16384) == (30000, "30000")
    assert (cards.backed, told, api.conditions) == (True, [], [])
    held["GPU-a"] = Held(2, 20000, 10000)
    publisher._change("set", node(4096))
    publisher._assert()
    assert look(4096) == (15000, "20000"), "never below what pods hold"
    assert len(told) == 1
    assert "raise memory in its systemReserved by 12288 MiB" in told[0]
    assert [(one["type"], one["status"]) for one in api.conditions[:1]] == [(names.CONDITION_UNBACKED, "True")]
    assert api.conditions[0]["message"] == told[0]
    assert look(16384) == (30000, "30000")


def test_what_is_published_follows_the_scaled_cards() -> None:
    cards = Cards(Inventory(devices=(T4,)), WANTED)
    cards.back(True)
    found = capacity(cards.inventory.devices, frozenset(), {}, Config())
    assert found[names.RESOURCE_MEMORY] == found[names.RESOURCE_TOTAL_MEMORY] == 30000
    cards.sicken("GPU-a", "XID 79")
    assert (
        capacity(cards.inventory.devices, frozenset(), {"GPU-a": Held(1, 20000)}, Config())[names.RESOURCE_MEMORY]
        == 20000
    )


def test_cards_that_come_later_are_weighed_then() -> None:
    cards, told = Cards(Inventory(), WANTED), list[str]()
    api = Mirror()
    publisher = Publisher(
        cast(Any, api), "n", Config(), cards, dict, suspect=UNUSED, gone=UNUSED, heal=UNUSED, unbacked=told.append
    )
    publisher._change("set", node(4096))
    publisher._assert()
    assert (told, api.conditions) == ([], [])
    cards.found(Inventory(devices=(T4,)))
    assert cards.backed is None
    publisher._assert()
    assert cards.backed is False
    assert (decode_inventory(api.annotations[names.DEVICES]).devices[0].memory, len(told)) == (15000, 1)
