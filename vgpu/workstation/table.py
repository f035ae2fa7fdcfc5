"""What runs on this machine's cards, for `vgpu ps` and `vgpu top`: figures of the running slices, and their tables."""

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Group
from rich.text import Text

from vgpu.columns import Columns
from vgpu.native import Region
from vgpu.workstation import strays
from vgpu.workstation.cards import MIB, CardReading, read_cards
from vgpu.workstation.slices import Run, SliceStore
from vgpu.workstation.state import start_time

SHRINKING: Final = ("COMMAND", "MODEL")  #: columns that lose their ends on a narrow terminal, first column first


class SliceFigures(msgspec.Struct, frozen=True):
    """One slice of a running command at one moment; sizes in bytes."""

    uuid: str
    index: int
    model: str
    memory_limit_bytes: int
    memory_used_bytes: int
    host_memory_bytes: int  #: the part of it in host memory
    cores: int  #: %, 0: no limit
    gpu_ns: int  #: GPU time charged since the start


class RunFigures(msgspec.Struct, frozen=True):
    """One running command."""

    id: str
    pid: int  #: the command's first process; after its end, another process that still uses a card
    command: tuple[str, ...]
    since: float  #: seconds since the epoch
    simulated: bool
    processes: int  #: number of processes that use a card now
    slices: tuple[SliceFigures, ...]


class Moment(msgspec.Struct, frozen=True):
    """All cards and commands at one time."""

    at: float  #: seconds, monotonic
    cards: tuple[CardReading, ...]
    runs: tuple[RunFigures, ...]
    pids: frozenset[int] = frozenset()  #: processes of the commands that use a card


def figures(store: SliceStore) -> list[RunFigures]:
    """All running commands, oldest first; dead ones are swept."""
    return [_figures(store, run) for run in _living(store)]


def _living(store: SliceStore) -> list[Run]:
    """The commands of this state, commands that lost their state, and commands of other states on the same cards."""
    with store.locked():
        runs = store.sweep()
    simulators = {run.simulator for run in runs} | {str(path) for path in (store.root / "simulator").glob("*")}
    others = strays.find(store, runs)
    mine = [run for run in others if not run.simulator or run.simulator in simulators or _lost_here(store, run)]
    return sorted([*runs, *mine], key=lambda run: (run.since, run.id))


def _lost_here(store: SliceStore, run: Run) -> bool:
    return Path(run.folder).parent.parent == store.root


def _figures(store: SliceStore, run: Run) -> RunFigures:
    used, host, spent, users = [0] * len(run.slices), [0] * len(run.slices), [0] * len(run.slices), []
    try:
        with Region.open(store.directory(run)) as region:
            usage = region.usage()
        used = [card.used for card in usage.cards]
        host = [card.host_used for card in usage.cards]
        spent = [card.gpu_ns for card in usage.cards]
        users = [process.pid for process in usage.processes]
    except OSError:
        pass  # claimed a moment ago, so the region follows; or of another version
    return RunFigures(
        id=run.id,
        pid=run.pid if start_time(run.pid) == run.start_time or not users else users[0],
        command=run.command,
        since=run.since,
        simulated=bool(run.simulator),
        processes=len(users),
        slices=tuple(
            SliceFigures(
                uuid=piece.uuid,
                index=card.index,
                model=card.model,
                memory_limit_bytes=piece.mem * MIB,
                memory_used_bytes=used[at],
                host_memory_bytes=host[at],
                cores=piece.cores,
                gpu_ns=spent[at],
            )
            for at, (piece, card) in enumerate(zip(run.slices, run.cards, strict=True))
        ),
    )


def moment(store: SliceStore, simulator: str = "") -> Moment:
    """All cards and commands now; `simulator`: state of simulated cards that are shown even without a command."""
    runs = _living(store)
    found = tuple(_figures(store, run) for run in runs)
    pids = frozenset(pid for run in runs for pid in _pids(store, run))
    simulators = {run.simulator for run in runs} | {simulator}
    return Moment(time.monotonic(), tuple(read_cards(simulators - {""})), found, pids)


