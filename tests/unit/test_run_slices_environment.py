"""The environment of the command of `vgpu run`."""

from pathlib import Path
from typing import Any

import pytest

from vgpu.devices import Gpu, GpuSlice, Inventory
from vgpu.errors import UserError
from vgpu.workstation.environment import countable, environment

LIBRARY = Path("/opt/vgpu/libvgpu.so")
REGION = Path("/run/vgpu/local/slices/abc")
SLICES = [GpuSlice("GPU-a", 3000, 30), GpuSlice("GPU-b", 3000, 30)]


def build(base: dict[str, str] | None = None, **more: Any) -> dict[str, str]:
    return environment(base or {}, SLICES, region=REGION, library=LIBRARY, **more)


def test_the_cards_their_limits_and_the_region() -> None:
    assert build() == {
        "LD_PRELOAD": "/opt/vgpu/libvgpu.so",
        "VGPU_DIR": "/run/vgpu/local/slices/abc",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "3000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
    }


def test_a_slice_without_core_limit_states_none() -> None:
    found = environment({}, [GpuSlice("GPU-a", 3000)], region=REGION, library=LIBRARY)
    assert "CUDA_DEVICE_SM_LIMIT" not in found


def test_priority() -> None:
    assert build(priority=1)["CUDA_TASK_PRIORITY"] == "1"
    assert build(priority=0)["CUDA_TASK_PRIORITY"] == "0"


def test_what_is_there_stays_and_preloaded_libraries_come_after_ours() -> None:
    found = build({"HOME": "/root", "LD_PRELOAD": "/lib/libjemalloc.so", "LD_LIBRARY_PATH": "/opt/x"})
    assert found["HOME"] == "/root"
    assert found["LD_PRELOAD"] == "/opt/vgpu/libvgpu.so:/lib/libjemalloc.so"
    assert found["LD_LIBRARY_PATH"] == "/opt/x"


def test_limits_of_an_outer_scope_are_dropped() -> None:
    outer = {"CUDA_DEVICE_MEMORY_LIMIT": "1g", "CUDA_DEVICE_MEMORY_LIMIT_7": "1g", "CUDA_TASK_PRIORITY": "1"}
    assert build(outer) == build()


def test_simulated_cards_need_the_simulators_libraries_and_state() -> None:
    base = {"LD_LIBRARY_PATH": "/opt/x", "VGPU_SIMULATE": "H100x8"}
    found = build(base, simulator=(Path("/opt/vgpu/simulator"), Path("/tmp/state")))
    assert found["LD_LIBRARY_PATH"] == "/opt/vgpu/simulator:/opt/x"
    assert found["VGPU_SIM_DIR"] == "/tmp/state"
    assert "VGPU_SIMULATE" not in found


@pytest.mark.parametrize("bad", ["/opt/my programs/libvgpu.so", "/opt/a:b/libvgpu.so", "/opt/$x/libvgpu.so"])
def test_a_path_that_ld_preload_cannot_carry_is_refused_instead_of_running_without_limits(bad: str) -> None:
    with pytest.raises(UserError, match="a space, a colon or a dollar sign"):
        environment({}, SLICES, region=REGION, library=Path(bad))


def test_cards_are_named_by_number_where_cuda_counts_as_nvml_does() -> None:
    found = build({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, indices=[0, 3])
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("0,3", "PCI_BUS_ID")


def on_bus(*addresses: str) -> tuple[Gpu, ...]:
    return tuple(Gpu(f"GPU-{at}", at, "Tesla T4", 15360, pci=pci) for at, pci in enumerate(addresses))


TWO = on_bus("00000000:3B:00.0", "00000000:AF:00.0")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Inventory(devices=TWO), True),
        (Inventory(devices=on_bus("00000000:AF:00.0", "00000001:3B:00.0")), True),
        (Inventory(devices=TWO, mig=("GPU-m",)), False),
        (Inventory(devices=TWO, silent=(2,)), False),
        (Inventory(devices=on_bus("00000000:AF:00.0", "00000000:3B:00.0")), False),  # NVML by another rule
        (Inventory(devices=on_bus("", "")), False),
        (Inventory(devices=on_bus("00000000:3B:00.0", "00000000:3B:00.0")), False),
        (Inventory(devices=TWO[1:]), False),  # something before it is not shared
    ],
)
def test_cards_can_be_counted_where_their_order_is_known(found: Inventory, expected: bool) -> None:
    assert countable(found) is expected
