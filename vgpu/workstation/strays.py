"""Commands of `vgpu run` that live but have no folder in this state: the folder was removed, or is in another state.

Such a command still owns its slices. There are three traces of it: the environment of its processes, the record in the
inherited lock, and the mapped region. The inherited lock stays readable after its file was removed.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from vgpu import names
from vgpu.devices import Gpu, GpuSlice
from vgpu.workstation.slices import LOCK, LOCK_DESCRIPTOR, RECORD, Run, SliceStore
from vgpu.workstation.state import start_time

PROC: Final = Path("/proc")
MIB: Final = 1 << 20
_LARGEST: Final = 1 << 20  #: largest record, bytes
_FOLDER: Final = r"(/\S*/slices/[0-9a-f]{6})"
_HELD: Final = re.compile(rf"{_FOLDER}/{LOCK}( \(deleted\))?")
_MAPPED: Final = re.compile(rf"{_FOLDER}/usage\b")
_NOWHERE: Final = "/nonexistent"
_MARK: Final = f"{names.ENV_REGION_DIR}=".encode()
_DESCRIPTORS: Final = 8  #: of each process: descriptors that may be the inherited lock


def find(store: SliceStore, known: Iterable[Run], users: Mapping[str, Mapping[int, int]] | None = None) -> list[Run]:
    """The commands that this user can find, each once, oldest first; `known`: commands in the store.

    `users` (UUID → pid → bytes): which process uses which card. For a command whose record is lost, this use counts.
    """
    here = {str(store.directory(run)) for run in known}
    here |= {os.path.realpath(folder) for folder in here}  # paths as the kernel shows them for mapped or open files
    found: dict[str, Run] = {}
    for pid in _pids():
        of_mine = _of_mine(pid)
        for folder, record in _told(pid, of_mine):
            if folder not in here and not (of_mine and os.path.realpath(folder) in here):
                # The region of another user is never opened: it could be any file.
                place = folder if of_mine else _NOWHERE + folder
                found.setdefault(folder, msgspec.structs.replace(record, folder=place))
    for folder, record in _mapped(users or {}):
        if folder not in here:
            found.setdefault(folder, record)
    return sorted(found.values(), key=lambda record: (record.since, record.id))


def on_cards(runs: Iterable[Run], cards: Sequence[Gpu], simulator: str) -> list[Run]:
    """`runs` as they count on `cards`.

    Runs on other simulated cards do not count, nor runs on real cards where `cards` are simulated.
    """
    uuids = {card.uuid for card in cards}
    here = [run for run in runs if run.simulator == simulator or {piece.uuid for piece in run.slices} & uuids]
    return renamed(here, cards, simulator)


def renamed(runs: Iterable[Run], cards: Sequence[Gpu], simulator: str) -> list[Run]:
    """`runs` with the UUIDs that simulated cards have now.

    Simulated cards whose state was removed come back with other UUIDs. A slice of such a card then counts on the card
    that has the same index now.
    """
    by_index = {card.index: card.uuid for card in cards}
    return [_renamed(run, by_index) if simulator and run.simulator == simulator else run for run in runs]


def _renamed(run: Run, by_index: Mapping[int, str]) -> Run:
    now = {card.uuid: by_index.get(card.index, card.uuid) for card in run.cards}
    pieces = [msgspec.structs.replace(piece, uuid=now.get(piece.uuid, piece.uuid)) for piece in run.slices]
    return msgspec.structs.replace(run, slices=tuple(pieces))


def _pids() -> list[int]:
    with suppress(OSError):
        return sorted({int(entry) for entry in os.listdir(PROC) if entry.isdecimal()} - {os.getpid()})
    return []


def _of_mine(pid: int) -> bool:
    with suppress(OSError):
        return (PROC / str(pid)).stat().st_uid == os.getuid()
    return False


def _told(pid: int, of_mine: bool) -> Iterator[tuple[str, Run]]:
    """Folder and record of a process's slice, as its environment and inherited lock carry them."""
    with suppress(OSError, msgspec.MsgspecError):
        text = (PROC / str(pid) / "environ").read_bytes()
        environment = dict(part.split(b"=", 1) for part in text.split(b"\0") if b"=" in part) if _MARK in text else {}
        folder = os.fsdecode(environment.get(names.ENV_REGION_DIR.encode(), b""))
        if re.fullmatch(_FOLDER, folder):
            # Only files of this user's processes are read: another user's file could be anything.
            record = _read(PROC / str(pid) / "root" / folder[1:] / RECORD) if of_mine else None
            if record is None and (carried := environment.get(names.ENV_SLICES.encode())):
                record = msgspec.json.decode(carried, type=Run)
                record = msgspec.structs.replace(record, command=_command(pid))
            if record is not None:
                yield folder, record
                return
    if of_mine:
        yield from _held(pid)


def _held(pid: int) -> Iterator[tuple[str, Run]]:
    with suppress(OSError):
        descriptors = PROC / str(pid) / "fd"
        numbers = sorted(number for number in map(int, os.listdir(descriptors)) if number >= LOCK_DESCRIPTOR)
        for number in numbers[:_DESCRIPTORS]:
            with suppress(OSError):
                place = _HELD.fullmatch(os.readlink(descriptors / str(number)))
                record = _read(descriptors / str(number)) if place else None
                if place and record is not None:
                    yield place[1], record


def _mapped(users: Mapping[str, Mapping[int, int]]) -> Iterator[tuple[str, Run]]:
    """Processes that use cards and have a region mapped.

    There is no record, so the slice is what the process uses.
    """
    used: dict[int, list[GpuSlice]] = {}
    for uuid, of_card in users.items():
        for pid, size in of_card.items():
            used.setdefault(pid, []).append(GpuSlice(uuid, -(-size // MIB)))
    for pid, pieces in used.items():
        with suppress(OSError):
            place = _MAPPED.search((PROC / str(pid) / "maps").read_text(errors="replace"))
            if place:
                cards = tuple(Gpu(piece.uuid, 0, "?", piece.mem) for piece in pieces)
                name = place[1].rpartition("/")[2]
                yield (
                    place[1],
                    Run(name, pid, start_time(pid) or 0, 0.0, _command(pid), tuple(pieces), cards, folder=place[1]),
                )


def _command(pid: int) -> tuple[str, ...]:
    with suppress(OSError):
        words = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return tuple(word.decode("utf-8", "backslashreplace") for word in words)
    return ("?",)


def _read(path: Path) -> Run | None:
    """Reads a record; None: there is none. Never blocks, even on a file of an unexpected type."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return msgspec.json.decode(os.pread(descriptor, _LARGEST, 0), type=Run)
    except (OSError, msgspec.MsgspecError):
        return None
    finally:
        os.close(descriptor)
