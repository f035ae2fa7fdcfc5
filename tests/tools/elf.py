"""Files that begin like ELF files, for code that looks only at their kind."""

import platform
import struct
from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}


def write(path: Path, machine: int | None = None, bits: int = 64) -> Path:
    """A file for this machine, or for another one (number of elf.h), or a 32-bit one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = MACHINES[platform.machine()] if machine is None else machine
    path.write_bytes(b"\x7fELF" + bytes((bits // 32, 1, 1)) + bytes(9) + struct.pack("<HH", 3, number) + bytes(44))
    return path


def cache(entries: list[tuple[str, str, int]], old: bool = False) -> bytes:
    """A loader's cache of (library, path, flags), as ldconfig writes it; `old`: after a cache of the older format."""
    header = 48 + 24 * len(entries)
    strings, body = b"", b""
    for library, path, flags in entries:
        key = header + len(strings)
        strings += library.encode() + b"\0"
        value = header + len(strings)
        strings += path.encode() + b"\0"
        body += struct.pack("<IIIIQ", flags, key, value, 0, 0)
    new = b"glibc-ld.so.cache1.1" + struct.pack("<II", len(entries), len(strings)) + bytes(20) + body + strings
    before = b"ld.so-1.7.0\0" + struct.pack("<I", 1) + bytes(12)
    return before + bytes(-len(before) % 8) + new if old else new
