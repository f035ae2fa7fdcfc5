"""Containers that an agent of another version started: their regions cannot be read, their pods' records tell."""

import struct
from pathlib import Path
from typing import Final

from vgpu.native.region import REGION_ABI

#: struct vgpu_file_header (libvgpu/include/vgpu/region.h): its begin is the same in every version
_HEADER: Final = struct.Struct("=QII40s")
_MAGIC: Final = int.from_bytes(b"vgpuimil", "little")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def abi_of(directory: Path) -> int | None:
    """Version of a region that was made under this boot; None: there is none, or of another boot: nobody uses it."""
    try:
        with (directory / "limits").open("rb") as file:
            magic, abi, _, boot = _HEADER.unpack(file.read(_HEADER.size))
        now = _BOOT_ID.read_bytes().strip()
    except (OSError, struct.error):
        return None
    return int(abi) if magic == _MAGIC and boot.rstrip(b"\0\n") == now else None


def is_one(directory: Path) -> bool:
    """A container's region is of another version than this agent reads."""
    return abi_of(directory) not in {None, REGION_ABI}
