"""The results of checks. Pure."""

import re
from typing import Literal

import msgspec

Verdict = Literal["ok", "wrong", "unseen"]
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `unseen`: the check could not look, which is no fault of what it checks."""

    verdict: Verdict
    area: str  #: one word: webhook, certificate, …
    sentence: str
    todo: str = ""  #: what to do, where something is wrong or unseen

    def __str__(self) -> str:
        mark = {"ok": "ok", "wrong": "WRONG", "unseen": "?"}[self.verdict]
        return f"{mark:6}{self.area:13}{self.sentence}" + (f" -> {self.todo}" if self.todo else "")


def ok(area: str, sentence: str) -> Finding:
    return Finding("ok", area, sentence)


def wrong(area: str, sentence: str, todo: str) -> Finding:
    return Finding("wrong", area, sentence, todo)


def unseen(area: str, sentence: str, todo: str = "") -> Finding:
    return Finding("unseen", area, f"not checked: {sentence}", todo)


def minor(version: str) -> tuple[int, int] | None:
    """(1, 36) of "v1.36.3+k3s1", None where the text is no version."""
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else None


def some(names: list[str], most: int = 3) -> str:
    """The first few names, and the number of the remaining names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
