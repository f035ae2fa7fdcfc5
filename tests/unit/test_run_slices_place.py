"""Which cards a request of `vgpu run` gets, and the message when it gets none."""

import msgspec
import pytest

from vgpu.devices import Gpu, GpuSlice
from vgpu.resources import CardSelector, GpuRequest
from vgpu.workstation.place import Demand, NoRoom, acceptable, place, visible
from vgpu.workstation.queue import Ticket
from vgpu.workstation.slices import Run

CARDS = [Gpu(f"GPU-{letter * 8}", index, "Tesla T4", 15360) for index, letter in enumerate("abc")]
A, B, C = (card.uuid for card in CARDS)


def run(*slices: GpuSlice) -> Run:
    return Run("1", 1, 1, 0.0, ("x",), slices, tuple(card for card in CARDS if card.uuid in {s.uuid for s in slices}))


def ask(
    memory: int, *, count: int = 1, cores: int = 0, policy: str = "spread", selector: CardSelector | None = None
) -> Demand:
    return Demand(GpuRequest(count, memory, cores=cores), selector or CardSelector(), policy)


def uuids(found: list[GpuSlice] | NoRoom) -> list[str]:
    assert isinstance(found, list), found
    return [piece.uuid for piece in found]


def test_spread_takes_the_least_loaded_card_and_binpack_the_fullest() -> None:
    runs = [run(GpuSlice(A, 3000)), run(GpuSlice(B, 6000))]
    assert uuids(place(CARDS, runs, [], ask(3000))) == [C]
    assert uuids(place(CARDS, runs, [], ask(3000, policy="binpack"))) == [B]


def test_slices_of_one_request_are_on_different_cards() -> None:
    assert sorted(uuids(place(CARDS, [], [], ask(3000, count=3)))) == [A, B, C]


def test_a_full_card_is_not_given_again() -> None:
    full = [run(*(GpuSlice(uuid, 15360) for uuid in (A, B)))]
    assert uuids(place(CARDS, full, [], ask(1))) == [C]
    assert isinstance(place(CARDS, [*full, run(GpuSlice(C, 15360))], [], ask(1)), NoRoom)


def big(memory: int, host: int = 10**6, *, percent: int = 100, count: int = 1) -> Demand:
    return Demand(GpuRequest(count, memory, percent), memory_mode="static", host_memory=host)


def test_what_does_not_fit_on_a_card_may_lie_in_host_memory() -> None:
    assert place(CARDS, [], [], big(10000)) == [GpuSlice(A, 10000)]
    assert place(CARDS, [], [], big(20000)) == [GpuSlice(A, 20000, phys=15360)]
    taken = [run(GpuSlice(A, 20000, phys=15360)), run(GpuSlice(B, 6000)), run(GpuSlice(C, 8000))]
    assert place(CARDS, taken, [], big(20000)) == [GpuSlice(B, 20000, phys=9360)], "the most of the card"
    assert place(CARDS, taken, [], big(0)) == [GpuSlice(B, 15360, phys=9360)]
    two = place(CARDS, taken, [], big(20000, count=2))
    assert isinstance(two, list)
    assert sorted(two, key=lambda one: one.uuid) == [GpuSlice(B, 20000, phys=9360), GpuSlice(C, 20000, phys=7360)]
    one_is_free = [run(GpuSlice(B, 12360), GpuSlice(C, 15000))]
    two = place(CARDS, one_is_free, [], big(5000, 4000, count=2))
    assert isinstance(two, list)
    assert sorted(two, key=lambda one: one.uuid) == [GpuSlice(A, 5000), GpuSlice(B, 5000, phys=3000)]
    assert isinstance(place(CARDS, one_is_free, [], big(5000, 3999, count=2)), NoRoom)


def test_shares_of_cards_of_different_sizes_have_the_same_host_memory_behind_each() -> None:
    cards = [Gpu(A, 0, "T4", 4000), Gpu(B, 1, "A100", 16000)]
    taken = [run(GpuSlice(B, 12000))]
    half = big(0, 8000, percent=50, count=2)
    found = place(cards, taken, [], half)
    assert isinstance(found, list)
    assert sorted(found, key=lambda one: one.uuid) == [GpuSlice(A, 2000), GpuSlice(B, 8000, phys=4000)]
    refused = place(cards, taken, [], big(0, 7999, percent=50, count=2))
    assert isinstance(refused, NoRoom)
    assert "the command needs 8000 MiB of host memory and may use 7999 MiB" in refused.sentence


def test_what_lies_in_host_memory_takes_no_room_of_the_card() -> None:
    taken = [run(GpuSlice(uuid, 20000, phys=5360)) for uuid in (A, B, C)]
    assert place(CARDS, taken, [], ask(10000)) == [GpuSlice(A, 10000)]
    assert isinstance(place(CARDS, taken, [], ask(10001)), NoRoom)


def test_a_part_of_it_has_to_be_on_the_card_and_the_rest_in_the_budget() -> None:
    full = [run(*(GpuSlice(uuid, 15000) for uuid in (A, B, C)))]
    assert place(CARDS, full, [], big(4 * 360)) == [GpuSlice(A, 1440, phys=360)]
    assert isinstance(place(CARDS, full, [], big(4 * 360 + 1)), NoRoom)
    assert place(CARDS, [], [], big(20000, 4640)) == [GpuSlice(A, 20000, phys=15360)]
    found = place(CARDS, [], [], big(20000, 4639))
    assert isinstance(found, NoRoom)
    assert found.sentence == "the command needs 4640 MiB of host memory and may use 4639 MiB (--host-memory)"
    assert acceptable(CARDS, big(20000)) == {A, B, C}
    assert acceptable(CARDS, big(20000, 4639)) == set()


