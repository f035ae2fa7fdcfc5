"""Spread and binpack over two nodes: the field's public filter table (HAMi's Test_Filter), as inputs and outputs."""

import numpy as np
import pytest

from vgpu.allocation import Held, Kind
from vgpu.devices import Gpu
from vgpu.placement import policies, policy
from vgpu.placement.cards import FIGURES, Cards, CardState
from vgpu.placement.fit import Rejection, fit_pod
from vgpu.resources import PLACEMENT_POLICIES, ContainerRequest, GpuRequest, PodRequest

NODES = {
    "node1": [("device1", Held(1, 2000, 2000, 25)), ("device2", Held())],
    "node2": [("device3", Held()), ("device4", Held(1, 6000, 6000, 75))],
}
APP = ContainerRequest("main", Kind.APP, GpuRequest(1, memory=1000, cores=20))
PEAK = (
    ContainerRequest("init", Kind.INIT, GpuRequest(1, memory=5000, cores=20)),
    ContainerRequest("main", Kind.APP, GpuRequest(1, memory=4000, cores=20)),
)


def cards_of(node: str) -> list[CardState]:
    return [CardState(Gpu(uuid, index, "GPU", 8000, slots=10), held) for index, (uuid, held) in enumerate(NODES[node])]


# Row 3 of the field's table accepts device4 too, "due to tie": that is state leaking between its cases, not a tie.
# Node spread is our default; the field's default is binpack.
@pytest.mark.parametrize(
    ("node_policy", "gpu_policy", "containers", "node", "device"),
    [
        ("binpack", "binpack", (APP,), "node2", "device4"),
        ("binpack", "binpack", PEAK, "node2", "device3"),
        ("binpack", "spread", (APP,), "node2", "device3"),
        ("spread", "binpack", (APP,), "node1", "device1"),
        ("spread", "spread", (APP,), "node1", "device2"),
    ],
)
def test_the_fields_table(
    node_policy: str, gpu_policy: str, containers: tuple[ContainerRequest, ...], node: str, device: str
) -> None:
    scores = {name: float(policy(node_policy).node_score(*Cards.of(cards_of(name)))) for name in NODES}
    assert max(scores, key=lambda name: scores[name]) == node
    found = fit_pod(cards_of(node), PodRequest(containers), policy(gpu_policy))
    assert not isinstance(found, Rejection)
    assert {piece.uuid for slices in found.containers.values() for piece in slices} == {device}


@pytest.mark.parametrize("name", PLACEMENT_POLICIES)
def test_ties_go_to_the_lowest_index(name: str) -> None:
    cards = Cards.empty(3, 4)
    for place in np.ndindex(3, 4):
        cards.put(place, Gpu(f"{place}", place[1], "GPU", 8000), cordoned=False)
    usage = np.zeros((FIGURES, 3, 4), dtype=np.int64)
    assert policy(name).card_order(cards, usage).tolist() == [[0, 1, 2, 3]] * 3


def test_the_larger_of_memory_and_cores_is_the_load() -> None:
    gpu = [Gpu(f"dev-{n}", n, "GPU", 8000) for n in range(2)]
    cards, usage = Cards.of([CardState(gpu[0], Held(1, 4000, 4000, 0)), CardState(gpu[1], Held(1, 100, 100, 60))])
    assert policy("spread").card_order(cards, usage).tolist() == [0, 1]
    assert policy("binpack").card_order(cards, usage).tolist() == [1, 0]


def test_every_policy_has_its_module() -> None:
    assert set(policies()) == set(PLACEMENT_POLICIES)
