"""A slice for the scripts of a test."""

from pathlib import Path

from preloaded import environment


def slice_of(folder: Path, name: str = "region", *, cards: str = "T4", **variables: str) -> dict[str, str]:
    """Environment of programs that share 1000 MiB of each card; the region is made in `folder`/`name`."""
    (folder / name).mkdir()
    limits = {"CUDA_DEVICE_MEMORY_LIMIT": "1000m", "VGPU_DIR": str(folder / name)}
    return environment(folder, cards=cards, **(limits | variables))
