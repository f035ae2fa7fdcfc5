"""What a node publishes about its cards."""

from device_plugin.publish import capacity, marks
from vgpu import names
from vgpu.allocation import Held
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory, decode_inventory


def gpu(name: str, **changes: object) -> Gpu:
    return Gpu(**{"uuid": name, "index": 0, "model": "T4", "memory": 1000, "cores": 100, **changes})  # type: ignore[arg-type]  # shorthand


def test_totals_of_healthy_cards_under_all_names() -> None:
    found = capacity([gpu("a"), gpu("b", memory=500)], frozenset(), {}, Config(resource_mem="example.com/mem"))
    assert found == {
        names.RESOURCE_TOTAL_MEMORY: 1500,
        names.RESOURCE_TOTAL_CORES: 200,
        "example.com/mem": 1500,
        names.RESOURCE_CORES: 200,
    }


def test_a_card_out_of_service_counts_what_is_still_held_on_it() -> None:
    cards = [gpu("a", healthy=False), gpu("b"), gpu("c")]
    held = {"a": Held(1, 300, 300, 30), "b": Held(1, 100, 100, 10)}
    found = capacity(cards, frozenset({"c"}), held, Config())
    assert found[names.RESOURCE_TOTAL_MEMORY] == 300 + 1000
    assert found[names.RESOURCE_TOTAL_CORES] == 30 + 100


def test_what_is_held_on_cards_that_are_not_there_any_more_counts() -> None:
    """A card may be dead after a reboot, or partitioned (MIG), while its pods live."""
    held = {"a": Held(1, 300, 300, 30), "gone": Held(2, 400, 400, 50)}
    found = capacity([gpu("a")], frozenset(), held, Config())
    assert found[names.RESOURCE_TOTAL_MEMORY] == 1000 + 400
    assert found[names.RESOURCE_TOTAL_CORES] == 100 + 50
    assert capacity([], frozenset(), held, Config())[names.RESOURCE_TOTAL_MEMORY] == 300 + 400


def test_never_less_than_what_is_held_when_scaling_was_lowered() -> None:
    found = capacity([gpu("a", memory=1000)], frozenset(), {"a": Held(2, 1600, 900, 120)}, Config())
    assert (found[names.RESOURCE_TOTAL_MEMORY], found[names.RESOURCE_TOTAL_CORES]) == (1600, 120)


def test_marks_of_a_node_and_of_one_without_cards() -> None:
    inventory = Inventory(devices=(gpu("a", healthy=False),))
    annotations, labels = marks(inventory)
    assert decode_inventory(annotations[names.DEVICES] or "") == inventory
    assert labels == {names.LABEL_PRESENT: "true"}
    assert marks(Inventory()) == ({names.DEVICES: None}, {names.LABEL_PRESENT: None})
