"""Device ids: names, keys, and which ids are preferred."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from device_plugin import ids
from vgpu.devices import Gpu

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"


def gpu(uuid: str, slots: int = 3) -> Gpu:
    return Gpu(uuid=uuid, index=0, model="T4", memory=15360, slots=slots)


def test_ids_of_a_card_name_it_and_fit_the_kubelet() -> None:
    card = gpu("GPU-fef8089b-4820-abfc-e83e-94318197576e", slots=1000)
    found = ids.of(card)
    assert len(set(found)) == 1000
    assert {ids.card(one) for one in found} == {card.uuid}
    assert max(map(len, found)) <= 63


def test_key_is_of_the_set_of_ids_not_of_their_order() -> None:
    assert ids.key([f"{B}::0", f"{A}::1"]) == ids.key([f"{A}::1", f"{B}::0"])
    assert ids.key([f"{A}::1", f"{B}::0"]) == hashlib.sha256(f"{A}::1,{B}::0".encode()).hexdigest()[:16]
    assert ids.key([f"{A}::1"]) != ids.key([f"{A}::2"])


def test_wanted_cards_come_first_and_required_ids_always() -> None:
    free = [*ids.of(gpu(A)), *ids.of(gpu(B)), *ids.of(gpu(C))]
    assert ids.prefer(free, [], 2, [C, B]) == [f"{B}::0", f"{C}::0"]
    assert ids.prefer(free, [f"{A}::2"], 2, [B]) == [f"{A}::2", f"{B}::0"]


def test_without_a_wish_the_emptiest_cards_and_different_ones() -> None:
    free = [f"{A}::2", *ids.of(gpu(B)), f"{C}::0", f"{C}::1"]
    assert ids.prefer(free, [], 2, []) == [f"{B}::0", f"{C}::0"]


def test_numbers_are_numbers() -> None:
    free = [f"{A}::10", f"{A}::9", f"{A}::2"]
    assert ids.prefer(free, [], 3, [A]) == [f"{A}::2", f"{A}::9", f"{A}::10"]


@given(
    st.sets(st.tuples(st.sampled_from([A, B, C]), st.integers(0, 5)), min_size=1),
    st.integers(1, 4),
    st.lists(st.sampled_from([A, B, C]), unique=True),
)
def test_preferred_ids_are_available_and_on_as_many_cards_as_possible(
    free: set[tuple[str, int]], size: int, cards: list[str]
) -> None:
    available = [f"{uuid}::{n}" for uuid, n in free]
    chosen = ids.prefer(available, [], size, cards)
    assert len(chosen) == len(set(chosen)) == min(size, len(available))
    assert set(chosen) <= set(available)
    assert len({ids.card(one) for one in chosen}) == min(size, len({uuid for uuid, _ in free}))
