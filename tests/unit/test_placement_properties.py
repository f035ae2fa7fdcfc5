"""Properties for any cards and any pods: nothing is given twice, and one node and the whole fleet judge alike."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vgpu.allocation import Allocation, Held, Kind, held, merge
from vgpu.devices import Gpu
from vgpu.placement import fleet, policy, room, rules
from vgpu.placement.cards import FIGURES, Cards, CardState, Ints, figures
from vgpu.placement.fit import Rejection, fit_pod
from vgpu.resources import PLACEMENT_POLICIES, CardSelector, ContainerRequest, GpuRequest, PodRequest

KINDS = {Kind.INIT: 0, Kind.SIDECAR: 0, Kind.APP: 1}  # init containers and sidecars come first in a spec


def requests() -> st.SearchStrategy[GpuRequest]:
    return st.builds(
        GpuRequest,
        count=st.sampled_from((1, 1, 1, 2, 3)),
        memory=st.sampled_from((0, 500, 2000, 3000, 4000)),  # cards have 4000 or 8000: two often meet on one
        percent=st.sampled_from((1, 33, 50, 100)),
        cores=st.sampled_from((0, 1, 30, 50, 100)),
    )


@st.composite
def pods(draw: st.DrawFn) -> PodRequest:
    kinds = sorted(draw(st.lists(st.sampled_from(Kind), min_size=1, max_size=3)), key=lambda kind: KINDS[kind])
    return PodRequest(
        tuple(ContainerRequest(f"c{n}", kind, draw(requests())) for n, kind in enumerate(kinds)),
        selector=CardSelector(
            use_types=draw(st.sampled_from(((), ("T4",)))),
            nouse_uuids=draw(st.sampled_from(((), ("dev-0",)))),
            numa_bind=draw(st.booleans()),
        ),
        oversubscribe=draw(st.sampled_from((None, False))),
    )


@st.composite
def gpus(draw: st.DrawFn, index: int) -> Gpu:
    return Gpu(
        uuid=f"dev-{index}",
        index=index,
        model=draw(st.sampled_from(("Tesla T4", "NVIDIA A10"))),
        memory=draw(st.sampled_from((4000, 8000))),
        physical=4000,
        cores=draw(st.sampled_from((100, 200))),
        slots=draw(st.integers(1, 4)),
        numa=draw(st.sampled_from((0, 1))),
        healthy=draw(st.sampled_from((True, True, True, False))),
        others=draw(st.sampled_from((0, 0, 0, 500, 4000))),
    )


@st.composite
def nodes(draw: st.DrawFn) -> list[CardState]:
    result = []
    for index in range(draw(st.integers(0, 4))):
        slots, memory, cores = draw(st.integers(0, 2)), draw(st.integers(0, 4000)), draw(st.integers(0, 99))
        behind = draw(st.sampled_from((0, 0, 3000, 3900)))  # in host memory; a card has 4000 of it, or none
        used = Held(slots, memory + behind, memory, cores) if slots else Held()
        result.append(CardState(draw(gpus(index)), used, draw(st.sampled_from((False, False, True)))))
    return result


def fleet_of(states: list[list[CardState]]) -> tuple[Cards, Ints]:
    shape = len(states), max((len(node) for node in states), default=0)
    cards, usage = Cards.empty(*shape), np.zeros((FIGURES, *shape), dtype=np.int64)
    places: dict[str, list[tuple[int, ...]]] = {}
    for row, node in enumerate(states):
        for column, state in enumerate(node):
            cards.put((row, column), state.gpu, cordoned=state.cordoned)
            usage[:, row, column] = figures(state.held)
            places.setdefault(state.gpu.uuid, []).append((row, column))
    cards.places = places
    return cards, usage


@settings(max_examples=150, deadline=None)
@given(states=st.lists(nodes(), min_size=1, max_size=4), pod=pods(), name=st.sampled_from(PLACEMENT_POLICIES))
def test_the_fleet_is_judged_as_each_node_is(states: list[list[CardState]], pod: PodRequest, name: str) -> None:
    cards, usage = fleet_of(states)
    asks = rules.asks(cards, pod)
    verdict = fleet.survey(cards, room.of(cards, usage), asks, pod)
    for row, node in enumerate(states):
        found = fit_pod(node, pod, policy(name))
        if verdict.open[row]:
            assert len(pod.containers) > 1
            continue
        assert bool(verdict.fits[row]) is isinstance(found, Allocation)
        if isinstance(found, Rejection) and len(pod.containers) == 1:
            told, kind = fleet.rejections(cards, usage, asks[0], np.array([row]), numa_bind=pod.selector.numa_bind)
            assert [told[at] for at in kind] == [found]


def test_host_memory_that_is_taken_is_taken_in_the_fleet_too() -> None:
    gpu = Gpu("dev-0", 0, "Tesla T4", memory=8000, physical=4000)
    states = [[CardState(gpu, Held(1, mem, 2000))] for mem in (5900, 5000, 2000)]
    cards, usage = fleet_of(states)
    pod = PodRequest((ContainerRequest("c", Kind.APP, GpuRequest(1, 2000)),))
    verdict = fleet.survey(cards, room.of(cards, usage), rules.asks(cards, pod), pod)
    assert verdict.fits.tolist() == [False, True, True]
    assert [isinstance(fit_pod(node, pod, policy("spread")), Allocation) for node in states] == [False, True, True]


@pytest.mark.parametrize("kinds", [(Kind.APP, Kind.APP), (Kind.SIDECAR, Kind.INIT, Kind.APP), (Kind.APP,) * 3])
@pytest.mark.parametrize("numa_bind", [False, True])
def test_containers_that_compete_for_cards_are_judged_as_on_each_node(kinds: tuple[Kind, ...], numa_bind: bool) -> None:
    draw = random.Random(len(kinds) + numa_bind)
    states = []
    for _ in range(60):
        gpus = [Gpu(f"dev-{n}", n, "Tesla T4", 8000, slots=draw.randint(1, 3), numa=n // 2) for n in range(4)]
        used = [draw.choice((0, 2000, 5000, 7000)) for _ in gpus]
        states.append(
            [CardState(gpu, Held(1, mem, mem, draw.choice((0, 40)))) for gpu, mem in zip(gpus, used, strict=True)]
        )
    cards, usage = fleet_of(states)
    clashes, sizes = 0, (0, 1000, 2500, 5000)
    for _ in range(8):
        pod = PodRequest(
            tuple(
                ContainerRequest(f"c{n}", kind, GpuRequest(draw.randint(1, 2), draw.choice(sizes), 25, 30))
                for n, kind in enumerate(kinds)
            ),
            selector=CardSelector(numa_bind=numa_bind),
        )
        asks = rules.asks(cards, pod)
        verdict = fleet.survey(cards, room.of(cards, usage), asks, pod)
        assert not verdict.open.any()
        found = [fit_pod(node, pod, policy("spread")) for node in states]
        assert verdict.fits.tolist() == [isinstance(each, Allocation) for each in found]
        clash = np.flatnonzero(verdict.clash)
        told = {
            row: rejections[kind].sentence
            for index, places, rejections, kinds_ in fleet.clashes(cards, usage, asks, pod, clash)
            for row, kind in zip(clash[places].tolist(), kinds_.tolist(), strict=True)
        }
        assert set(told) == set(clash.tolist())
        clashes += len(clash)
    assert clashes


class Cluster(RuleBasedStateMachine):
    """Pods come and go on one node; no card ever holds more than its size."""

    def __init__(self) -> None:
        super().__init__()
        self.cards: list[Gpu] = []
        self.pods: dict[int, dict[str, Held]] = {}
        self.number = 0

    @precondition(lambda self: len(self.cards) < 4)
    @rule(data=st.data())
    def add_card(self, data: st.DataObject) -> None:
        self.cards.append(data.draw(gpus(len(self.cards))))

    def usage(self) -> dict[str, Held]:
        total: dict[str, Held] = {}
        for each in self.pods.values():
            total = merge(total, each)
        return total

    @rule(pod=pods(), name=st.sampled_from(PLACEMENT_POLICIES))
    def allocate(self, pod: PodRequest, name: str) -> None:
        usage = self.usage()
        states = [CardState(gpu, usage.get(gpu.uuid, Held())) for gpu in self.cards]
        found = fit_pod(states, pod, policy(name))
        if isinstance(found, Rejection):
            assert found.reasons
            assert found.sentence
            return
        for container in pod.containers:
            slices = found.containers[container.name]
            assert len({piece.uuid for piece in slices}) == len(slices) == container.gpu.count
            assert all(piece.cores == container.gpu.cores for piece in slices)
        self.number += 1
        self.pods[self.number] = held((each.kind, found.containers[each.name]) for each in pod.containers)

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        del self.pods[data.draw(st.sampled_from(sorted(self.pods)))]

    @invariant()
    def never_too_much(self) -> None:
        usage = self.usage()
        for gpu in self.cards:
            on = usage.get(gpu.uuid, Held())
            assert on.slots <= gpu.slots
            assert not on.slots or on.mem <= gpu.memory - gpu.others
            assert not on.slots or on.phys <= gpu.physical_memory - gpu.others
            assert not (on.alone and gpu.others)
            assert on.cores <= gpu.cores
            holders = [each[gpu.uuid] for each in self.pods.values() if gpu.uuid in each]
            assert len(holders) == 1 or not any(one.alone for one in holders)


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
