"""The compiled module: loaded late, reported with a sentence when missing; and the paths of installed files."""

import subprocess
import sys
from pathlib import Path

import pytest
from ledger_programs import MIB, Client

from vgpu.native import CardLimit, CardUsage, Limits, Region, paths


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_nothing_compiled_is_loaded_before_it_is_needed() -> None:
    code = "import sys, vgpu, vgpu.native, vgpu.native.paths; print('vgpu.native._region' in sys.modules)"
    assert run(code) == "False\n"


def test_a_binding_that_was_not_built_is_missed_with_what_to_run() -> None:
    code = """
import sys
from pathlib import Path
from vgpu.native import Region
sys.modules["vgpu.native._region"] = None
try:
    Region.open(Path("/"))
except ImportError as error:
    print(error)
"""
    assert run(code).startswith("cannot load vgpu's compiled part (")
    assert run(code).endswith("): run `make build`\n")


def test_the_binding_needs_no_driver() -> None:
    (module,) = Path(paths.__file__).parent.glob("_region*.so")
    needed = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, check=True).stdout
    assert "libc.so" in needed
    assert "cuda" not in needed
    assert "nvidia" not in needed


def test_installed_places() -> None:
    assert paths.libvgpu().name == "libvgpu.so"
    assert (paths.simulator() / "libnvidia-ml.so.1").is_file()
    assert (paths.include() / "vgpu" / "agent.h").is_file()


def test_places_that_are_not_built_say_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_LIB", tmp_path)
    for place in (paths.libvgpu, paths.simulator, paths.include):
        with pytest.raises(FileNotFoundError, match=r"is not built .* is missing.: run `make build`"):
            place()


def test_usage_has_one_entry_per_card_of_the_limits(tmp_path: Path) -> None:
    with Region.create(tmp_path, Limits((CardLimit("GPU-a", None), CardLimit("GPU-b", None)))) as region:
        assert region.usage().cards == (CardUsage(), CardUsage())
        with Client({"VGPU_DIR": str(tmp_path)}) as client:
            client.charge("1m", 1)
            client.charge("2m", 1)
            client.ask("kind 1 3 77")
            usage = region.usage()
            (process,) = usage.processes
            assert process.pid == client.pid
            assert process.start_time == start_time(client.pid)
            assert process.pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
            assert process.used == (0, 3 * MIB)
            assert [kinds["array"] for kinds in process.by_kind] == [0, 77]
            assert [(card.used, card.processes, card.by_kind["array"]) for card in usage.cards] == [
                (0, 0, 0),
                (3 * MIB, 1, 77),
            ]


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
