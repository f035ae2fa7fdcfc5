"""How the time of one card is divided: the arbiter's pure part."""

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from vgpu.native.binding import load

FIXED, ELASTIC, NONE = range(3)
HIGH, LOW = range(2)
FLOOR = 2  #: share of low priority next to high priority


class View(msgspec.Struct):
    cores: int = 0
    active: bool = True
    demand: int = 100
    ceiling: int = 0
    policy: int = ELASTIC
    priority: int = HIGH


class Answer(msgspec.Struct, frozen=True):
    share: int
    yield_: int
    neighbours: int


def divide(*views: View) -> list[Answer]:
    ffi, lib = load()
    raw: Any = ffi.new("struct vgpu_arbiter_view[]", len(views))
    for one, view in zip(raw, views, strict=True):
        for name, value in msgspec.structs.asdict(view).items():
            setattr(one, name, value)
    lib.vgpu_arbiter_shares(raw, len(views))
    return [Answer(one.share, getattr(one, "yield"), one.neighbours) for one in raw]


def shares(*views: View) -> list[int]:
    return [answer.share for answer in divide(*views)]


def idle(cores: int, **rest: Any) -> View:
    return View(cores, active=False, **rest)


def test_alone_an_elastic_container_has_the_card() -> None:
    assert shares(View(30)) == [100]
    assert shares(View(30, ceiling=60)) == [60]
    assert shares(View(0)) == [100]
    assert shares(View(30, ceiling=10)) == [30]  # a ceiling never takes from the guarantee


def test_what_an_idle_neighbour_leaves_is_divided_by_weight() -> None:
    assert shares(View(20), View(30), View(50)) == [20, 30, 50]
    assert shares(View(20), View(30), idle(50))[:2] == [40, 60]
    assert shares(View(0), View(0), idle(50))[:2] == [50, 50]
    assert shares(View(20, ceiling=25), View(30), idle(50))[:2] == [25, 75]
    assert shares(View(20, policy=FIXED), View(30), idle(50))[:2] == [20, 80]


def test_an_idle_container_finds_its_share_ready() -> None:
    assert shares(View(20), View(30), idle(50))[2] == 50
    assert shares(idle(20), idle(30)) == [100, 100]
    assert shares(View(70), idle(30), View(0))[1] >= 30


def test_what_a_container_leaves_unused_is_lent() -> None:
    assert shares(View(70, demand=10), View(30)) == [70, 90]
    assert shares(View(70, demand=100), View(30)) == [70, 30]


def test_unlimited_neighbours_count_as_they_may() -> None:
    assert shares(View(50), View(50, policy=NONE))[0] == 50
    assert shares(View(50), View(0, policy=FIXED))[0] == 99  # no guarantee: the smallest weight there is


def test_low_priority_yields_to_high_priority_with_work() -> None:
    high, low = divide(View(30), View(50, priority=LOW))
    assert (high.share, high.yield_, low.share, low.yield_) == (98, 0, FLOOR, 1)
    high, low = divide(idle(30), View(50, priority=LOW))
    assert (low.share, low.yield_) == (100, 0)
    assert divide(View(50, priority=LOW), View(50, priority=LOW))[0] == Answer(50, 0, 1)
    assert divide(View(50, policy=FIXED, priority=LOW), View(50, policy=FIXED))[0].yield_ == 1


def test_neighbours_are_others_with_work() -> None:
    assert [a.neighbours for a in divide(View(10), View(10), idle(10))] == [1, 1, 2]


def test_guarantees_above_the_card_are_kept() -> None:
    assert shares(View(80), View(60)) == [80, 60]


views = st.builds(
    View,
    cores=st.integers(0, 100),
    active=st.booleans(),
    demand=st.integers(0, 100),
    ceiling=st.integers(0, 100),
    policy=st.sampled_from([FIXED, ELASTIC, NONE]),
    priority=st.sampled_from([HIGH, LOW]),
)


def most(view: View) -> int:
    """The largest share that the container may ever have."""
    if view.policy == ELASTIC:
        return max(view.ceiling or 100, view.cores)
    return view.cores if view.policy == FIXED and view.cores else 100


@settings(deadline=None)  # the first example loads the compiled part
@given(st.lists(views, min_size=1, max_size=12))
def test_rules_that_always_hold(given_: list[View]) -> None:
    answers = divide(*given_)
    high = any(view.active and view.priority == HIGH for view in given_)
    takers = []
    for view, answer in zip(given_, answers, strict=True):
        yields = view.priority == LOW and high
        assert answer.yield_ == yields
        assert answer.share >= (min(view.cores, FLOOR) if yields else view.cores)
        assert 1 <= answer.share <= max(1, min(most(view), FLOOR) if yields else most(view))
        if view.active:
            takers.append((answer, min(answer.share, view.demand), view.cores))
    # together they use no more than the card has, unless more than that is guaranteed
    guaranteed = sum(min(used, cores) for _, used, cores in takers)
    assert sum(used for _, used, _ in takers) <= max(100, guaranteed) + sum(
        answer.share == 1 for answer, _, _ in takers
    )


@settings(deadline=None)  # the first example loads the compiled part
@given(st.lists(views, min_size=1, max_size=12))
def test_nothing_is_left_while_somebody_wants_more(given_: list[View]) -> None:
    eager = [msgspec.structs.replace(view, active=True, demand=100, priority=HIGH) for view in given_]
    answers = divide(*eager)
    wanting = [view for view, answer in zip(eager, answers, strict=True) if answer.share < most(view)]
    assert not wanting or sum(answer.share for answer in answers) >= 100 - len(eager)
