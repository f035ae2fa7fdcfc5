"""The inventory by real NVML calls, in separate processes, because a loaded NVML stays loaded."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vgpu.devices import Inventory, decode_inventory, encode_inventory


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("VGPU_", "NVIDIA_", "LD_"))}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, env=env, timeout=60
    )


READ = """
import sys
from pathlib import Path
from vgpu import inventory
from vgpu.devices import encode_inventory
inventory.use_simulator(sys.argv[1], Path(sys.argv[2]))
print(encode_inventory(inventory.read(split=int(sys.argv[3]), core_scaling=0.5)))
"""


def read(spec: str, state: Path, split: int = 10) -> Inventory:
    done = python(READ, spec, str(state), str(split))
    assert done.returncode == 0, done.stderr
    return decode_inventory(done.stdout)


def test_cards_of_the_simulator_without_any_environment(tmp_path: Path) -> None:
    found = read("T4x2", tmp_path / "state", split=7)
    assert [gpu.index for gpu in found.devices] == [0, 1]
    for gpu in found.devices:
        assert gpu.uuid.startswith("GPU-")
        assert "T4" in gpu.model
        assert gpu.physical == 14912  # of 15360 MiB: the driver keeps the rest
        assert (gpu.memory, gpu.slots, gpu.cores) == (14912, 7, 50)
        assert gpu.pci
    assert found.devices[0].links == {found.devices[1].uuid: "SYS"}
    assert found.driver.count(".") == 2
    assert found.cuda.count(".") == 1


SILENT = """
import sys
from pathlib import Path
import pynvml
from vgpu import inventory
from vgpu.devices import encode_inventory
inventory.use_simulator("T4x3", Path(sys.argv[1]))
handle, name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetName
silent = [0]
def handle_but(index):
    if index in silent:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    return handle(index)
def name_but(card):
    if pynvml.nvmlDeviceGetIndex(card) == 1:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    return name(card)
pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetName = handle_but, name_but
print(encode_inventory(inventory.read()))
silent.append(2)
inventory.read()
"""


def test_cards_that_do_not_answer_are_left_out_until_none_is_left(tmp_path: Path) -> None:
    done = python(SILENT, str(tmp_path / "state"))
    (left,) = decode_inventory(done.stdout).devices
    assert (left.index, left.links) == (2, {})
    assert "card 0 does not answer the driver" in done.stderr
    assert done.stderr.rstrip().endswith("InventoryError: the NVIDIA driver failed to list its cards: GPU is lost")


def levels(found: Inventory) -> list[str]:
    """How the first card is connected to each other card, in their order."""
    return [found.devices[0].links[gpu.uuid] for gpu in found.devices[1:]]


def test_how_cards_lie_to_each_other(tmp_path: Path) -> None:
    pcie, nvlink = read("T4x8", tmp_path / "pcie"), read("H100x4", tmp_path / "nvlink")
    assert levels(pcie) == ["PIX", "NODE", "NODE", *["SYS"] * 4]
    assert levels(nvlink) == ["NVLINK"] * 3
    assert [gpu.numa for gpu in pcie.devices] == [0] * 4 + [1] * 4
    assert len({gpu.pci for gpu in pcie.devices}) == 8
    for found in (pcie, nvlink):
        back = [gpu.links[found.devices[0].uuid] for gpu in found.devices[1:]]
        assert back == levels(found)
    assert [gpu.mig for gpu in (*pcie.devices, *nvlink.devices)] == [False] * 8 + [True] * 4
    assert len(encode_inventory(pcie)) < 8192  # of the 256 KiB that all annotations of a node may take


def test_a_card_in_mig_mode_is_named_and_not_shared(tmp_path: Path) -> None:
    found = read("A100-40-1g.5gb", tmp_path / "state")
    assert found.devices == ()
    (uuid,) = found.mig
    assert uuid.startswith("GPU-")


def test_the_same_state_has_the_same_cards(tmp_path: Path) -> None:
    assert read("H100x3", tmp_path / "state") == read("H100x3", tmp_path / "state")
    assert read("H100x3", tmp_path / "other") != read("H100x3", tmp_path / "state")


def test_programs_of_every_user_can_join_the_simulated_cards(tmp_path: Path) -> None:
    read("T4", tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o7777 == 0o1777


def test_an_unknown_profile_is_named(tmp_path: Path) -> None:
    done = python(READ, "T5x2", str(tmp_path), "1", "1")
    assert done.returncode != 0
    assert "ValueError" in done.stderr
    assert "T5" in done.stderr.splitlines()[-1]


def test_readings_see_who_uses_a_card(tmp_path: Path) -> None:
    script = """
import ctypes, os, sys
from pathlib import Path
from vgpu import inventory
from vgpu.native import paths
inventory.use_simulator("T4", Path(sys.argv[1]))
idle = inventory.readings()
cuda = ctypes.CDLL(str(paths.simulator() / "libcuda.so.1"))
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 30)) == 0
busy = inventory.readings()
print([busy[uuid].used - idle[uuid].used for uuid in idle], [r.minor for r in busy.values()])
"""
    done = python(script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    used, minors = msgspec.json.decode("[" + done.stdout.replace("] [", "], [") + "]")
    assert used[0] >= 1 << 30
    assert minors == [0]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_without_a_driver_the_reason_is_a_sentence() -> None:
    done = python("from vgpu import inventory\ntry:\n inventory.read()\nexcept inventory.InventoryError as e: print(e)")
    assert "no NVIDIA driver on this machine" in done.stdout
