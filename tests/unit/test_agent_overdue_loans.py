"""Containers that do not give back what was lent to them."""

from pathlib import Path

from device_plugin.overdue_loans import OVERDUE_SECONDS, Debts, Overdue
from device_plugin.sandbox import Entry
from vgpu.tier import GRAIN

A, B = (Entry(f"uid-{name}", "main", Path(f"/uid-{name}_main")) for name in "ab")
LATE = OVERDUE_SECONDS + 1


def test_who_gives_nothing_back_is_found_again_and_again() -> None:
    debts = Debts()
    assert debts.once({(A, "x"): 9 * GRAIN}, 0) == []
    assert debts.once({(A, "x"): 9 * GRAIN}, OVERDUE_SECONDS) == []
    assert debts.once({(A, "x"): 9 * GRAIN}, LATE) == [Overdue(A, "x", 9 * GRAIN, again=False)]
    assert debts.once({(A, "x"): 10 * GRAIN}, 2 * LATE - 1) == []
    assert debts.once({(A, "x"): 10 * GRAIN}, 2 * LATE) == [Overdue(A, "x", 10 * GRAIN, again=True)]
    assert debts.once({(A, "x"): 0}, 2 * LATE) == []
    assert debts.once({(A, "x"): 9 * GRAIN}, 3 * LATE) == []
    assert debts.once({}, 4 * LATE) == []
    assert debts.once({(A, "x"): 9 * GRAIN}, 5 * LATE) == []


def test_who_gives_back_slowly_has_time() -> None:
    debts = Debts()
    for turn in range(9):
        assert debts.once({(A, "x"): (9 - turn) * GRAIN}, turn * LATE) == []
    assert debts.once({(A, "x"): GRAIN}, 9 * LATE) == [Overdue(A, "x", GRAIN, again=False)]


def test_the_one_that_has_most_of_a_card_is_found() -> None:
    debts = Debts()
    owed = {(B, "x"): 2 * GRAIN, (A, "x"): GRAIN, (A, "y"): 3 * GRAIN}
    assert debts.once(owed, 0) == []
    assert {(one.entry, one.card) for one in debts.once(owed, LATE)} == {(B, "x"), (A, "y")}
    assert debts.once({(A, "x"): GRAIN, (B, "x"): GRAIN // 2}, LATE + 1) == [Overdue(A, "x", GRAIN, again=False)]