def _pids(store: SliceStore, run: Run) -> list[int]:
    try:
        with Region.open(store.directory(run)) as region:
            return [process.pid for process in region.usage().processes]
    except OSError:
        return []  # claimed a moment ago, or of another version


def as_json(runs: Sequence[RunFigures]) -> str:
    body: list[dict[str, Any]] = msgspec.to_builtins(runs)
    return msgspec.json.format(msgspec.json.encode(body)).decode()


def runs_table(runs: Sequence[RunFigures], now: float) -> Columns:
    """One line per slice; `now`: seconds since the epoch."""
    table = Columns(
        "ID", "PID", "CARD", "MODEL", ">LIMIT", ">USED", ">HOST", ">CORES", ">SINCE", "COMMAND", shrinking=SHRINKING
    )
    for run in runs:
        for at, piece in enumerate(run.slices):
            table.add(
                run.id if at == 0 else "",
                str(run.pid) if at == 0 else "",
                _card(piece.index, run.simulated),
                piece.model,
                mib(piece.memory_limit_bytes),
                mib(piece.memory_used_bytes),
                mib(piece.host_memory_bytes),
                f"{piece.cores} %" if piece.cores else "-",
                age(now - run.since) if at == 0 else "",
                one_line(run.command) if at == 0 else "",
            )
    return table


def frame(before: Moment, after: Moment) -> Group:
    """Cards and slices with their work between two moments."""
    seconds = max(after.at - before.at, 1e-9)
    busy = {card.uuid: card.busy_ns for card in before.cards}
    cards = Columns(
        "CARD", "MODEL", ">MEMORY USED", ">ALLOCATED", ">OF", ">BUSY", ">SLICES", ">OTHERS", shrinking=SHRINKING
    )
    for card in after.cards:
        held = [piece for run in after.runs for piece in run.slices if piece.uuid == card.uuid]
        cards.add(
            _card(card.index, card.simulated),
            card.model,
            mib(card.used),
            mib(sum(piece.memory_limit_bytes for piece in held)),
            mib(card.memory),
            percent(_utilization(card, busy, seconds)),
            str(len(held)),
            mib(sum(size for pid, size in card.users.items() if pid not in after.pids)),
        )
    spent = {(run.id, piece.uuid): piece.gpu_ns for run in before.runs for piece in run.slices}
    slices = Columns(
        "ID", "PID", "CARD", ">USED", ">HOST", ">LIMIT", ">CORES", ">MEASURED", "COMMAND", shrinking=SHRINKING
    )
    for run in after.runs:
        for piece in run.slices:
            earlier = spent.get((run.id, piece.uuid))
            share = None if earlier is None else (piece.gpu_ns - earlier) / 1e9 / seconds
            slices.add(
                run.id,
                str(run.pid),
                _card(piece.index, run.simulated),
                mib(piece.memory_used_bytes),
                mib(piece.host_memory_bytes),
                mib(piece.memory_limit_bytes),
                f"{piece.cores} %" if piece.cores else "-",
                percent(share),
                one_line(run.command),
            )
    parts: list[Columns | Text] = [
        cards if after.cards else Text("no NVIDIA driver on this machine, no simulated cards in use")
    ]
    return Group(*parts, Text(), slices if after.runs else Text("no slices in use"))


def _utilization(card: CardReading, before: Mapping[str, int | None], seconds: float) -> float | None:
    earlier = before.get(card.uuid)
    if card.busy_ns is not None and earlier is not None:
        return min((card.busy_ns - earlier) / 1e9 / seconds, 1.0)
    return card.utilization


def _card(index: int, simulated: bool) -> str:
    return f"{index} (simulated)" if simulated else str(index)


def one_line(command: Sequence[str]) -> str:
    """A command as a shell reads it, but with control characters escaped (`\\n`), which would break the table."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shlex.join(command))


def mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def age(seconds: float) -> str:
    """ "42s", "3m10s", "5h02m", "2d03h"."""
    whole = max(int(seconds), 0)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
