"""The floors of libvgpu/src: a folder includes and calls only what lies on lower ones."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "libvgpu/src"
#: from bottom to top; folders of one floor do not use each other. "": process.c
FLOORS = (
    ("base",),
    ("loader", "region"),
    ("ledger", "arbiter"),
    ("reserves",),
    ("gate",),
    ("tier", "pacer"),
    ("hooks",),
    ("",),
)
FLOOR = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}
#: what process.c fills in for the ledger when the library is linked
TABLES = {"vgpu_forgetters", "vgpu_reclaimers", "vgpu_above"}


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]


def upwards(edges: Iterator[tuple[str, str, str]]) -> list[str]:
    """The (file, file, why) edges that lead neither to the same folder nor to a lower floor."""
    return [
        f"{one} → {other}: {why}"
        for one, other, why in edges
        if folder_of(one) != folder_of(other) and FLOOR[folder_of(one)] <= FLOOR[folder_of(other)]
    ]


def includes() -> Iterator[tuple[str, str, str]]:
    for path in SOURCES.rglob("*.[ch]"):
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            if not name.startswith("vgpu/"):
                yield str(path.relative_to(SOURCES)), name, "include"


def calls() -> Iterator[tuple[str, str, str]]:
    """Calls between the objects of the last build."""
    newest: dict[str, Path] = {}
    for path in (ROOT / "build/native").glob("*/src/**/*.o"):
        source = Path(*path.relative_to(ROOT / "build/native").parts[2:]).with_suffix(".c")
        if (SOURCES / source).exists():
            newest[str(source)] = max(path, newest.get(str(source), path), key=lambda one: one.stat().st_mtime)
    defined: dict[str, str] = {}
    used: list[tuple[str, str]] = []
    for source, path in newest.items():
        listing = subprocess.run(["nm", "-P", path], capture_output=True, text=True, check=True).stdout
        for symbol, kind, *_ in (line.split() for line in listing.splitlines()):
            if kind == "U":
                used.append((source, symbol))
            elif kind.isupper():
                defined[symbol] = source
    assert "ledger/charge.c" in newest, "nothing is built"
    for source, symbol in used:
        is_hook = source == "loader/driver.c" and symbol.startswith(("cu", "nvml"))  # a function of the table hooks.def
        if symbol in defined and symbol not in TABLES and not is_hook:
            yield source, defined[symbol], symbol


def test_every_folder_has_a_floor() -> None:
    assert {str(path.parent.relative_to(SOURCES)).strip(".") for path in SOURCES.rglob("*.[ch]")} == FLOOR.keys()


def test_includes_lead_down() -> None:
    assert upwards(includes()) == []


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_calls_lead_down() -> None:
    assert upwards(calls()) == []


def test_what_leads_up_is_found() -> None:
    edges = [
        ("base/a.c", "ledger/b.h", "include"),
        ("tier/a.c", "pacer/b.c", "call"),
        ("pacer/a.c", "base/b.h", "include"),
    ]
    assert len(upwards(iter(edges))) == 2
