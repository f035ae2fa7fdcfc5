"""The layout of the code: layers, sizes, and one Python standard for all of it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("vgpu", "scheduler", "device_plugin")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
MODULES = [
    path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")) if not path.name.endswith(GENERATED)
]


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


def test_modules_are_small() -> None:
    assert [str(path) for path in MODULES if len(path.read_text().splitlines()) > 500] == []


def test_modules_begin_with_what_they_are_for() -> None:
    texts = {path: path.read_text() for path in MODULES}
    assert [str(path) for path, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))] == []


def test_the_simulated_driver_shares_no_code_with_the_library() -> None:
    """The card's count would prove nothing if the ledger's own code had counted it."""
    simulator = ROOT / "libvgpu/simulator"
    included = {
        name: path
        for path in simulator.rglob("*.[ch]")
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)
    }
    foreign = {name: str(path) for name, path in included.items() if not (simulator / name).exists()}
    assert foreign.keys() == {"vgpu/simulator.h"}  # the header by which others read the simulator's counts


def test_tests_stand_in_a_folder_of_their_kind() -> None:
    kinds = ("unit", "contract", "native", "process")
    found = (path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [str(path) for path in found if path.parts[0] not in kinds] == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by base name."""
    found = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(found) == len(set(found))


def test_no_package_is_left_out_of_the_distribution() -> None:
    for package in PACKAGES:
        for folder in {path.parent for path in (ROOT / package).rglob("*.py")}:
            assert (folder / "__init__.py").exists(), folder
