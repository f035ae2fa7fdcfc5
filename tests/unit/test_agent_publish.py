"""What a node publishes about its cards."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import msgspec
import pytest

from device_plugin import publish
from device_plugin.cards import Cards
from device_plugin.publish import Publisher, capacity, marks
from vgpu import names
from vgpu.allocation import Held
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory, decode_inventory
from vgpu.kube.client import ApiError, Unreachable
from vgpu.kube.objects import Condition, Meta, Node, NodeStatus
from vgpu.tier import Scaling


def gpu(name: str, **changes: object) -> Gpu:
    return Gpu(**{"uuid": name, "index": 0, "model": "T4", "memory": 1000, "cores": 100, **changes})  # type: ignore[arg-type]  # shorthand


def test_totals_of_healthy_cards_under_all_names() -> None:
    found = capacity([gpu("a"), gpu("b", memory=500)], frozenset(), {}, Config(resource_mem="example.com/mem"))
    assert found == {
        names.RESOURCE_TOTAL_MEMORY: 1500,
        names.RESOURCE_TOTAL_CORES: 200,
        "example.com/mem": 1500,
        names.RESOURCE_CORES: 200,
        names.RESOURCE_MEMORY_PERCENTAGE: 200,
        names.RESOURCE_PRIORITY: 20,
    }


def test_a_card_out_of_service_counts_what_is_still_held_on_it() -> None:
    cards = [gpu("a", healthy=False), gpu("b"), gpu("c")]
    held = {"a": Held(1, 300, 300, 30), "b": Held(1, 100, 100, 10)}
    found = capacity(cards, frozenset({"c"}), held, Config())
    assert found[names.RESOURCE_TOTAL_MEMORY] == 300 + 1000
    assert found[names.RESOURCE_TOTAL_CORES] == 30 + 100


def test_what_is_held_on_cards_that_are_not_there_any_more_counts() -> None:
    """A card may be dead after a reboot, or partitioned (MIG), while its pods still run."""
    held = {"a": Held(1, 300, 300, 30), "gone": Held(2, 400, 400, 50)}
    found = capacity([gpu("a")], frozenset(), held, Config())
    assert found[names.RESOURCE_TOTAL_MEMORY] == 1000 + 400
    assert found[names.RESOURCE_TOTAL_CORES] == 100 + 50
    assert capacity([], frozenset(), held, Config())[names.RESOURCE_TOTAL_MEMORY] == 300 + 400


def test_never_less_than_what_is_held_when_scaling_was_lowered() -> None:
    found = capacity([gpu("a", memory=1000)], frozenset(), {"a": Held(2, 1600, 900, 120)}, Config())
    assert (found[names.RESOURCE_TOTAL_MEMORY], found[names.RESOURCE_TOTAL_CORES]) == (1600, 120)


@pytest.mark.parametrize("healthy", [True, False])
def test_what_autoscalers_count_bounds_nothing_that_cards_can_hold(healthy: bool) -> None:
    """The kubelet counts these resources, too, when it restarts: it must admit running pods again, even on failed
    cards.
    """
    cards = [gpu("a", healthy=healthy, memory=1500, physical=1000, slots=4)]
    held = {"a": Held(4, 1500, 1000, 100), "gone": Held(2, 2000, 2000, 20)}
    found = capacity(cards, frozenset({"a"}), held, Config())
    # 6 containers: of 150 % on the one card, and of 200 % on the other one, each counted for one of its cards.
    assert found[names.RESOURCE_MEMORY_PERCENTAGE] >= 150 + 200
    assert found[names.RESOURCE_PRIORITY] >= 6


def test_marks_of_a_node_and_of_one_without_cards() -> None:
    inventory = Inventory(devices=(gpu("a", healthy=False),))
    annotations, labels = marks(inventory)
    assert decode_inventory(annotations[names.DEVICES] or "") == inventory
    assert labels == {names.LABEL_PRESENT: "true"}
    assert marks(Inventory()) == ({names.DEVICES: None}, {names.LABEL_PRESENT: None})


class Api:
    """Stores what is written to the node, and returns the given errors in turn."""

    def __init__(self, done: list[object]) -> None:
        self.done = done
        self.errors: list[ApiError] = []

    def request(self, method: str, path: str, *, body: Any, **_: object) -> None:
        self.done.append((method, path, body["metadata"]))
        if self.errors:
            raise self.errors.pop(0)


def healing() -> tuple[Publisher, Api, list[object]]:
    """A publisher of a node without cards, its API server, and the list of actions in their order."""
    done: list[object] = []
    api = Api(done)

    def heal(uuids: Collection[str]) -> None:
        done.append(sorted(uuids))

    found = Publisher(
        cast(Any, api),
        "n",
        Config(),
        Cards(Inventory()),
        dict,
        suspect=cast(Any, None),
        gone=cast(Any, None),
        heal=heal,
        unbacked=cast(Any, None),
    )
    return found, api, done


def marked(version: str) -> Node:
    return Node(metadata=Meta(name="n", resourceVersion=version, annotations={names.HEAL: "a,b"}))


def removal(version: str) -> object:
    return "PATCH", "/api/v1/nodes/n", {"annotations": {names.HEAL: None}, "resourceVersion": version}


def test_a_card_is_healed_before_its_mark_goes_and_once() -> None:
    """An agent that ends in between leaves the mark to the next one."""
    publisher, _, done = healing()
    for _ in range(2):  # the watch has not reported yet that the mark is gone
        publisher._change("set", marked("7"))
        publisher._assert()
    assert done == [["a", "b"], removal("7")]


def test_a_mark_that_changed_meanwhile_is_read_again_and_not_removed_unread() -> None:
    publisher, api, done = healing()
    api.errors = [ApiError(409, "Conflict", "the object has been modified")]
    publisher._change("set", marked("7"))
    publisher._assert()
    publisher._assert()  # waits for the watch
    assert done == [["a", "b"], removal("7")]
    publisher._change("set", marked("8"))
    publisher._assert()
    assert done[2:] == [["a", "b"], removal("8")]


def test_a_removal_without_an_answer_is_tried_again_and_heals_no_second_time() -> None:
    publisher, api, done = healing()
    api.errors = [Unreachable("connection lost")]
    publisher._change("set", marked("7"))
    with pytest.raises(Unreachable):
        publisher._assert()
    publisher._assert()
    assert done == [["a", "b"], removal("7"), removal("7")]


class Mirror:
    """An API server with one node that reports each write at once."""

    def __init__(self) -> None:
        self.writes, self.node = list[str](), Node(metadata=Meta(name="n"), status=NodeStatus())

    def request(self, _: str, path: str, *, body: Any, **__: object) -> None:
        self.writes.append(path.removeprefix("/api/v1/nodes/"))
        meta, status = self.node.metadata, self.node.status
        meta.annotations.update(body.get("metadata", {}).get("annotations", {}))
        meta.labels.update(body.get("metadata", {}).get("labels", {}))
        status.capacity.update(body.get("status", {}).get("capacity", {}))
        for one in msgspec.convert(body.get("status", {}).get("conditions", []), list[Condition]):
            status.conditions[:] = [*(known for known in status.conditions if known.type != one.type), one]


def publisher_of(api: Mirror, cards: Cards, held: Callable[[], Mapping[str, Held] | None] = dict) -> Publisher:
    unused = cast(Any, None)
    return Publisher(
        cast(Any, api), "n", Config(), cards, held, suspect=unused, gone=unused, heal=unused, unbacked=unused
    )


def test_errors_of_many_kinds_are_few_writes_and_the_last_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(publish.time, "monotonic", lambda: clock[0])
    api, cards = Mirror(), Cards(Inventory(devices=(gpu("a"), gpu("b", index=1))))
    publisher = publisher_of(api, cards)

    def look() -> int:
        """Number of writes in one look."""
        before = len(api.writes)
        publisher._change("set", api.node)
        publisher._assert()
        return len(api.writes) - before

    assert look() == 2  # cards, capacity
    cards.sicken("a", "XID 40")
    assert look() == 3  # and the condition
    written = 0
    for turn in range(100):  # one look after each write, at most every 0.3 s
        cards.sicken("a", f"XID {40 + turn % 20}")
        clock[0] += 0.3
        written += look()
    assert written == 2 * 2  # cards and condition, every 10 s of 30
    cards.sicken("b", "XID 79")  # news is published at once
    assert look() == 3
    cards.sicken("b", "XID 48")
    assert look() == 0
    clock[0] += 10
    assert look() == 2
    told = decode_inventory(api.node.metadata.annotations[names.DEVICES])
    assert [one.trouble for one in told.devices] == ["XID 59", "XID 48"]
    assert "XID 48" in api.node.status.conditions[0].message


def test_nothing_is_made_less_before_it_is_known_what_pods_hold() -> None:
    """The kubelet admits running pods again by these numbers, even when it restarts together with the agent."""
    api, held = Mirror(), list[dict[str, Held] | None]([None])

    def publisher(cards: Cards) -> Publisher:
        return publisher_of(api, cards, lambda: held[-1])

    def look(found: Publisher) -> bool:
        found._change("set", api.node)
        return found._assert()

    def memory() -> tuple[object, int]:
        told = decode_inventory(api.node.metadata.annotations[names.DEVICES])
        return api.node.status.capacity[names.RESOURCE_TOTAL_MEMORY], told.devices[0].memory

    assert not look(publisher(Cards(Inventory(devices=(gpu("a", memory=600),)))))
    assert memory() == ("600", 600)  # there was none
    cards = Cards(Inventory(devices=(gpu("a"),)), Scaling(2.0, host_memory=500))
    cards.back(True)
    scaled = publisher(cards)
    scaled._flat = ""
    assert not look(scaled)
    assert memory() == ("600", 600)
    held.append({"a": Held(1, 1500, 1000)})
    assert look(scaled)
    assert memory() == ("1500", 1500)
    held.append(None)
    lower = publisher(Cards(Inventory(devices=(gpu("a"),))))
    assert not look(lower)
    assert memory() == ("1500", 1000), "the card as it is, and no less capacity than pods may hold"
    api.node.status.capacity[names.RESOURCE_TOTAL_MEMORY] = "0"  # a kubelet that lost its checkpoint
    assert not look(lower)
    assert memory() == ("1000", 1000)
    held.append({"a": Held(1, 1200, 900)})
    assert look(lower)
    assert memory() == ("1200", 1000)
    held.append({})
    assert look(lower)
    assert memory() == ("1000", 1000)


def test_no_more_is_told_of_a_card_than_what_is_held_behind_others_leaves() -> None:
    api = Mirror()
    cards = Cards(Inventory(devices=(gpu("a", memory=1000),)), Scaling(3.0, host_memory=1600))
    cards.back(True)
    held = {"a": Held(1, 2400, 900)}
    publisher = publisher_of(api, cards, lambda: held)

    def look() -> list[int]:
        publisher._change("set", api.node)
        publisher._assert()
        return [one.memory for one in decode_inventory(api.node.metadata.annotations[names.DEVICES]).devices]

    assert look() == [2600]
    cards.found(Inventory(devices=(gpu("a"), gpu("b", index=1))))  # answers late
    assert look() == [1100, 1100]
    held.clear()
    assert look() == [1800, 1800]
