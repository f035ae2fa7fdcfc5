"""Makes the helpers of tests/native importable when this folder is run alone; one slice for the scripts of a test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from preloaded import environment  # noqa: E402  (found by the line above)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A T4 of which all processes share 1000 MiB."""
    return slice_of(tmp_path)


def slice_of(folder: Path, name: str = "region", **variables: str) -> dict[str, str]:
    (folder / name).mkdir()
    return environment(folder, **{"CUDA_DEVICE_MEMORY_LIMIT": "1000m", "VGPU_DIR": str(folder / name)} | variables)
