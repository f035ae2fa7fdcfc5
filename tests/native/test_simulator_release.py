"""The simulator of wheels and images: without the answer to the CUDA runtime's integrity check."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import Machine
from test_cuda_runtime import libcudart
from test_simulator_tables import KEY

from vgpu.native import paths

ROOT = Path(__file__).resolve().parents[2]
SWITCH = "SIM_RUNTIME_CHECK"
NOT_FOUND, NO_SYMBOL = 500, 500
BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, "libvgpu")
import build
with build.alone():
    build.build_simulator(Path(sys.argv[1]), runtime_check=False)
"""
#: what setup.py asks build.py for: in place, and for a wheel
SETUP = """
import runpy
import setuptools
from contextlib import nullcontext
from setuptools.command.build_ext import build_ext
given, asked = {}, []
setuptools.setup = lambda **arguments: given.update(arguments)
build_ext.run = build_ext.copy_tree = lambda *arguments: None
runpy.run_path("setup.py")
import build
build.alone = nullcontext
build.build_libraries = lambda lib, *, runtime_check: asked.append(runtime_check)
for inplace in (True, False):
    command = given["cmdclass"]["build_ext"](setuptools.Distribution())
    command.inplace, command.build_lib = inplace, "nowhere"
    command.run()
print(asked)
"""


def test_a_release_has_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=ROOT, check=True)
    machine = Machine(tmp_path / "cards")
    found = machine.run(
        "from table_client import *\nlib.cuInit(0)\n"
        "report([asked(RUNTIME_CHECK), asked(RUNTIME)[0], "
        f"ctypes.CDLL({str(libcudart())!r}).cudaGetDeviceCount(byref(c_int()))])",
        LD_LIBRARY_PATH=str(folder),
    )
    assert found == [[NOT_FOUND, None], 0, NO_SYMBOL]
    assert KEY not in (folder / "libcuda.so.1").read_bytes()
    assert KEY in (paths.simulator() / "libcuda.so.1").read_bytes()


@pytest.mark.parametrize(
    ("value", "when", "asked"), [("1", "", [True, False]), ("", "", [False, False]), ("1", "later", [False])]
)
def test_only_a_build_in_place_may_have_one(value: str, when: str, asked: list[bool]) -> None:
    """A wheel is always compiled, so that it never contains files from a developer's tree."""
    environment = os.environ | {SWITCH: value, "VGPU_BUILD": when}
    done = subprocess.run(
        [sys.executable, "-c", SETUP], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(asked)


def test_nothing_that_makes_a_release_asks_for_it() -> None:
    makers = [
        ROOT / "docker/Dockerfile",
        ROOT / "setup.cfg",
        ROOT / "pyproject.toml",
        *(ROOT / "release").rglob("*.py"),
    ]
    assert [str(path) for path in makers if SWITCH in path.read_text()] == []
    assert SWITCH in (ROOT / "Makefile").read_text()
