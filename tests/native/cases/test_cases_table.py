"""Every reported bug has its test, a second one of its kind, and a line in the documentation."""

import table


def test_every_case_has_a_test_and_another_of_its_kind() -> None:
    found = list(table.mentions())
    assert sorted(table.LISTED - {m.number for m in found if m.exact}) == []
    assert sorted(table.LISTED - {m.number for m in found if m.other}) == []


def test_no_case_is_unknown() -> None:
    assert {m.number for m in table.mentions()} <= table.LISTED | table.ELSEWHERE


def test_the_documentation_is_what_the_tests_say() -> None:
    assert table.PLACE.read_text() == table.text(), "run: python tests/native/cases/table.py"