def test_a_smaller_guarantee_leaves_the_rest_of_the_card_to_others() -> None:
    less = msgspec.structs.replace(big(8000), guarantee=2000)
    assert place(CARDS, [], [], less) == [GpuSlice(A, 8000, phys=2000)]
    two = place(CARDS, [], [], msgspec.structs.replace(less, request=GpuRequest(2, 8000)))
    assert two == [GpuSlice(A, 8000, phys=2000), GpuSlice(B, 8000, phys=2000)]
    assert place(CARDS, [], [], msgspec.structs.replace(less, guarantee=8000)) == [GpuSlice(A, 8000)]
    budget = msgspec.structs.replace(less, host_memory=5999)
    assert isinstance(place(CARDS, [], [], budget), NoRoom)
    full = [run(*(GpuSlice(uuid, 15360 - 1999) for uuid in (A, B, C)))]
    found = place(CARDS, full, [], less)
    assert isinstance(found, NoRoom)
    assert found.sentence == "0 of 3 cards have 2000 MiB free, 1 needed: the guarantee is 2000 MiB (--guarantee)"
    found = place(CARDS, [], [], msgspec.structs.replace(less, guarantee=1999))
    assert isinstance(found, NoRoom)
    assert found.sentence == "a quarter of 8000 MiB has to be on the card"


def test_the_refusal_names_the_part_that_has_to_be_on_the_card_and_what_lacks() -> None:
    full = [run(*(GpuSlice(uuid, 15000) for uuid in (A, B, C)))]
    found = place(CARDS, full, [], big(6000))
    assert isinstance(found, NoRoom)
    assert found.sentence == "0 of 3 cards have 1500 MiB free, 1 needed: a quarter of 6000 MiB has to be on the card"
    assert found.per_card[0].endswith("too little memory free")
    found = place(CARDS, [], [], big(20000, 4639))
    assert isinstance(found, NoRoom)
    assert found.per_card[0].endswith("too little host memory for the rest")
    other = place(CARDS, [], [], msgspec.structs.replace(big(20000), selector=CardSelector(use_types=("H100",))))
    assert isinstance(other, NoRoom)
    assert other.sentence == "0 of 3 cards are of an accepted model, 1 needed"


def test_the_refusal_says_for_each_card_what_is_free_and_what_lacks() -> None:
    runs = [run(GpuSlice(A, 15000, 30)), run(GpuSlice(B, 100, 100))]
    found = place(CARDS, runs, [], ask(3000, count=2, cores=80))
    assert isinstance(found, NoRoom)
    assert found.sentence.startswith("1 of 3 cards fit, 2 needed")
    assert found.per_card == (
        f"card 0, Tesla T4, {A}: 360 of 15360 MiB, 70 of 100 % and 9 of 10 slices free: too little memory free",
        f"card 1, Tesla T4, {B}: 15260 of 15360 MiB, 0 of 100 % and 9 of 10 slices free: "
        "taken by a command with 100 % of cores",
        f"card 2, Tesla T4, {C}: 15360 of 15360 MiB, 100 of 100 % and 10 of 10 slices free: suitable",
    )


def test_cards_that_an_earlier_request_waits_for_are_closed_to_later_ones() -> None:
    ahead = [Ticket(1, frozenset({A, B}))]
    assert uuids(place(CARDS, [], ahead, ask(100))) == [C]
    found = place(CARDS, [], ahead, ask(100, selector=CardSelector(use_uuids=(A,))))
    assert isinstance(found, NoRoom)
    assert found.sentence == "1 earlier request waits for these cards"
    assert found.per_card[0].endswith("reserved for an earlier request")


def test_a_card_is_acceptable_when_it_would_do_idle() -> None:
    assert acceptable(CARDS, ask(3000)) == {A, B, C}
    assert acceptable(CARDS, ask(3000, selector=CardSelector(use_uuids=(A, B), nouse_uuids=(B,)))) == {A}
    assert acceptable(CARDS, ask(20000)) == frozenset()
    assert acceptable(CARDS, ask(3000, count=4)) == frozenset()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("1", [B]),
        ("2,0", [C, A]),
        (f"{B},{A}", [B, A]),
        ("GPU-b", [B]),
        ("GPU-", []),
        ("0,7,1", [A]),
        ("0,0,1", [A]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_restricts_the_choice_as_the_driver_reads_it(setting: str, expected: list[str]) -> None:
    assert [card.uuid for card in visible(CARDS, setting)] == expected


@pytest.mark.parametrize(
    ("count", "selector", "expected"),
    [
        (3, CardSelector(), "2 cards can be used here, 3 needed"),
        (1, CardSelector(use_types=("H100",)), "0 of 2 cards are of an accepted model, 1 needed"),
        (1, CardSelector(use_uuids=("GPU-x",)), "0 of 2 cards have an accepted UUID, 1 needed"),
    ],
)
def test_a_refusal_speaks_of_this_machine_alone(count: int, selector: CardSelector, expected: str) -> None:
    cards = [Gpu(uuid, index, "Tesla T4", 15360) for index, uuid in enumerate(("GPU-a", "GPU-b"))]
    found = place(cards, [], [], Demand(GpuRequest(count=count, memory=100), selector))
    assert isinstance(found, NoRoom)
    assert found.sentence == expected
