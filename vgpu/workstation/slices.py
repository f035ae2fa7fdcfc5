"""Stores which slices run on this machine, without a daemon: one directory per slice, alive as long as its command.

`<state>/slices/<id>/`: `slice.json` (this module's record), `limits` and `usage` (the region), `lock`. `vgpu run` takes
the lock, and the command and its children inherit it. So the kernel frees the lock with the last of these processes,
however it ends. The folder itself is locked in the same way: this keeps systemd-tmpfiles from removing old files in it
(tmpfiles.d(5), "Age"). A process that changes anything here holds `<state>/lock` for that moment. The half-made folder
of a killed process has a free lock, and the next caller removes it.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

import msgspec

from vgpu import names
from vgpu.devices import Gpu, GpuSlice
from vgpu.workstation import locks
from vgpu.workstation.state import carriers, start_time

RECORD: Final = "slice.json"
#: contains the record, too: it can be read from a process that has the file open, after the folder was removed
LOCK: Final = "lock"
LOCK_DESCRIPTOR: Final = (
    600  #: lowest number of inherited descriptors: scripts use the small ones (`exec 3>file`) and would close them
)


class Run(msgspec.Struct, frozen=True):
    """One command and its slices."""

    id: str
    pid: int  #: the command's first process
    start_time: int  #: start of that process, clock ticks since boot
    since: float  #: seconds since the epoch
    command: tuple[str, ...]  #: for people: bytes that are not UTF-8 are written as \xNN
    slices: tuple[GpuSlice, ...]  #: in the order in which the command counts its cards
    cards: tuple[Gpu, ...]  #: the cards of `slices`, in the same order
    simulator: str = ""  #: state directory of the simulated cards; empty: cards of the driver
    host_memory: int = 0  #: MiB of host memory that the command was promised, behind all of its cards together
    folder: str = ""  #: where its region is or was, when that is in another state directory (vgpu.workstation.strays)


class Claim(msgspec.Struct, frozen=True):
    """Slices that this process holds and still has to give to its command."""

    record: Run
    directory: Path
    descriptor: int  #: holds the lock; close-on-exec
    folder: int = -1  #: holds the lock of the folder; close-on-exec


def displayed(argument: str) -> str:
    """An argument of a command as text that can be stored; the kernel accepts any bytes, JSON does not."""
    return os.fsencode(argument).decode("utf-8", "backslashreplace")


def in_use(directory: Path) -> bool:
    """Whether the slice's command, or any process that it left behind, still lives.

    The lock alone would miss children that close what they inherit (daemons; Python's subprocess does). Their
    environment identifies them. When a process has overwritten its environment, its slot in the region does.
    """
    return (
        locks.is_held(directory / LOCK)
        or bool(carriers(names.ENV_REGION_DIR, str(directory)))
        or _has_gpu_processes(directory)
    )


def _has_gpu_processes(directory: Path) -> bool:
    from vgpu.native import Region  # compiled; needed only where a lock was found free

    try:
        with Region.open(directory, writable=True) as region:
            region.reap()
            return bool(region.usage().processes)
    except OSError:  # killed before the region was made: no process can be in it
        return False


class SliceStore:
    """The running slices below one state directory."""

    def __init__(self, root: Path, in_use: Callable[[Path], bool] = in_use) -> None:
        self.root = root
        self._folder = root / "slices"
        self._folder.mkdir(mode=0o755, exist_ok=True)
        self._in_use = in_use

    def is_there(self) -> bool:
        """Whether the folder of the slices still exists."""
        return self._folder.is_dir()

    def locked(self) -> AbstractContextManager[None]:
        """The right to change the state directory; held only for moments, never during a wait."""
        return locks.exclusive(self.root / "lock")

    def sweep(self) -> list[Run]:
        """The slices of living commands, oldest first; removes the others. Needs `locked`."""
        living = []
        for directory in self._folder.iterdir():
            if not directory.is_dir():  # not a slice
                continue
            try:
                record = self._read(directory) if self._in_use(directory) else None
            except msgspec.ValidationError:
                continue  # another version's slice: its command lives, and carries a record (vgpu.workstation.strays)
            if record is None:
                shutil.rmtree(directory, ignore_errors=True)
            else:
                living.append(record)
        return sorted(living, key=lambda record: (record.since, record.id))

    def _read(self, directory: Path) -> Run | None:
        """The record of a slice; None: its maker was killed before the record was complete, so no command was started.

        Raises msgspec.ValidationError for a complete record of another version.
        """
        try:
            return msgspec.json.decode((directory / RECORD).read_bytes(), type=Run)
        except msgspec.ValidationError:
            raise
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def claim(
        self,
        slices: Sequence[GpuSlice],
        cards: Sequence[Gpu],
        command: Sequence[str],
        simulator: str,
        now: float,
        host_memory: int = 0,
    ) -> Claim:
        """Records that this process has `slices`, before any other process can look. Needs `locked`."""
        name = secrets.token_hex(3)
        while (self._folder / name).exists():
            name = secrets.token_hex(3)
        directory = self._folder / name
        directory.mkdir(mode=0o755)
        descriptor, folder = locks.hold(directory / LOCK), locks.hold_folder(directory)
        pid = os.getpid()
        record = Run(
            id=name,
            pid=pid,
            start_time=start_time(pid) or 0,
            since=now,
            command=tuple(map(displayed, command)),
            slices=tuple(slices),
            cards=tuple(cards),
            simulator=simulator,
            host_memory=host_memory,
        )
        text = msgspec.json.encode(record)
        os.write(descriptor, text)
        (directory / RECORD).write_bytes(text)
        return Claim(record, directory, descriptor, folder)

    def give_up(self, claim: Claim) -> None:
        """Gives back slices whose command could not be started."""
        with suppress(FileNotFoundError), self.locked():  # the state may have been removed
            shutil.rmtree(claim.directory, ignore_errors=True)
        os.close(claim.descriptor)
        if claim.folder >= 0:
            os.close(claim.folder)

    def directory(self, record: Run) -> Path:
        """The folder of a running slice's region: VGPU_DIR of its command."""
        return Path(record.folder) if record.folder else self._folder / record.id
