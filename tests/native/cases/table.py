"""Which test covers which reported bug, read from the tests' docstrings. Run as a program it writes docs/cases.md.

A docstring begins `Case 11: what goes wrong elsewhere`. A test of a different trigger of the same kind says
`Case 11, another of its kind: …`, one with both among its parameters `Case 11, and … as another of its kind: …`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[3]
PLACE = ROOT / "docs" / "cases.md"
CASE = re.compile(
    r"Cases? (?P<numbers>\d+(?:, \d+)*)(?P<and>, and .*)?(?P<other>(?:,| as) another of \w+ kind)?: (?P<text>.*)"
)
#: of oversubscription (59); 9, 14 and others of the numbering are no cases
ELSEWHERE = {59}
LISTED = {
    *range(1, 9), *range(10, 14), 15, 17, 18, 19, 21, 22, 23, 25, 26, 27, 29, *range(31, 40), 41, 42, *range(44, 56),
    57, 58, 60, 63, 64, *range(66, 73), 74, 75,
}  # fmt: skip
HEAD = """# Reported bugs of intercept libraries, and the tests that keep them out

Each case is a public bug report about a library that intercepts the calls of the CUDA driver. The numbers follow our
list of such reports. Each case has two tests: one with the reported trigger and the right answer, and one with a
different trigger of the same kind. Oversubscription has its own tests.

`python tests/native/cases/table.py` writes this page from the docstrings of the tests.

| case | what goes wrong elsewhere | test | another of its kind |
|---|---|---|---|
"""


class Mention(msgspec.Struct, frozen=True):
    """What one docstring says about one case."""

    number: int
    test: str  #: FILE::NAME below tests/
    exact: bool
    other: bool
    text: str


def mentions() -> Iterator[Mention]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or not said or not (match := CASE.match(said.split("\n\n")[0])):
                continue
            both = bool(match["and"])
            other = both or bool(match["other"])
            test = f"{path.relative_to(ROOT / 'tests')}::{node.name}"
            for number in match["numbers"].split(", "):
                yield Mention(int(number), test, both or not other, other, match["text"])


def text() -> str:
    found = sorted(mentions(), key=lambda m: (m.number, m.test))
    rows = []
    for number in sorted({m.number for m in found}):
        of_this = [m for m in found if m.number == number]
        what = next((m.text for m in of_this if m.exact), of_this[0].text)
        columns = [
            "<br>".join(f"`{m.test}`" for m in of_this if getattr(m, kind)) or "–" for kind in ("exact", "other")
        ]
        rows.append(f"| {number} | {what} | {columns[0]} | {columns[1]} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PLACE.write_text(text())
