"""The scheduler's arrays: after any events in any order, they equal a fresh count."""

import gc
import threading
import time

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler.cluster import ClusterState, Holding
from vgpu.allocation import Held
from vgpu.devices import Gpu, Inventory
from vgpu.placement import room
from vgpu.placement.cards import figures
from vgpu.resources import CardSelector, GpuRequest

NODES = ("a", "b", "c", "d")
PODS = tuple(f"uid-{n}" for n in range(6))


def inventory(*uuids: str, memory: int = 8000, model: str = "Tesla T4") -> Inventory:
    return Inventory(tuple(Gpu(uuid, index, model, memory) for index, uuid in enumerate(uuids)))


def holds(node: str, *uuids: str, mem: int = 1000) -> Holding:
    return Holding(node, {uuid: Held(1, mem, mem, 10) for uuid in uuids})


class Events(RuleBasedStateMachine):
    """A plain model next to the arrays: nodes with their cards, pods with their holdings."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.nodes: dict[str, tuple[Inventory, frozenset[str]]] = {}
        self.pods: dict[str, Holding] = {}

    @rule(name=st.sampled_from(NODES), count=st.integers(0, 5), cordoned=st.integers(-1, 4), healthy=st.booleans())
    def set_node(self, name: str, count: int, cordoned: int, healthy: bool) -> None:
        devices = tuple(
            Gpu(f"{name}-{index}", index, f"model-{index % 2}", 8000, healthy=healthy) for index in range(count)
        )
        marked = frozenset({f"{name}-{cordoned}"})
        self.state.set_node(name, Inventory(devices[::-1]), marked)
        if count:
            self.nodes[name] = Inventory(devices), marked
        else:
            self.nodes.pop(name, None)

    @rule(name=st.sampled_from(NODES))
    def remove_node(self, name: str) -> None:
        self.state.remove_node(name)
        self.nodes.pop(name, None)

    @rule(uid=st.sampled_from(PODS), node=st.sampled_from(NODES), first=st.integers(0, 4), mem=st.integers(1, 3))
    def hold(self, uid: str, node: str, first: int, mem: int) -> None:
        self.pods[uid] = holds(node, f"{node}-{first}", f"{node}-{(first + 1) % 5}", mem=mem)
        self.state.hold(uid, self.pods[uid])

    @rule(uid=st.sampled_from(PODS))
    def release(self, uid: str) -> None:
        self.state.release(uid)
        self.pods.pop(uid, None)

    @invariant()
    def as_counted_afresh(self) -> None:
        view = self.state.view()
        assert set(view.row_of) == set(self.nodes)
        assert sorted(view.row_of.values()) == list(range(len(self.nodes)))
        for name, (cards, cordoned) in self.nodes.items():
            states = self.state.cards_of(name)
            assert states is not None
            assert [each.gpu for each in states] == list(cards.devices)
            row = view.row_of[name]
            assert int(view.cards.present[row].sum()) == len(cards.devices)
            for column, each in enumerate(states):
                held = Held()
                for holding in self.pods.values():
                    if holding.node == name:
                        held += holding.held.get(each.gpu.uuid, Held())
                assert each.held == held
                assert each.cordoned is (each.gpu.uuid in cordoned)
                assert view.usage[:, row, column].tolist() == figures(held).tolist()
                assert view.cards.models[view.cards.model[row, column]] == each.gpu.model
                assert view.cards.places[each.gpu.uuid] == ((row, column),)
        assert np.array_equal(view.left, room.of(view.cards, view.usage))
        kinds = {
            name: [(gpu.model, gpu.healthy, gpu.uuid in cordoned) for gpu in cards.devices]
            for name, (cards, cordoned) in self.nodes.items()
        }
        for one in kinds:
            for two in kinds:
                rows = view.row_of[one], view.row_of[two]
                assert (kinds[one] == kinds[two]) is bool(view.kinds[rows[0]] == view.kinds[rows[1]])
        assert sum(len(places) for places in view.cards.places.values()) == sum(
            len(cards.devices) for cards, _ in self.nodes.values()
        )


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_pods_hold_survives_the_absence_of_their_node() -> None:
    state = ClusterState()
    state.hold("uid", holds("a", "x"))
    state.set_node("a", inventory("x"))
    assert state.slices() == 1
    state.remove_node("a")
    assert state.slices() == 0
    state.set_node("a", inventory("x"))
    assert state.slices() == 1


def test_an_unconfirmed_holding_does_not_stand_in_its_own_pods_way() -> None:
    state = ClusterState()
    state.set_node("a", inventory("x"))
    state.hold("uid", Holding("a", {"x": Held(1, 8000, 8000, 0)}, time.monotonic() + 60))
    assert [each.held for each in state.cards_of("a", without="uid") or ()] == [Held()]
    assert not state.view(without="uid").usage.any()
    assert state.view(without="uid").left[room.UNUSED].all()
    assert state.view(without="other").usage.any()
    state.hold("uid", holds("a", "x"))
    assert state.view(without="uid").usage.any()


def test_retract_leaves_alone_what_the_api_server_has_confirmed() -> None:
    state = ClusterState()
    state.set_node("a", inventory("x"))
    state.hold("uid", Holding("a", {"x": Held(1)}, time.monotonic() + 60))
    state.hold("uid", Holding("a", {"x": Held(1)}))
    state.retract("uid")
    assert state.slices() == 1
    state.hold("other", Holding("a", {"x": Held(1)}, time.monotonic() + 60))
    state.retract("other")
    assert state.slices() == 1


def test_differences_are_repaired_and_counted_in_slices() -> None:
    state = ClusterState()
    state.set_node("a", inventory("x", "y"))
    state.hold("ghost", holds("a", "x", "y"))
    state.hold("right", holds("a", "x"))
    state.hold("moved", holds("a", "x"))
    mark = state.mark()
    expected = {"right": holds("a", "x"), "moved": holds("a", "y"), "missed": holds("a", "y")}
    differences = state.differences(expected, mark)
    assert set(differences) == {"ghost", "moved", "missed"}
    assert state.repair(differences) == 2 + 2 + 1
    assert state.differences(expected, state.mark()) == {}
    assert state.slices() == 3


def test_what_changed_after_the_mark_or_is_on_its_way_is_no_difference() -> None:
    state = ClusterState()
    state.set_node("a", inventory("x"))
    state.hold("early", holds("a", "x"))
    mark = state.mark()
    state.hold("late", holds("a", "x"))
    state.release("early")
    state.hold("bound now", Holding("a", {"x": Held(1)}, time.monotonic() + 60))
    assert state.differences({"early": holds("a", "x")}, mark) == {}
    assert set(state.differences({}, state.mark())) == {"late"}
    state.hold("given up", Holding("a", {"x": Held(1)}, time.monotonic() - 1))
    assert "given up" in state.differences({}, state.mark())
    assert state.repair({"given up": None}) == 0, "an unconfirmed bind is no drift"


def test_news_wake_who_waits_for_them() -> None:
    state = ClusterState()
    state.set_node("a", inventory("x"))
    mark = state.mark()
    assert not state.news(mark, 0)
    told: list[bool] = []
    waiting = threading.Thread(target=lambda: told.append(state.news(mark, 3600)), daemon=True)
    waiting.start()
    state.hold("one", holds("a", "x"))
    waiting.join(20)
    assert told == [True]
    assert state.news(mark, 0), "it has happened already"


def test_the_smallest_accepted_card_decides_what_a_percentage_means() -> None:
    state = ClusterState()
    half = GpuRequest(1, percent=50)
    assert state.smallest_ask(half, CardSelector()) is None
    assert state.largest_card() is None
    state.set_node("a", inventory("x", memory=16000, model="Tesla T4"))
    state.set_node("b", inventory("y", memory=80000, model="NVIDIA H100 80GB HBM3"))
    assert state.smallest_ask(half, CardSelector()) == 8000
    assert state.smallest_ask(half, CardSelector(use_types=("H100",))) == 40000
    assert state.smallest_ask(half, CardSelector(use_types=("A100",))) is None
    assert state.largest_card() == 80000
    assert state.models() == {"Tesla T4", "NVIDIA H100 80GB HBM3"}
    (uuid,) = (gpu.uuid for gpu in inventory("x").devices)
    assert state.known([uuid, "GPU-none"]) == {uuid}
    assert state.smallest_context() is None
    for context in (7, 9, 7):
        costs = tuple(Gpu(f"GPU-c{index}", index, "T4", 16000, context=context + index) for index in range(2))
        state.set_node("costs", Inventory(costs))
        assert state.smallest_context() == context
    state.remove_node("costs")
    assert state.smallest_context() is None


def test_rows_of_unknown_nodes_are_minus_one() -> None:
    state = ClusterState()
    state.set_node("a", inventory("x"))
    assert np.array_equal(state.view().rows(["b", "a"]), [-1, 0])


def test_rows_that_were_found_without_the_lock_are_known_to_be_old() -> None:
    """`row_of` is replaced when a node comes or goes, and never changed: so a caller notices that its own is old."""
    state = ClusterState()
    state.set_node("a", inventory("x"))
    state.set_node("b", inventory("y"))
    old = state.row_of()
    assert old is state.row_of() is state.view().row_of
    state.set_node("b", inventory("y", "z"))
    assert state.view().row_of is old
    state.remove_node("a")
    assert dict(old) == {"a": 0, "b": 1}
    assert state.view().row_of is not old
    assert dict(state.row_of()) == {"b": 0}


def test_the_garbage_collector_follows_nothing_of_pods_and_cards() -> None:
    """The garbage collector stops all threads, and there may be 40,000 of each."""
    state = ClusterState()
    state.set_node("a", inventory("x"))
    state.hold("uid", holds("a", "x"))
    gc.collect()  # a tuple is let go by a collection,
    gc.collect()  # and one of tuples by the next
    (card,) = state.cards_of("a") or ()
    held = state.holding("uid")
    assert held is not None
    followed = (card.gpu, held, *held.held.values(), state.view().cards.places["x"])
    assert [each for each in followed if gc.is_tracked(each)] == []
