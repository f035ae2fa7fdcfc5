"""The record of slices on a pod, and what a pod occupies at its peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu import allocation
from vgpu.allocation import Allocation, Held, Kind, held, merge, of_slices
from vgpu.devices import GpuSlice

SLICES = st.builds(
    GpuSlice,
    uuid=st.sampled_from(["GPU-a", "GPU-b", "GPU-c"]),
    mem=st.integers(0, 2**24),
    cores=st.integers(0, 100),
    phys=st.none() | st.integers(0, 2**24),
)
Parts = list[tuple[Kind, list[GpuSlice]]]
PARTS = st.lists(st.tuples(st.sampled_from(Kind), st.lists(SLICES, max_size=3)), max_size=6)


def in_order(parts: Parts) -> Parts:
    """As in a pod's spec: apps last."""
    return sorted(parts, key=lambda part: part[0] is Kind.APP)


@given(st.dictionaries(st.text(min_size=1), st.lists(SLICES, max_size=4).map(tuple), max_size=4))
def test_record_round_trip(containers: dict[str, tuple[GpuSlice, ...]]) -> None:
    record = Allocation(containers)
    assert allocation.decode(allocation.encode(record)) == record


def test_record_reads_as_documented() -> None:
    record = Allocation({"main": (GpuSlice("GPU-1", 3000, 30),), "big": (GpuSlice("GPU-2", 9, phys=4),)})
    assert allocation.encode(record) == (
        '{"v":1,"containers":{"main":[{"uuid":"GPU-1","mem":3000,"cores":30}],'
        '"big":[{"uuid":"GPU-2","mem":9,"phys":4}]}}'
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated"),
        ("nonsense", "malformed"),
        ("[]", "Expected `object`"),
        ('{"v":1}', "missing required field `containers`"),
        ('{"v":2,"containers":{}}', "version 2 is unknown; this release supports version 1"),
        ('{"containers":{"main":[{"mem":1}]}}', "missing required field `uuid`"),
        ('{"containers":{"main":[{"uuid":"a","mem":-1}]}}', ">= 0"),
        ('{"containers":{"main":[{"uuid":"a","mem":1.5}]}}', "Expected `int`"),
        ('{"containers":{},"x":' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
    ],
)
def test_a_bad_record_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^annotation vgpu\.io/allocation: .*{why}"):
        allocation.decode(text)


def test_slices_on_one_card_add_up() -> None:
    found = of_slices([GpuSlice("a", 1000, 20), GpuSlice("a", 500, 100, phys=100), GpuSlice("b", 1)])
    assert found == {
        "a": Held(slots=2, mem=1500, phys=1100, cores=120, alone=1),
        "b": Held(slots=1, mem=1, phys=1),
    }


def mem(parts: list[tuple[Kind, int]]) -> int:
    return held((kind, [GpuSlice("a", size)]) for kind, size in parts)["a"].mem


@pytest.mark.parametrize(
    ("parts", "peak"),
    [
        ([(Kind.APP, 3), (Kind.APP, 4)], 7),
        ([(Kind.INIT, 5), (Kind.APP, 4)], 5),
        ([(Kind.INIT, 5), (Kind.INIT, 6), (Kind.APP, 4)], 6),
        ([(Kind.INIT, 3), (Kind.APP, 4), (Kind.APP, 4)], 8),
        ([(Kind.SIDECAR, 2), (Kind.APP, 4)], 6),
        ([(Kind.SIDECAR, 2), (Kind.INIT, 5), (Kind.APP, 4)], 7),
        ([(Kind.INIT, 5), (Kind.SIDECAR, 2), (Kind.APP, 4)], 6),
        ([(Kind.SIDECAR, 2), (Kind.SIDECAR, 3)], 5),
        ([(Kind.INIT, 5)], 5),
    ],
)
def test_peak_of_a_pod(parts: list[tuple[Kind, int]], peak: int) -> None:
    assert mem(parts) == peak


def test_peaks_of_different_moments_are_taken_figure_by_figure() -> None:
    """An init container with much memory and an app with many cores: a card must have room for both figures."""
    found = held([(Kind.INIT, [GpuSlice("a", 5000, 10)]), (Kind.APP, [GpuSlice("a", 1000, 80)])])
    assert found == {"a": Held(slots=1, mem=5000, phys=5000, cores=80)}


def test_peaks_are_per_card() -> None:
    found = held([(Kind.INIT, [GpuSlice("a", 5)]), (Kind.APP, [GpuSlice("b", 4)])])
    assert {uuid: card.mem for uuid, card in found.items()} == {"a": 5, "b": 4}


@given(PARTS)
def test_peak_is_the_maximum_over_the_moments_of_a_pods_life(parts: Parts) -> None:
    parts = in_order(parts)
    moments: list[list[GpuSlice]] = []
    for number, (kind, slices) in enumerate(parts):
        beside = [piece for before, others in parts[:number] if before is Kind.SIDECAR for piece in others]
        if kind is not Kind.APP:
            moments.append(beside + slices)
    moments.append([piece for kind, slices in parts if kind is not Kind.INIT for piece in slices])
    expected: dict[str, Held] = {}
    for moment in moments:
        for uuid, now in of_slices(moment).items():
            expected[uuid] = expected.get(uuid, Held()).peak(now)
    assert held(parts) == expected


@given(PARTS, PARTS)
def test_merge_is_a_sum_without_order(left: Parts, right: Parts) -> None:
    one, two = held(in_order(left)), held(in_order(right))
    both = merge(one, two)
    assert both == merge(two, one)
    assert sum(card.mem for card in both.values()) == sum(card.mem for card in [*one.values(), *two.values()])
