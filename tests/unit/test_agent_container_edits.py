"""What a container gets: environment, mounts, and the driver's part."""

import json
from pathlib import Path

import pytest
from tools import elf

from device_plugin import container_edits, driver
from device_plugin.library import Rollout
from device_plugin.modes import Mode
from vgpu.devices import Gpu, GpuSlice

A, B = "GPU-aaaa", "GPU-bbbb"
ROLLOUT = Rollout(Path("/host/libvgpu-1.so"), Path("/host/ld.so.preload"), Path("/host/simulator-1"))


def test_environment_says_the_limits_by_place_of_the_card() -> None:
    slices = (GpuSlice(A, mem=3000, cores=30), GpuSlice(B, mem=4000, cores=30))
    assert container_edits.limits_environment(slices, priority=1) == {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "4000m",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_TASK_PRIORITY": "1",
    }
    assert container_edits.limits_environment((GpuSlice(A, mem=10, phys=5),)) == {
        "CUDA_DEVICE_MEMORY_LIMIT_0": "10m",
        "CUDA_OVERSUBSCRIBE": "true",
    }
    assert container_edits.limits_environment((GpuSlice(A, mem=10),), enforce_cores=False)[
        "GPU_CORE_UTILIZATION_POLICY"
    ] == ("disable")


def test_slices_stand_in_the_order_of_the_cards() -> None:
    cards = {u: Gpu(uuid=u, index=i, model="T4", memory=1) for i, u in enumerate([B, A])}
    assert container_edits.in_order((GpuSlice(A, 1), GpuSlice(B, 2)), cards) == (GpuSlice(B, 2), GpuSlice(A, 1))


def test_only_usage_is_writable_in_the_container() -> None:
    given = container_edits.container_edits(Path("/run/vgpu/containers/u_main"), ROLLOUT, [A, B])
    assert {mount.container: mount.read_only for mount in given.mounts} == {
        "/usr/local/vgpu/libvgpu.so": True,
        "/etc/ld.so.preload": True,
        "/run/vgpu/limits": True,
        "/run/vgpu/usage": False,
    }
    assert given.env == {"NVIDIA_VISIBLE_DEVICES": f"{A},{B}"}


def test_simulated_cards_bring_their_libraries_and_state() -> None:
    given = container_edits.container_edits(Path("/r"), ROLLOUT, [A], simulator_state=Path("/run/vgpu/simulator"))
    assert given.env["LD_LIBRARY_PATH"] == "/usr/local/vgpu/simulator"
    assert given.env["VGPU_SIM_DIR"] == "/run/vgpu/simulator"
    assert given.env["NVIDIA_VISIBLE_DEVICES"] == A
    assert {m.container: m.read_only for m in given.mounts}["/run/vgpu/simulator"] is False


def test_cards_are_told_by_mounts_where_the_environment_could_be_faked() -> None:
    given = container_edits.container_edits(Path("/r"), ROLLOUT, [A], mode=Mode("envvar", volume_mounts=True))
    assert given.env["NVIDIA_VISIBLE_DEVICES"] == "/var/run/nvidia-container-devices"
    assert container_edits.Mount(Path("/dev/null"), f"/var/run/nvidia-container-devices/{A}") in given.mounts


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host's files, as seen from the agent."""
    folder = tmp_path / "host" / "dev"
    folder.mkdir(parents=True)
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (folder / name).touch()
    return tmp_path / "host"


def test_device_nodes_of_the_cards_alone(host: Path) -> None:
    card = Gpu(uuid=A, index=1, model="T4", memory=1)
    elf.write(host / "usr/lib64/libcuda.so.1")
    found = driver.edits_for([(card, 3)], driver.Place(host, specs=())).edits
    assert [node["path"] for node in found["deviceNodes"]] == ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    with pytest.raises(FileNotFoundError, match="nvidia7"):
        driver.edits_for([(card, 7)], driver.Place(host, specs=()))


def test_nvidias_own_edits_are_taken_over(tmp_path: Path, host: Path) -> None:
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}},
            {"name": A, "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia3"}]}},
        ],
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": [{"path": "/dev/nvidiactl"}]},
    }
    (tmp_path / "nvidia.json").write_text(json.dumps(spec))
    (tmp_path / "broken.yaml").write_text("{")
    cards = [(Gpu(uuid=A, index=5, model="T4", memory=1), 3), (Gpu(uuid=B, index=0, model="T4", memory=1), 0)]
    found = driver.edits_for(cards, driver.Place(host, specs=(tmp_path,)))
    assert found.version == "0.6.0"
    assert [node["path"] for node in found.edits["deviceNodes"]] == ["/dev/nvidia3", "/dev/nvidia0", "/dev/nvidiactl"]
    assert found.edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


def test_nvidias_edits_are_read_where_the_host_has_them(host: Path) -> None:
    given = {"kind": "nvidia.com/gpu", "devices": [{"name": A, "containerEdits": {"env": ["OURS=1"]}}]}
    (host / "etc" / "cdi").mkdir(parents=True)
    (host / "etc" / "cdi" / "nvidia.yaml").write_text(json.dumps(given))
    found = driver.edits_for([(Gpu(uuid=A, index=0, model="T4", memory=1), 0)], driver.Place(host))
    assert found.edits == {"env": ["OURS=1"]}


def test_where_nvidia_has_no_spec_the_drivers_files_come_too(host: Path) -> None:
    folder = host / "run" / "nvidia" / "driver" / "usr" / "lib64"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.550.54", "libnvidia-ml.so.1", "libnvidia-glcore.so.550.54", "libcuda.so"):
        elf.write(folder / name)
    (folder / "libcuda.so.1").symlink_to("libcuda.so.550.54")
    program = host / "run" / "nvidia" / "driver" / "usr" / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.touch()
    place = driver.Place(host, "/run/nvidia/driver", specs=())
    found = driver.edits_for([(Gpu(uuid=A, index=0, model="T4", memory=1), 0)], place).edits["mounts"]
    assert {mount["containerPath"]: mount["hostPath"] for mount in found} == {
        "/usr/local/nvidia/lib64/libcuda.so.1": "/run/nvidia/driver/usr/lib64/libcuda.so.550.54",
        "/usr/local/nvidia/lib64/libcuda.so.550.54": "/run/nvidia/driver/usr/lib64/libcuda.so.550.54",
        "/usr/local/nvidia/lib64/libnvidia-ml.so.1": "/run/nvidia/driver/usr/lib64/libnvidia-ml.so.1",
        "/usr/local/nvidia/bin/nvidia-smi": "/run/nvidia/driver/usr/bin/nvidia-smi",
    }
    assert all("ro" in mount["options"] for mount in found)


def test_the_runtime_has_nothing_to_add_to_device_nodes() -> None:
    given = container_edits.container_edits(Path("/r"), ROLLOUT, [A], mode=Mode("device-specs"))
    assert given.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    told = container_edits.container_edits(Path("/r"), ROLLOUT, [A], mode=Mode("envvar", volume_mounts=False))
    assert told.env["NVIDIA_VISIBLE_DEVICES"] == A
    assert not [mount for mount in told.mounts if "nvidia" in mount.container]
