"""When a card is asked, what its vitals say, and when it is taken back."""

import pytest

from device_plugin.recovery import PROBE_SECONDS, RELAPSE_SECONDS, Recovery
from device_plugin.vitals import HOT_SECONDS, Judge, Vitals

QUIET = 300.0


def test_a_card_comes_back_when_it_was_quiet_for_long_enough() -> None:
    recovery = Recovery(QUIET)
    assert not recovery.ill("a")
    assert not recovery.recovered("a", 0)
    recovery.trouble("a", 0)
    assert recovery.ill("a")
    recovery.trouble("a", 100)  # another sign: the time begins again
    assert not recovery.recovered("a", 100 + QUIET - 1)
    assert recovery.recovered("a", 100 + QUIET)
    recovery.take_back("a", 100 + QUIET)
    assert not recovery.ill("a")


def test_a_relapse_doubles_the_time_up_to_a_bound() -> None:
    recovery = Recovery(QUIET)
    now, waits = 0.0, []
    for _ in range(6):
        recovery.trouble("a", now)
        began = now
        while not recovery.recovered("a", now):
            now += 1
        recovery.take_back("a", now)
        waits.append((now - began) / QUIET)
        now += 1
    assert waits == [1, 2, 4, 8, 8, 8]
    now += RELAPSE_SECONDS
    recovery.trouble("a", now)  # so long after, it counts as the first time
    assert recovery.recovered("a", now + QUIET)


def test_whoever_repairs_a_card_takes_its_past_away() -> None:
    recovery = Recovery(QUIET)
    for now in (0.0, 1.0, 2.0):
        recovery.trouble("a", now)
        recovery.take_back("a", now)
    recovery.trouble("a", 3)
    recovery.forgive("a", 4)
    assert not recovery.ill("a")
    recovery.trouble("a", 5)
    assert recovery.recovered("a", 5 + QUIET)


def test_without_a_time_no_card_comes_back_by_itself() -> None:
    recovery = Recovery(0)
    recovery.trouble("a", 0)
    assert not recovery.recovered("a", 1e9)


def test_a_card_that_does_not_answer_is_asked_ever_less_often() -> None:
    recovery = Recovery(QUIET)
    now, pauses = 0.0, []
    for count in range(1, 9):
        assert recovery.due("a", now)
        assert recovery.silent("a", now) == count
        began = now
        while not recovery.due("a", now):
            now += 0.5
        pauses.append(now - began)
    assert pauses[:5] == [1, 2, 4, 8, 16]
    assert set(pauses[5:]) == {PROBE_SECONDS[1]}
    recovery.answered("a")
    assert recovery.due("a", now)
    assert recovery.silent("a", now) == 1


def test_a_memory_error_counts_when_it_is_new() -> None:
    judge = Judge()
    assert judge.trouble("a", Vitals(uncorrected=7), 0) == ""  # from before the agent
    assert judge.trouble("a", Vitals(uncorrected=7), 1) == ""
    assert "ECC" in judge.trouble("a", Vitals(uncorrected=8), 2)
    assert judge.trouble("a", Vitals(uncorrected=8), 3) == ""
    assert judge.trouble("a", Vitals(uncorrected=0), 4) == ""  # the card was reset
    assert "ECC" in judge.trouble("a", Vitals(uncorrected=1), 5)


def test_a_card_has_to_be_hot_for_a_while() -> None:
    judge = Judge()
    hot, cool = Vitals(temperature=95, slowdown=93), Vitals(temperature=92, slowdown=93)
    assert judge.trouble("a", hot, 0) == ""
    assert judge.trouble("a", cool, HOT_SECONDS - 1) == ""
    assert judge.trouble("a", hot, HOT_SECONDS) == ""
    assert judge.trouble("a", hot, 2 * HOT_SECONDS - 1) == ""
    assert "93 °C" in judge.trouble("a", hot, 2 * HOT_SECONDS)
    assert judge.trouble("b", hot, 2 * HOT_SECONDS) == ""  # another card


@pytest.mark.parametrize("seen", [Vitals(), Vitals(temperature=95), Vitals(slowdown=1)])
def test_what_a_card_does_not_tell_says_nothing_against_it(seen: Vitals) -> None:
    judge = Judge()
    assert [judge.trouble("a", seen, now) for now in (0, 1000)] == ["", ""]


def test_a_card_whose_memory_cannot_be_mended_is_out() -> None:
    assert "replace the card" in Judge().trouble("a", Vitals(remapping_failed=True), 0)
