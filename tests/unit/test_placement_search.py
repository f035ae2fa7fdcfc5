"""Pods of many containers: decisions without a search, the limits of a search, and the message when it ends."""

import random
import threading
import time

import numpy as np
import pytest

from scheduler import survey
from scheduler.cluster import ClusterState, Holding
from scheduler.survey import Survey
from vgpu.allocation import Allocation, Held, Kind, held
from vgpu.devices import Gpu, Inventory
from vgpu.placement import fit, fleet, policy, room, rules
from vgpu.placement.cards import Cards
from vgpu.placement.fit import CardState, Reason, Rejection, fit_pod
from vgpu.resources import MAX_CONTAINERS, ContainerRequest, GpuRequest, PodRequest, RequestError, Rules, read_pod

SPREAD = policy("spread")
CARD = 10_000


def pod(*sizes: int, cores: int = 0, kinds: tuple[Kind, ...] = ()) -> PodRequest:
    """One container of one card for each size in MiB."""
    order = kinds or (Kind.APP,) * len(sizes)
    return PodRequest(
        tuple(ContainerRequest(f"c{n}", order[n], GpuRequest(1, size, cores=cores)) for n, size in enumerate(sizes))
    )


def node(*used: int, name: str = "n") -> list[CardState]:
    return [
        CardState(Gpu(f"{name}-{n}", n, "Tesla T4", CARD), Held(1, mem, mem) if mem else Held())
        for n, mem in enumerate(used)
    ]


def hard() -> tuple[PodRequest, tuple[int, ...]]:
    """A pod and other pods' holdings on eight cards: only a long search would show that the pod does not fit."""
    draw = random.Random(49)
    sizes = tuple(draw.randrange(3300, 4600) for _ in range(16))
    return pod(*sizes), tuple(draw.randrange(1000, 3000) for _ in range(8))


def tries(monkeypatch: pytest.MonkeyPatch, cards: list[CardState], asked: PodRequest) -> tuple[int, object]:
    """Number of tried choices, and the answer."""
    made: list[fit._Search] = []
    run = fit._Search.run

    def noted(search: fit._Search) -> object:
        made.append(search)
        return run(search)

    with monkeypatch.context() as patched:
        patched.setattr(fit._Search, "run", noted)
        found = fit_pod(cards, asked, SPREAD)
    return sum(fit.TRIES - search.tries for search in made), found


@pytest.mark.parametrize(
    ("used", "sizes", "cores"),
    [
        ((0,) * 8, (6000,) * 9, 0),
        (tuple(range(0, 800, 100)), (6000,) * 9, 0),
        ((0,) * 8, tuple(range(5100, 6000, 100)), 0),
        (tuple(range(0, 800, 100)), tuple(range(5100, 6000, 100)), 0),
        ((0,) * 8, (100,) * 9, 60),
        ((0,) * 8, (*(6000,) * 5, *(3000,) * 17), 0),
    ],
)
def test_too_many_containers_for_the_cards_are_counted_not_searched(
    monkeypatch: pytest.MonkeyPatch, used: tuple[int, ...], sizes: tuple[int, ...], cores: int
) -> None:
    count, found = tries(monkeypatch, node(*used), pod(*sizes, cores=cores))
    assert isinstance(found, Rejection)
    assert Reason.UNDECIDED not in found.reasons
    assert count <= 2 * len(sizes), "no more than one way down"


