"""Files of the host's driver, found as the host's loader finds them, below a root that is not this process's own.

Sources: ld.so(8) for the order (cache, then folders); glibc's dl-cache.h for the format of the cache; for the folders
what the projects document: NixOS (/run/opengl-driver), Talos (/usr/local/glibc), Container-Optimized OS on GKE
(/home/kubernetes/bin/nvidia) and elsewhere (/var/lib/nvidia), AKS and kOps (/usr/local/nvidia), Bottlerocket
(sys-root), Microsoft's WSL (/usr/lib/wsl), Debian's alternatives, JetPack.
"""

import errno
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Where ldconfig writes its cache; Talos has a glibc only for its extensions
_CACHES: Final = ("etc/ld.so.cache", "usr/local/glibc/etc/ld.so.cache", "glibc/etc/ld.so.cache")
#: Below the root of a system, or of a driver that has only its own folders; {arch}: x86_64 or aarch64
_FOLDERS: Final = (
    "lib64",
    "usr/lib64",
    "usr/lib/{arch}-linux-gnu",
    "usr/lib/{arch}-linux-gnu/nvidia/current",
    "usr/lib/{arch}-linux-gnu/nvidia",
    "usr/lib/{arch}-linux-gnu/tegra",
    "lib",
    "usr/lib",
    "usr/lib/wsl/lib",
    "usr/local/lib64",
    "usr/local/lib",
    "usr/local/lib/{arch}-linux-gnu",
    "usr/local/glibc/usr/lib",
    "usr/local/glibc/lib",
    "glibc/usr/lib",
    "glibc/lib",
    "run/opengl-driver/lib",
    "{arch}-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia",
    "{arch}-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    "usr/lib/nvidia/tesla",
    "home/kubernetes/bin/nvidia/lib64",
    "var/lib/nvidia/lib64",
    "usr/local/nvidia/lib64",
)
PROGRAM_FOLDERS: Final = (
    "usr/bin",
    "bin",
    "usr/lib/wsl/lib",
    "usr/local/bin",
    "run/current-system/sw/bin",
    "opt/bin",
    "opt/nvidia/bin",
    "usr/libexec/nvidia/tesla/bin",
    "home/kubernetes/bin/nvidia/bin",
    "var/lib/nvidia/bin",
    "usr/local/nvidia/bin",
)
#: ELF machine and the flags of cache entries for 64-bit programs (elf.h; sysdeps/*/dl-cache.h)
_MACHINES: Final = {"x86_64": (62, 0x0303), "aarch64": (183, 0x0A03)}
_MAGIC: Final = b"glibc-ld.so.cache1.1"
_OLD_MAGIC: Final = b"ld.so-1.7.0\0"
_LINKS: Final = 40  #: maximum number of links, as in the kernel (path_resolution(7))


def inside(root: Path, path: str) -> str | None:
    """The path that `path` means for a process with the root `root`.

    Absolute links start at `root`, and .. never leaves it. The result has no links in it and starts with /; None: the
    path does not exist, or its links form a circle.
    """
    done: list[str] = []
    left = [part for part in reversed(path.split("/")) if part]
    links = 0
    while left:
        part = left.pop()
        if part == ".":
            continue
        if part == "..":
            done = done[:-1]
            continue
        here = root.joinpath(*done, part)
        try:
            target = os.readlink(here)
        except OSError as error:
            if error.errno != errno.EINVAL:  # not a link
                return None
            done.append(part)
            continue
        links += 1
        if links > _LINKS:
            return None
        if target.startswith("/"):
            done = []
        left += [part for part in reversed(target.split("/")) if part]
    return "/" + "/".join(done)


def folders(root: Path, library: str, below: str = "") -> Iterator[str]:
    """Folders that hold `library` for programs of this machine's kind, best first, as paths below `root`.

    The paths to the folders contain no links. A folder that a link names may come twice: under the link's name, and
    under its real path.

    `below`: only the usual folders below this one, and no cache.
    """
    arch = platform.machine()
    seen: set[str] = set()
    named = [] if below else [str(Path(path).parent) for path in _cached(root, library)]
    for folder in (*named, *(f"{below}/{one.format(arch=arch)}" for one in _FOLDERS)):
        real = inside(root, folder)
        file = inside(root, f"{folder}/{library}")
        if real is None or file is None or not fits(root / file.lstrip("/")):
            continue
        for each in (real, str(Path(file).parent)):
            if each not in seen:
                seen.add(each)
                yield each


def fits(file: Path) -> bool:
    """Whether this is an ELF file of this machine's kind.

    The loader skips other files, such as 32-bit ones in /usr/lib.
    """
    try:
        with file.open("rb") as stream:
            head = stream.read(20)
    except OSError:
        return False
    if len(head) < 20 or head[:4] != b"\x7fELF" or head[4] != 2:
        return False
    (machine,) = struct.unpack_from("<H" if head[5] == 1 else ">H", head, 18)
    return bool(machine == _MACHINES.get(platform.machine(), (machine, 0))[0])


def _cached(root: Path, library: str) -> list[str]:
    found = []
    for cache in _CACHES:
        place = inside(root, cache)
        try:
            data = (root / place.lstrip("/")).read_bytes() if place else b""
        except OSError:
            continue
        found += read_cache(data).get(library, [])
    return found


def read_cache(data: bytes) -> dict[str, list[str]]:
    """Library → paths, in the cache's order, for 64-bit programs of this machine's kind; {} for another format.

    dl-cache.h, struct cache_file_new: magic and version (20 bytes), number of entries, length of the strings, flags and
    padding, extension offset, unused (48 bytes in all); entries of 24 bytes: flags, offset of key and value from the
    start of this header, OS version, hardware capabilities. It may follow a cache of the old format, aligned to 8.
    """
    start = 0
    if data.startswith(_OLD_MAGIC) and len(data) >= 16:
        (entries,) = struct.unpack_from("<I", data, 12)
        start = (16 + entries * 12 + 7) // 8 * 8
    if data[start : start + len(_MAGIC)] != _MAGIC or len(data) < start + 48:
        return {}
    (entries,) = struct.unpack_from("<I", data, start + 20)
    wanted = _MACHINES.get(platform.machine(), (0, 0x0003))[1]
    found: dict[str, list[str]] = {}
    for number in range(min(entries, (len(data) - start - 48) // 24)):
        flags, key, value = struct.unpack_from("<III", data, start + 48 + number * 24)
        if flags == wanted:
            found.setdefault(_text(data, start + key), []).append(_text(data, start + value))
    return found


def _text(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return data[at : end if end >= 0 else len(data)].decode(errors="replace")
