"""Processes of our containers that use a card without the library: which processes, and why the limits do not hold.

The library limits only processes whose loader loads it. A program without a loader (static), with another loader than
glibc's (musl's ignores /etc/ld.so.preload), or under another root has no limits. The agent finds such a process in
NVML's list or by its open device file, and reports why the library is not in the process.

Sources: elf(5); ld.so(8) "/etc/ld.so.preload"; proc_pid_maps(5); proc_pid_fd(5).
"""

import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from device_plugin import cgroups
from device_plugin.foreign import Outside, Regions, known_processes, of_pod
from device_plugin.overhead import PROC, Identity, identity_of
from device_plugin.sandbox import Entry
from vgpu import names

TURNS: Final = 3  #: turns in a row that must show a process: a new process may not be in its ledger yet
#: turns between two searches for open device files, because a search reads all processes of the node
SCAN_EVERY: Final = 10
_CARD: Final = re.compile(r"/dev/nvidia[0-9]+")
_LIBRARY: Final = re.compile(r"/libvgpu[^/]*[.]so( [(]deleted[)])?$")
#: Names of glibc's loaders, by architecture
_GLIBC: Final = re.compile(r"^(ld-linux.*|ld64|ld|ld-[0-9].*)[.]so([.][0-9]+)?$")
_INTERP, _DYNAMIC = 3, 2  # p_type, elf(5)
_LONGEST: Final = 4096  #: bytes of a loader's path


class Finding(msgspec.Struct, frozen=True):
    entry: Entry
    sentence: str
    news: bool  #: the agent has not reported it before


class Bypass:
    """Remembers the earlier turns; one object for all containers."""

    def __init__(self, proc: Path = PROC, card: re.Pattern[str] = _CARD) -> None:
        """`proc`: /proc with the node's processes; `card`: paths of device files that belong to one card."""
        self._proc = proc
        self._card = card
        self._turns: dict[tuple[int, Identity], int] = {}
        self._scanned: list[tuple[Entry, Outside]] = []
        self._turn = 0

    def once(self, outside: Iterable[tuple[Entry, Outside]], regions: Regions) -> list[Finding]:
        """One turn: returns the processes that have lasted long enough.

        `outside`: processes in NVML's list and in no ledger.
        """
        if self._turn % SCAN_EVERY == 0:
            self._scanned = list(self._scan(regions)) if regions else []
        self._turn += 1
        known = known_processes(regions)
        seen: dict[tuple[int, Identity], tuple[Entry, Outside]] = {}
        for entry, one in (*self._scanned, *outside):
            if identity_of(one.pid, self._proc) == one.identity and one.identity not in known:
                seen[one.pid, one.identity] = entry, one
        self._turns = {key: self._turns.get(key, 0) + 1 for key in seen}
        found = []
        for key, (entry, one) in seen.items():
            if self._turns[key] >= TURNS and (reason := why(one.pid, self._proc)):
                what = f"process {one.pid} ({one.name}, {one.identity.pid} in the container) uses {one.what}"
                found.append(Finding(entry, f"{what} without limits: {reason}", self._turns[key] == TURNS))
        return found

    def _scan(self, regions: Regions) -> Iterator[tuple[Entry, Outside]]:
        """Processes of pods with slices that have a card open and are in no ledger."""
        known, uids = known_processes(regions), {entry.pod_uid for entry in regions}
        for folder in self._proc.glob("[0-9]*"):
            try:
                uid = cgroups.pod_of((folder / "cgroup").read_text(errors="replace"))
                if uid not in uids:
                    continue
                cards = sorted({path for path in _open(folder) if self._card.fullmatch(path)})
                name = (folder / "comm").read_text(errors="replace").strip()
            except OSError:
                continue  # the process has ended
            pid = int(folder.name)
            identity, entry = identity_of(pid, self._proc), of_pod(uid, "", regions)
            if cards and identity is not None and identity not in known and entry is not None:
                yield entry, Outside(pid, identity, name, ", ".join(cards))


def _open(folder: Path) -> Iterator[str]:
    """Paths of the files that a process has open."""
    for one in os.scandir(folder / "fd"):
        try:
            yield os.readlink(one.path)
        except OSError:
            continue  # closed meanwhile


def why(pid: int, proc: Path = PROC) -> str:
    """Why the library is not in a process; empty: the library is there, or the agent cannot know."""
    folder = proc / str(pid)
    try:
        if any(_LIBRARY.search(line.rstrip()) for line in (folder / "maps").read_text(errors="replace").splitlines()):
            return ""
        with (folder / "exe").open("rb") as file:
            program = _program(file.read)
            file.seek(0)
            loader = _loader(file.read, file.seek, program)
    except (OSError, struct.error):
        return ""
    if program is None:
        return "its program is not an ELF file, so no loader loads the library"
    if loader is None:
        kind = "a static PIE" if program.dynamic else "without a dynamic section"
        return f"it is linked statically ({kind}), so no loader loads the library"
    if not program.wide:
        return "it is a 32-bit program, which cannot load the 64-bit library"
    name = loader.rpartition("/")[2]
    if "musl" in name:
        return f"its loader is {loader} (musl), which does not read {names.PRELOAD_PATH}"
    if not _GLIBC.match(name):
        return f"its loader is {loader}, and only glibc's loader reads {names.PRELOAD_PATH}"
    try:
        preload = (folder / "root" / names.PRELOAD_PATH.lstrip("/")).read_text(errors="replace")
    except OSError:
        preload = ""
    if names.LIBRARY_PATH not in preload:
        return f"{names.PRELOAD_PATH} under its root does not list the library"
    return "its loader reads the file that lists the library, but the library is not mapped: removed or avoided"


class _Program(msgspec.Struct, frozen=True):
    wide: bool  #: a 64-bit program, as the library is
    dynamic: bool
    interp: tuple[int, int] | None  #: offset and size


def _program(read: Callable[[int], bytes]) -> _Program | None:
    """What an ELF file says about its loader; None: this is no ELF file."""
    head = read(64)
    if head[:4] != b"\x7fELF" or len(head) < 52:
        return None
    wide, order = head[4] == 2, "<" if head[5] == 1 else ">"
    start = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)[0]
    size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
    rest = read(max(0, start - len(head)) + size * count)
    table = (head + rest)[start : start + size * count]
    dynamic, interp = False, None
    for at in range(0, len(table) - size + 1, size or 1):
        kind = struct.unpack_from(order + "I", table, at)[0]
        if kind == _DYNAMIC:
            dynamic = True
        elif kind == _INTERP:
            offset = struct.unpack_from(order + ("Q" if wide else "I"), table, at + (8 if wide else 4))[0]
            length = struct.unpack_from(order + ("Q" if wide else "I"), table, at + (32 if wide else 16))[0]
            interp = offset, length
    return _Program(wide, dynamic, interp)


def _loader(read: Callable[[int], bytes], seek: Callable[[int], object], program: _Program | None) -> str | None:
    if program is None or program.interp is None:
        return None
    seek(program.interp[0])
    return read(min(program.interp[1], _LONGEST)).rstrip(b"\0").decode(errors="replace")
