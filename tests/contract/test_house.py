"""The layout of the house: layers, sizes, and one Python standard for all of it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("vgpu", "scheduler", "device_plugin")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MODULES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if not path.name.endswith(GENERATED)
]


def module_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_modules_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module begins with what it is for"


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("test_*.py")), ids=module_name)
def test_tests_stand_in_a_folder_of_their_kind(path: Path) -> None:
    assert path.relative_to(ROOT).parts[1] in ("unit", "contract", "native", "process")


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by base name."""
    found = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(found) == len(set(found))


def test_no_package_is_left_out_of_the_distribution() -> None:
    for package in PACKAGES:
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            assert (folder / "__init__.py").exists(), folder
