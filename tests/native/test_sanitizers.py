"""The C unit tests under the compilers' sanitizers and valgrind; `make sanitize` adds the fuzz target."""

import shutil
import subprocess
from pathlib import Path

import pytest
from ledger_programs import environment, program
from preloaded import HERE, compiled, run

from vgpu.native import CardLimit, Limits, Region

SANITIZERS = ("thread", "address,undefined")
SOURCES = HERE.parents[1] / "libvgpu/src"
#: C unit tests, with what they test
UNITS = {
    "pacer_units": ("pacer/bounds", "pacer/costs", "pacer/busy_intervals", "pacer/launch_sources"),
    "inspect_units": ("pacer/inspect",),
    "pacer_launch_units": (
        "pacer/settle",
        "pacer/costs",
        "pacer/busy_intervals",
        "pacer/launch_sources",
        "pacer/launch_thread",
        "pacer/owed",
        "pacer/firsts",
        "pacer/inspect",
    ),
    "arbiter_units": ("arbiter/busy",),
    "sizes_units": ("ledger/sizes",),
    "pools_units": ("reserves/pools",),
    "tier_free_units": ("tier/free", "tier/blocks", "tier/policy"),
    "tier_blocks_units": ("tier/blocks", "tier/memory", "tier/policy"),
}


def units(name: str, *flags: str) -> Path:
    """A compiled program of unit tests."""
    sources = (str(SOURCES / f"{source}.c") for source in UNITS[name])
    includes = (f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}")
    return compiled(f"../{name}.c", *includes, "-g", *flags, *sources, "-lm", output="-".join((name, *flags)))


@pytest.mark.parametrize("name", UNITS)
def test_unit_tests_are_clean(name: str) -> None:
    run([units(name, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")], environment({}))


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_valgrind_finds_nothing_in_unit_tests(name: str) -> None:
    run(["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", units(name)], environment({}))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_two_in_lock_step_are_clean(tmp_path: Path, sanitizer: str) -> None:
    with Region.create(tmp_path, Limits((CardLimit("GPU-a", 1 << 30),))):
        done = subprocess.run(
            [program("ledger_lockstep", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"), "300"],
            env=environment({"VGPU_DIR": str(tmp_path)}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("none 0 one 300 both 0")


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(tmp_path: Path) -> None:
    command = (program("ledger_hammer"), "1", "2", "500", "1000")
    with Region.create(tmp_path, Limits((CardLimit("GPU-a", 20_000),))):
        done = subprocess.run(
            ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", *command],
            env=environment({"VGPU_DIR": str(tmp_path)}),
            input="\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