def test_equal_cards_are_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting alone does not show that these do not fit."""
    sizes = (4700, 5600, 3600, 2600, 4200, 4700, 4200, 2600, 6600)
    count, found = tries(monkeypatch, node(*(0,) * 4), pod(*sizes))
    assert isinstance(found, Rejection)
    assert Reason.UNDECIDED not in found.reasons
    assert count <= 200


def test_a_search_that_is_given_up_says_so_and_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = hard()
    monkeypatch.setattr(fit, "TRIES", 40)
    found = fit_pod(node(*used), asked, SPREAD)
    assert isinstance(found, Rejection)
    assert found.reasons == {Reason.UNDECIDED: 8}
    assert "not decided" in found.sentence
    count, late = tries(monkeypatch, node(*used), pod(*(each.gpu.memory for each in asked.containers[:2])))
    assert isinstance(late, Allocation)
    assert count == 2
    found = fit_pod(node(*used), asked, SPREAD, until=time.monotonic())
    assert isinstance(found, Rejection)
    assert found.reasons == {Reason.UNDECIDED: 8}


def test_what_the_fleet_takes_for_a_fit_is_found_on_the_node_whatever_the_number_of_containers() -> None:
    draw = random.Random(7)
    fits = clash = 0
    for _ in range(150):
        count = draw.randint(4, 9)
        kinds = tuple(sorted(draw.choices(tuple(Kind), k=count), key=lambda kind: kind is Kind.APP))
        asked = pod(*(draw.choice((1000, 2500, 3300, 4000, 5100, 6000)) for _ in range(count)), kinds=kinds)
        states = node(*(draw.choice((0, 1000, 4000, 7000)) for _ in range(4)))
        cards, usage = Cards.of(states)
        shape = Cards.empty(1, len(states))
        for at, state in enumerate(states):
            shape.put((0, at), state.gpu, cordoned=False)
        asks = rules.asks(shape, asked)
        verdict = fleet.survey(shape, room.of(shape, usage[:, np.newaxis]), asks, asked)
        found = fit_pod(states, asked, SPREAD)
        if verdict.fits[0]:
            fits += 1
            assert isinstance(found, Allocation)
            assert list(found.containers) == [each.name for each in asked.containers]
            total = held((each.kind, found.containers[each.name]) for each in asked.containers)
            assert all(total.get(s.gpu.uuid, Held()).mem + s.held.mem <= CARD for s in states)
        elif not verdict.open[0]:
            clash += 1
            assert isinstance(found, Rejection)
        assert cards.present.all()
    assert min(fits, clash) > 10


def state_of(nodes: int, used: tuple[int, ...]) -> ClusterState:
    state = ClusterState()
    for n in range(nodes):
        name = f"n{n}"
        state.set_node(name, Inventory(tuple(Gpu(f"{name}-{c}", c, "Tesla T4", CARD) for c in range(len(used)))))
        taken = {f"{name}-{c}": Held(1, mem + n, mem + n) for c, mem in enumerate(used)}
        state.hold(f"uid-{n}", Holding(name, taken))
    return state


def test_what_is_not_decided_in_time_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = hard()
    names = [f"n{n}" for n in range(12)]
    monkeypatch.setattr(survey, "SEARCH_SECONDS", 0.0)
    found = Survey(state_of(12, used), "", asked, names)
    assert not found.fits.any()
    assert found.failed == {}, "no eviction for what may not help"
    assert set(found.unresolvable) == set(names)
    assert all("not decided" in why for why in found.unresolvable.values())
    assert found.reasons == {Reason.UNDECIDED}


def test_equal_nodes_are_searched_once_and_others_are_answered_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, used = hard()
    state = ClusterState()
    names = [f"n{n}" for n in range(20)]
    for name in names:
        state.set_node(name, Inventory(tuple(Gpu(f"{name}-{c}", c, "Tesla T4", CARD - used[c]) for c in range(8))))
    searched = []

    def search(*_args: object, **_more: object) -> Rejection:
        other: list[bool] = []
        small = threading.Thread(target=lambda: other.append(bool(Survey(state, "", pod(100), names).fits.all())))
        small.start()
        small.join(20)
        searched.append(other)
        return Rejection({Reason.UNDECIDED: 8}, "not decided")

    monkeypatch.setattr(survey, "fit_pod", search)
    found = Survey(state, "", asked, names)
    assert searched == [[True]]
    assert len(found.unresolvable) == 20


def test_a_pod_of_more_containers_than_can_be_decided_is_a_request_that_cannot_be_met() -> None:
    def manifest(count: int) -> dict[str, object]:
        limits = {"resources": {"limits": {"nvidia.com/gpumem": "100"}}}
        return {"spec": {"containers": [{"name": f"c{n}", **limits} for n in range(count)]}}

    assert len((read_pod(manifest(MAX_CONTAINERS), Rules()) or pod(1)).containers) == MAX_CONTAINERS
    with pytest.raises(RequestError, match="containers that ask for cards is 33: must be 32 or less in one pod"):
        read_pod(manifest(MAX_CONTAINERS + 1), Rules())
