"""The kubelet's checkpoint: a captured file is understood, and what we write carries the kubelet's own checksum."""

from pathlib import Path

import msgspec
import pytest

from vgpu.kubelet import checkpoint
from vgpu.kubelet.checkpoint import Checkpoint, CheckpointError, Entry

CAPTURED = Path(__file__).parents[1] / "data" / "kubelet" / "kubelet_internal_checkpoint.json"
POD = "11111111-2222-3333-4444-555555555555"


def test_captured_file_is_understood() -> None:
    found = checkpoint.read(CAPTURED)
    assert found.holders("nvidia.com/gpu", ["GPU-01::0", "GPU-00::0"]) == [(POD, "main")]
    assert found.held_by(POD, "main", "nvidia.com/gpu") == {"GPU-00::0", "GPU-01::0"}
    assert len(found.registered["nvidia.com/gpu"] or []) == 40
    response = found.entries[0].response
    assert dict(response.envs) == {"CUDA_DEVICE_MEMORY_LIMIT_0": "8192m"}
    assert [mount.container_path for mount in response.mounts] == ["/usr/local/vgpu/libvgpu.so"]
    assert [device.name for device in response.cdi_devices] == ["vgpu.example.io/gpu=GPU-00"]


def test_only_the_exact_set_of_ids_holds() -> None:
    found = checkpoint.read(CAPTURED)
    assert found.holders("nvidia.com/gpu", ["GPU-00::0"]) == []
    assert found.holders("other.io/gpu", ["GPU-00::0", "GPU-01::0"]) == []


def test_checksum_is_the_one_of_the_kubelet() -> None:
    captured = msgspec.json.decode(CAPTURED.read_bytes())
    ours = msgspec.json.decode(checkpoint.encode(checkpoint.read(CAPTURED)))
    assert ours == captured


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / checkpoint.FILE_NAME
    made = Checkpoint(
        [
            Entry("uid-1", "init", "nvidia.com/gpu", {"-1": ["a::0"]}, "CgA="),
            Entry("uid-1", "main", "nvidia.com/gpu", {"0": ["a::0"], "1": ["a::0", "b::1"]}, "CgA="),
        ],
        {"nvidia.com/gpu": ["a::0", "b::1"], "other.io/gpu": []},
    )
    checkpoint.write(path, made)
    assert checkpoint.read(path) == made
    assert [entry.name for entry in tmp_path.iterdir()] == [checkpoint.FILE_NAME]
    assert made.entries[1].ids == {"a::0", "b::1"}


def test_no_file_is_an_empty_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path / "absent") == Checkpoint()


def test_empty_lists_of_go_are_null() -> None:
    content = b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"nvidia.com/gpu":null}},"Checksum":1}'
    assert checkpoint.decode(content).holders("nvidia.com/gpu", ["a::0"]) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"Data":{"PodDeviceEntries":[{"PodUID":7}]}}'])
def test_garbage_is_named(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="/x/file: "):
        checkpoint.decode(content, "/x/file")
