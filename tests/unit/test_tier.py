"""How much host memory stands behind cards, and how cards and host memory are shared."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu import config, tier
from vgpu.allocation import excess, of_slices
from vgpu.devices import Gpu, GpuSlice
from vgpu.placement import policies
from vgpu.placement.fit import CardState, Rejection, fit_container
from vgpu.resources import CardSelector, GpuRequest
from vgpu.tier import GRAIN, MIB, Need, Scaling, Want

AMOUNTS = st.integers(0, 2**40)


def cards(*models: str, physical: int = 15000) -> list[Gpu]:
    return [Gpu(f"GPU-{index}", index, model, physical) for index, model in enumerate(models)]


@pytest.mark.parametrize(
    ("scaling", "backed", "memory"),
    [
        (Scaling(), True, [15000, 15000]),
        (Scaling(2.0, host_memory=64000), True, [30000, 30000]),
        (Scaling(2.0, host_memory=64000), False, [15000, 15000]),
        (Scaling(2.0), True, [15000, 15000]),
        (Scaling(2.0, host_memory=10000), True, [20000, 20000]),  # as much as there is behind each of them
        (Scaling(0.5, host_memory=10000), True, [7500, 7500]),
        (Scaling(0.5), False, [7500, 7500]),
        (Scaling(1.0, {"a100*": 1.5}, 64000), True, [15000, 15000]),
        (Scaling(1.0, {"T4": 2, "*T4": 1.5}, 64000), True, [22500, 22500]),  # the longer pattern
    ],
)
def test_no_card_is_scaled_beyond_what_is_behind_it(scaling: Scaling, backed: bool, memory: list[int]) -> None:
    found = tier.scaled(cards("Tesla T4", "Tesla T4"), scaling, backed=backed)
    assert [gpu.memory for gpu in found] == memory
    assert [gpu.physical_memory for gpu in found] == [15000, 15000]


def test_host_memory_is_divided_among_the_cards_that_are_scaled_up() -> None:
    found = tier.scaled(cards("Tesla T4", "NVIDIA A100"), Scaling(1.0, {"A100": 3}, 10000), backed=True)
    assert [gpu.memory for gpu in found] == [15000, 25000]


@pytest.mark.parametrize(
    ("behind", "memory"),
    [
        ({"GPU-0": 5000, "GPU-1": 100}, [20000, 20000]),  # within their parts
        ({"GPU-0": 8000}, [17000, 17000]),  # of 10000, which was more before
        ({"GPU-0": 8000, "gone": 1500}, [15500, 15500]),
        ({"GPU-0": 7000, "GPU-1": 4000}, [15000, 15000]),
        ({"GPU-0": 20000}, [15000, 15000]),
    ],
)
def test_what_is_held_behind_one_card_is_not_given_behind_another(behind: dict[str, int], memory: list[int]) -> None:
    found = tier.scaled(cards("T4", "T4"), Scaling(2.0, host_memory=10000), backed=True, behind=behind)
    assert [gpu.memory for gpu in found] == memory
    flat = tier.scaled(cards("T4", "T4"), Scaling(2.0, host_memory=10000), backed=False, behind=behind)
    assert [gpu.memory for gpu in flat] == [15000, 15000]


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1, 1.2, 2, 3]), st.integers(0, 40000)), min_size=1, max_size=6),
    st.integers(0, 100000),
    st.integers(0, 5000),
)
def test_what_is_given_and_what_is_held_is_never_more_than_there_is(
    each: list[tuple[float, int]], host: int, gone: int
) -> None:
    scaling = Scaling(1.0, {f"m{at}": factor for at, (factor, _) in enumerate(each)}, host)
    gpus = cards(*(f"m{at}" for at in range(len(each))))
    behind = {"gone": gone, **{gpu.uuid: held for gpu, (_, held) in zip(gpus, each, strict=True)}}
    parts = {
        gpu.uuid: max(0, gpu.memory - gpu.physical_memory)
        for gpu in tier.scaled(gpus, scaling, backed=True, behind=behind)
    }
    promised = sum(max(parts.get(uuid, 0), held) for uuid, held in behind.items())
    assert promised <= max(host, sum(behind.values()))
    before = {gpu.uuid: gpu.memory for gpu in tier.scaled(gpus, scaling, backed=True)}
    assert all(part <= before[uuid] for uuid, part in parts.items())


def test_what_an_earlier_agent_published_is_scaled_from_the_card_itself() -> None:
    before = Gpu("GPU-0", 0, "T4", memory=45000, physical=15000)
    assert [gpu.memory for gpu in tier.scaled([before], Scaling(2.0, host_memory=99999), backed=True)] == [30000]


@pytest.mark.parametrize(
    ("scaling", "kept", "said"),
    [
        (Scaling(), 0, ""),
        (Scaling(host_memory=1000), 0, ""),  # nothing is scaled up
        (Scaling(2.0), 8000, "is not scaled by 2: devicePlugin.hostMemory"),
        (Scaling(1.5, host_memory=8000), 8000, ""),
        (Scaling(1.5, host_memory=8000), 7000, "not scaled by 1.5: 8000 MiB .* keeps 7000 MiB .* by 1000 MiB"),
        (Scaling(1.0, {"T4": 2.0}, 8000), 0, "not scaled by 2"),
    ],
)
def test_why_memory_is_not_scaled(scaling: Scaling, kept: int, said: str) -> None:
    found = tier.unbacked(cards("Tesla T4"), scaling, 64000 * MIB, (64000 - kept) * MIB)
    assert bool(found) == bool(said)
    assert re.search(said, found)


@given(st.lists(st.tuples(AMOUNTS, st.integers(1, 8), AMOUNTS, AMOUNTS), max_size=8), AMOUNTS)
def test_budgets_cover_every_need_and_no_more_than_there_is(needs: list[tuple[int, int, int, int]], total: int) -> None:
    asked = {at: Need(need, cards, lack, used, used) for at, (need, cards, lack, used) in enumerate(needs)}
    found = tier.budgets(total, asked)
    assert all(found[at] >= need.bytes for at, need in asked.items())
    needed = sum(need.bytes * need.cards for need in asked.values())
    lacking = sum(need.lack * need.cards for need in asked.values())
    assert sum(found[at] * need.cards for at, need in asked.items()) <= max(total, needed) + lacking


def test_what_is_left_of_the_host_memory_goes_to_all_alike() -> None:
    found = tier.budgets(100 * GRAIN, {"a": Need(10 * GRAIN, 1), "b": Need(20 * GRAIN, 2)})
    assert found == {"a": 10 * GRAIN + 50 // 3 * GRAIN, "b": 20 * GRAIN + 50 // 3 * GRAIN}


@pytest.mark.parametrize(
    ("lacks", "budget"),
    [
        (Need(10, lack=7), 17),
        (Need(10, lack=700), 18),  # 2 of 20 are taken
        (Need(10, lack=700, used=5, sum=5), 18),
        (Need(10, lack=8, used=5, sum=5), 18),
        (
            Need(10, lack=3, used=15, sum=15),
            13,
        ),  # the card has given what it lacked; what it has in host memory it keeps
        (Need(5, 2, lack=700, used=3, sum=4), 10),  # on each of two cards, of 14
    ],
)
def test_what_is_guaranteed_and_not_there_may_take_what_nobody_has_taken(lacks: Need, budget: int) -> None:
    assert tier.budgets(20, {"has": Need(10, used=2, sum=2), "lacks": lacks}) == {"has": 10, "lacks": budget}


@given(AMOUNTS, st.lists(st.tuples(AMOUNTS, AMOUNTS).map(sorted), max_size=8))
def test_loans_never_pass_the_room_nor_what_is_wanted(free: int, wants: list[list[int]]) -> None:
    asked = {at: Want(*want) for at, want in enumerate(wants)}
    found = tier.loans(free, asked)
    assert sum(found.values()) <= free
    assert all(0 <= found[at] <= want.most for at, want in asked.items())
    if asked and free >= sum(want.most for want in asked.values()):
        assert all(found[at] == want.most // GRAIN * GRAIN for at, want in asked.items())


def test_who_has_allocated_more_comes_before_who_might() -> None:
    wants = {"busy": Want(8 * GRAIN, 100 * GRAIN), "idle": Want(0, 100 * GRAIN)}
    assert tier.loans(8 * GRAIN, wants) == {"busy": 8 * GRAIN, "idle": 0}
    assert tier.loans(10 * GRAIN, wants) == {"busy": 9 * GRAIN, "idle": GRAIN}


def test_the_reserve_of_a_card_is_lent_to_nobody() -> None:
    assert tier.room(6400, 0) == 6300
    assert tier.room(6400, 6000, 200) == 100
    assert tier.room(6400, 6400) == 0


def test_what_was_lent_is_owed_as_far_as_others_are_sure_to_need_it() -> None:
    assert tier.owed(6400, 6000, 400) == 0
    assert tier.owed(6400, 6000, 401) == 1
    assert tier.owed(6400, 6000, 400, 100) == 100
    assert tier.owed(6400, 6400, 100, 100) == 0, "contexts and modules, for which there is the reserve, stay"
    assert tier.owed(6400, 6400, 101) == 1


def test_no_more_is_behind_a_card_than_there_is_also_when_that_was_more_before() -> None:
    scaled = Gpu("GPU-0", 0, "T4", memory=20000, physical=15000)
    before = of_slices([GpuSlice("GPU-0", 9000, phys=4500)])
    late = of_slices([GpuSlice("GPU-0", 2000, phys=1400)])
    assert excess({"GPU-0": scaled}, before, late) == (
        "card 0 (T4, GPU-0) has 5000 MiB of host memory, 4500 held by other pods: 600 more do not fit"
    )
    assert excess({"GPU-0": scaled}, before, late, known=True) is None
    found = fit_container(
        [CardState(scaled, before["GPU-0"])], GpuRequest(1, 2100), CardSelector(), policies()["spread"]
    )
    assert isinstance(found, Rejection)
    whole = of_slices([GpuSlice("GPU-0", 2000)])
    assert excess({"GPU-0": scaled}, before, whole) is None


def test_who_has_a_card_alone_has_all_of_it() -> None:
    scaled = Gpu("GPU-0", 0, "T4", memory=30000, physical=15000)
    for memory, guarantee in {14000: 14000, 20000: 15000}.items():
        found = fit_container([CardState(scaled)], GpuRequest(1, memory, 0, 100), CardSelector(), policies()["spread"])
        assert not isinstance(found, Rejection)
        assert (found[0].mem, found[0].guarantee) == (memory, guarantee)


PIECES = st.lists(st.tuples(st.integers(1, 40000), st.booleans(), st.sampled_from([0, 25, 100])), max_size=12)


@given(
    PIECES,
    st.integers(1000, 30000),
    st.floats(1.0, 4.0),
    st.integers(0, 100000),
)
def test_whatever_is_asked_limits_guarantees_and_host_memory_hold(
    pieces: list[tuple[int, bool, int]], physical: int, factor: float, host: int
) -> None:
    """The scheduler's rules and the guard of the agent, one slice after the other on a card that is scaled up."""
    (gpu,) = tier.scaled(cards("T4", physical=physical), Scaling(factor, host_memory=host), backed=True)
    held = of_slices(())
    slices: list[GpuSlice] = []
    for memory, oversubscribe, percent in pieces:
        request = GpuRequest(1, 0 if percent else memory, percent or 100)
        state = CardState(gpu, held.get(gpu.uuid, CardState(gpu).held))
        found = fit_container([state], request, CardSelector(), policies()["spread"], oversubscribe=oversubscribe)
        if isinstance(found, Rejection):
            continue
        assert excess({gpu.uuid: gpu}, held, of_slices(found)) is None
        slices += found
        held = of_slices(slices)
        assert all(piece.mem == physical * percent // 100 for piece in found if percent)
        assert all(piece.guarantee == piece.mem for piece in found if not oversubscribe)
    assert sum(piece.mem for piece in slices) <= gpu.memory
    assert sum(piece.guarantee for piece in slices) <= physical
    behind = sum(piece.mem - piece.guarantee for piece in slices)
    assert behind <= min(host, int(physical * (factor - 1)))


def test_the_configuration_of_a_node() -> None:
    text = """
    devicePlugin:
      deviceMemoryScaling: 1.5
      hostMemory: 64Gi
      nodeOverrides:
        big-*: {hostMemory: 300000, memoryMode: movable}
        big-2: {deviceMemoryScaling: 3}
        "*-old": {deviceMemoryScaling: 1, deviceMemoryScalingByModel: {T4: 2}, hostMemory: 1G}
    """
    found = config.decode(text)
    assert tier.wanted(config.for_node(found, "other")) == Scaling(1.5, {}, 65536)
    assert tier.wanted(config.for_node(found, "big-1")) == Scaling(1.5, {}, 300000)
    assert tier.wanted(config.for_node(found, "big-2")) == Scaling(3, {}, 65536)
    assert tier.wanted(config.for_node(found, "very-old")) == Scaling(1, {"T4": 2}, 953)
    modes = [config.for_node(found, name).device_plugin.memoryMode for name in ("big-1", "big-2")]
    assert modes == ["movable", "static"]
