"""Containers that an agent of another version started: this agent cannot read what they use.

This agent can read their limits where the limits have this version's layout; else the pods' records tell.
"""

import struct
from pathlib import Path
from typing import Final

from vgpu.native import Limits
from vgpu.native.region import REGION_ABI, limits_in

#: struct vgpu_file_header (libvgpu/include/vgpu/region.h): its first fields are the same in every version
_HEADER: Final = struct.Struct("=QII40s")
_MAGIC: Final = int.from_bytes(b"vgpuimil", "little")
#: Versions whose `limits` file differs from this version's only after the two copies (struct vgpu_limits_file)
_LIMITS_AS_NOW: Final = frozenset({2})
_SELECTOR: Final = struct.Struct("=Q")
_SELECTOR_AT: Final = 64
_COPIES_AT: Final = 128
_COPY_BYTES: Final = 1312
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def abi_of(directory: Path) -> int | None:
    """Version of a region that was made since this boot.

    None: there is no region, or a region of an earlier boot, which no process uses.
    """
    try:
        with (directory / "limits").open("rb") as file:
            magic, abi, _, boot = _HEADER.unpack(file.read(_HEADER.size))
        now = _BOOT_ID.read_bytes().strip()
    except (OSError, struct.error):
        return None
    return int(abi) if magic == _MAGIC and boot.rstrip(b"\0\n") == now else None


def is_one(directory: Path) -> bool:
    """Whether a container's region has another version than this agent reads."""
    return abi_of(directory) not in {None, REGION_ABI}


def limits_of(directory: Path) -> Limits | None:
    """The limits in a region of another version; None: they cannot be read."""
    if abi_of(directory) not in _LIMITS_AS_NOW:
        return None
    try:
        data = (directory / "limits").read_bytes()
        (selector,) = _SELECTOR.unpack_from(data, _SELECTOR_AT)
        begin = _COPIES_AT + selector % 2 * _COPY_BYTES
        return limits_in(data[begin : begin + _COPY_BYTES])
    except (OSError, struct.error, ValueError):
        return None
