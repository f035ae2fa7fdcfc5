"""A container's region: its limits, which may change while it runs, and what its processes use.

Types mirror libvgpu/include/vgpu/agent.h, where every field is explained. Memory in bytes, time in nanoseconds, core
shares in percent of one card.
"""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec

from vgpu.native.binding import c_string, load

CorePolicy = Literal["fixed", "elastic", "none"]
_POLICIES: Final[tuple[CorePolicy, ...]] = ("fixed", "elastic", "none")  # enum vgpu_core_policy
KINDS: Final = ("context", "module", "buffer", "array", "pool", "overhead")  #: enum vgpu_kind
REGION_ABI: Final = 3  #: VGPU_REGION_ABI of libvgpu/include/vgpu/region.h
_NO_LIMIT: Final = 2**64 - 1  # VGPU_NO_LIMIT
_MAX_CARDS: Final = 16  # VGPU_MAX_CARDS
_UUID_BYTES: Final = 47  # VGPU_UUID_SIZE less the NUL


class CardLimit(msgspec.Struct, frozen=True):
    """What the container may use of one card."""

    uuid: str  #: as NVML prints it; empty: the card at this place in NVML's order
    memory: int | None  #: None: no limit
    guarantee: int | None = None  #: the physical part of `memory`; None: all of it
    context_bytes: int = 0  #: measured bytes of one context; 0: unknown
    cores: int = 0  #: guaranteed share, 0: no core limit
    cores_ceiling: int = 0  #: elastic: largest share


class Limits(msgspec.Struct, frozen=True):
    """Everything that the agent decides about a container."""

    cards: tuple[CardLimit, ...]
    core_policy: CorePolicy = "fixed"
    priority: int = 0  #: 0 high, 1 low
    host_memory: int | None = 0  #: budget of host memory behind each card; None: no limit
    burst_ms: int = 0  #: largest GPU time that an idle container earns, in ms of wall time: 20 to 100; 0: 50
    allow_disable_control: bool = False
    oversubscribe: bool = False  #: what does not fit into the guarantee is in host memory; fixed for the region's life
    movable: bool = False  #: with oversubscribe: blocks may move between card and host; fixed for the region's life
    kill_on_oom: bool = False
    fills_on_engine: bool = False  #: fills use no multiprocessors on this node: they are not paced
    copies_on_sms: bool = False  #: copies within a card use multiprocessors: they are paced


def _no_kinds() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


class CardUsage(msgspec.Struct, frozen=True):
    """What all processes of the container use of one card."""

    used: int = 0  #: bytes that the memory limit counts
    host_used: int = 0  #: part of `used` in host memory
    resident: int = 0  #: part of `used` really on the card; 0 without oversubscribe
    lent: int = 0  #: bytes that the container may hold on the card above its guarantee
    by_kind: dict[str, int] = msgspec.field(default_factory=_no_kinds)  #: KINDS → bytes; a statistic
    gpu_ns: int = 0  #: GPU time since the region was made
    throttled_ns: int = 0  #: time that launches waited for the core limit
    launches: int = 0
    refused: int = 0  #: allocations that the limit refused
    processes: int = 0  #: number of processes that hold memory on this card


class ProcessUsage(msgspec.Struct, frozen=True):
    """What one process uses; tuples have one entry per card of the limits."""

    pid: int  #: pid as the process itself sees it
    slot: int
    pid_namespace: int  #: inode of the process's /proc/self/ns/pid
    start_time: int  #: clock ticks since boot
    used: tuple[int, ...]
    by_kind: tuple[dict[str, int], ...]
    gpu_ns: tuple[int, ...]
    throttled_ns: tuple[int, ...]
    launches: tuple[int, ...]
    host: tuple[int, ...] = ()  #: part of `used` in host memory
    resident: tuple[int, ...] = ()  #: part of `used` really on the card; 0 without oversubscribe


class Usage(msgspec.Struct, frozen=True):
    """A picture that is consistent enough for metrics."""

    cards: tuple[CardUsage, ...]  #: in the order of Limits.cards
    processes: tuple[ProcessUsage, ...]
    unhooked: int = 0  #: entry points that the driver answered without a hook
    saturated: int = 0  #: releases of more than was charged; 0 in a correct region

    @property
    def process_count(self) -> int:
        """Processes that hold a slot, including dead processes that are not reaped yet."""
        return len(self.processes)


_SENTENCES: Final = {
    errno.EEXIST: "the directory already has a region",
    errno.ENOENT: "the directory has no region",
    errno.EPROTO: "not a region of this version and this boot, or truncated",
    errno.EBADF: "the region was opened read-only",
    errno.EFAULT: "a process truncated the usage file during the read",
    errno.ENOSPC: "no space, or no slot, is left",
}


def _checked(result: int, path: Path) -> int:
    """The result of a C function; for a negative errno, raises its OSError with the path and a sentence."""
    if result < 0:
        raise OSError(-result, _SENTENCES.get(-result, os.strerror(-result)), str(path))
    return result


def _natural(value: int, what: str, largest: int = _NO_LIMIT) -> int:
    if not 0 <= value <= largest:
        raise ValueError(f"{what} is {value}; allowed: 0 to {largest}")
    return value


def _fill(out: Any, limits: Limits) -> None:
    """Writes `limits` into a struct vgpu_limits; raises ValueError naming the field and what is allowed."""
    if len(limits.cards) > _MAX_CARDS:
        raise ValueError(f"limits name {len(limits.cards)} cards; allowed: at most {_MAX_CARDS}")
    _, lib = load()
    out.card_count = len(limits.cards)
    if limits.movable and not limits.oversubscribe:
        raise ValueError("movable is set; allowed: only with oversubscribe")
    out.flags = (
        (lib.VGPU_ALLOW_DISABLE_CONTROL if limits.allow_disable_control else 0)
        | (lib.VGPU_OVERSUBSCRIBE if limits.oversubscribe else 0)
        | (lib.VGPU_KILL_ON_OOM if limits.kill_on_oom else 0)
        | (lib.VGPU_MOVABLE if limits.movable else 0)
        | (lib.VGPU_FILLS_ON_ENGINE if limits.fills_on_engine else 0)
        | (lib.VGPU_COPIES_ON_SMS if limits.copies_on_sms else 0)
    )
    if limits.core_policy not in _POLICIES:
        raise ValueError(f"core_policy is {limits.core_policy!r}; allowed: {', '.join(_POLICIES)}")
    out.core_policy = _POLICIES.index(limits.core_policy)
    out.priority = _natural(limits.priority, "priority", 1)
    out.host_memory = _NO_LIMIT if limits.host_memory is None else _natural(limits.host_memory, "host_memory")
    if limits.burst_ms and not 20 <= limits.burst_ms <= 100:
        raise ValueError(f"burst_ms is {limits.burst_ms}; allowed: 20 to 100, or 0 for 50")
    out.burst_ms = limits.burst_ms
    for index, limit in enumerate(limits.cards):
        card, where = out.cards[index], f"cards[{index}]"
        uuid = limit.uuid.encode()
        if len(uuid) > _UUID_BYTES:
            raise ValueError(f"{where}.uuid has {len(uuid)} bytes; allowed: at most {_UUID_BYTES}")
        card.uuid = uuid
        card.memory = _NO_LIMIT if limit.memory is None else _natural(limit.memory, f"{where}.memory")
        card.guarantee = (
            card.memory if limit.guarantee is None else _natural(limit.guarantee, f"{where}.guarantee", card.memory)
        )
        card.context_bytes = _natural(limit.context_bytes, f"{where}.context_bytes")
        card.cores = _natural(limit.cores, f"{where}.cores", 100)
        card.cores_ceiling = _natural(limit.cores_ceiling, f"{where}.cores_ceiling", 100)


def _limits(raw: Any) -> Limits:
    _, lib = load()
    return Limits(
        cards=tuple(
            CardLimit(
                uuid=c_string(card.uuid),
                memory=None if card.memory == _NO_LIMIT else card.memory,
                guarantee=None if card.guarantee == card.memory else card.guarantee,
                context_bytes=card.context_bytes,
                cores=card.cores,
                cores_ceiling=card.cores_ceiling,
            )
            for card in raw.cards[0 : raw.card_count]
        ),
        core_policy=_POLICIES[raw.core_policy],
        priority=raw.priority,
        host_memory=None if raw.host_memory == _NO_LIMIT else raw.host_memory,
        burst_ms=raw.burst_ms,
        allow_disable_control=bool(raw.flags & lib.VGPU_ALLOW_DISABLE_CONTROL),
        oversubscribe=bool(raw.flags & lib.VGPU_OVERSUBSCRIBE),
        movable=bool(raw.flags & lib.VGPU_MOVABLE),
        kill_on_oom=bool(raw.flags & lib.VGPU_KILL_ON_OOM),
        fills_on_engine=bool(raw.flags & lib.VGPU_FILLS_ON_ENGINE),
        copies_on_sms=bool(raw.flags & lib.VGPU_COPIES_ON_SMS),
    )


def limits_in(data: bytes) -> Limits:
    """The limits in a struct vgpu_limits from a file; raises ValueError when the data is none or makes no sense."""
    ffi, _ = load()
    size = ffi.sizeof("struct vgpu_limits")
    if len(data) != size:
        raise ValueError(f"limits of {len(data)} bytes; allowed: {size}")
    raw = ffi.from_buffer("struct vgpu_limits *", data)
    if raw.card_count > _MAX_CARDS or raw.core_policy >= len(_POLICIES):
        raise ValueError(f"limits of {raw.card_count} cards, policy {raw.core_policy}: these are not valid limits")
    return _limits(raw)


def _kinds(raw: Any) -> dict[str, int]:
    return dict(zip(KINDS, raw, strict=True))


def _card_usage(raw: Any) -> CardUsage:
    return CardUsage(
        used=raw.used,
        host_used=raw.host_used,
        resident=raw.resident,
        lent=raw.lent,
        by_kind=_kinds(raw.by_kind),
        gpu_ns=raw.gpu_ns,
        throttled_ns=raw.throttled_ns,
        launches=raw.launches,
        refused=raw.refused,
        processes=raw.processes,
    )


def _process_usage(raw: Any, cards: int) -> ProcessUsage:
    return ProcessUsage(
        pid=raw.pid,
        slot=raw.slot,
        pid_namespace=raw.pid_namespace,
        start_time=raw.start_time,
        used=tuple(raw.used[0:cards]),
        host=tuple(raw.host[0:cards]),
        resident=tuple(raw.resident[0:cards]),
        by_kind=tuple(_kinds(kinds) for kinds in raw.by_kind[0:cards]),
        gpu_ns=tuple(raw.gpu_ns[0:cards]),
        throttled_ns=tuple(raw.throttled_ns[0:cards]),
        launches=tuple(raw.launches[0:cards]),
    )


class Region:
    """An open region. Several threads may use it; call `close` when no other call runs."""

    def __init__(self, handle: Any, directory: Path) -> None:
        self._handle = handle
        self.directory = directory

    @classmethod
    def create(cls, directory: Path, limits: Limits) -> Self:
        """Makes `limits` (mode 0644) and `usage` (0666) in an existing directory and opens them writable.

        Raises FileExistsError when the directory has a region, FileNotFoundError or NotADirectoryError when there is no
        directory, OSError for other errors of the file system, ValueError for limits that make no sense.
        """
        ffi, lib = load()
        if not directory.is_dir():
            code = errno.ENOTDIR if directory.exists() else errno.ENOENT
            raise OSError(code, "a region needs an existing directory", str(directory))
        raw = ffi.new("struct vgpu_limits *")
        _fill(raw, limits)
        _checked(lib.vgpu_region_create(os.fsencode(directory), raw), directory)
        return cls.open(directory, writable=True)

    @classmethod
    def open(cls, directory: Path, writable: bool = False) -> Self:
        """Maps an existing region. Writable: for set_limits and reap.

        Raises FileNotFoundError, PermissionError, or OSError (EPROTO) for files of another version or boot.
        """
        ffi, lib = load()
        out = ffi.new("vgpu_region **")
        _checked(lib.vgpu_region_open(os.fsencode(directory), writable, out), directory)
        return cls(out[0], directory)

    def _open_handle(self) -> Any:
        if self._handle is None:
            raise ValueError(f"the region of {self.directory} is closed")
        return self._handle

    def limits(self) -> Limits:
        """The limits in force."""
        ffi, lib = load()
        raw = ffi.new("struct vgpu_limits *")
        _checked(lib.vgpu_limits_read(self._open_handle(), raw), self.directory)
        return _limits(raw)

    def set_limits(self, limits: Limits) -> None:
        """Puts new limits in force; running processes see the old or the new limits, never a mixture.

        Raises ValueError for limits that make no sense, OSError (EBADF) when opened read-only.
        """
        ffi, lib = load()
        raw = ffi.new("struct vgpu_limits *")
        _fill(raw, limits)
        _checked(lib.vgpu_limits_write(self._open_handle(), raw), self.directory)

    def lend(self, card: int, amount: int) -> None:
        """From now on, lets the container hold `amount` bytes above its guarantee on a card of the limits.

        If the container holds more, it must move blocks off the card at its next safe point; only movable containers
        can. Raises OSError (EBADF) when opened read-only, (EINVAL) for no such card.
        """
        _, lib = load()
        raw = _natural(amount, "lent")
        _checked(lib.vgpu_lent_write(self._open_handle(), card, raw), self.directory)

    def usage(self) -> Usage:
        """What the container uses now; raises OSError (EPROTO) when the container has truncated its usage file."""
        ffi, lib = load()
        raw = ffi.new("struct vgpu_usage *")
        _checked(lib.vgpu_usage_read(self._open_handle(), raw), self.directory)
        cards = len(self.limits().cards)
        return Usage(
            cards=tuple(_card_usage(card) for card in raw.cards[0:cards]),
            processes=tuple(_process_usage(process, cards) for process in raw.processes[0 : raw.process_count]),
            unhooked=raw.unhooked,
            saturated=raw.saturated,
        )

    def reap(self) -> int:
        """Frees what dead processes hold; returns the number of these processes.

        Raises OSError (EBADF) when opened read-only.
        """
        _, lib = load()
        return _checked(lib.vgpu_region_reap(self._open_handle()), self.directory)

    def debit(self, card: int, gpu_ns: int) -> None:
        """Charges GPU time on a card that was used and not charged: the next launches pay it back.

        These launches wait ten seconds at most for it. Raises OSError (EBADF) when opened read-only, (EINVAL) for no
        such card.
        """
        _, lib = load()
        _checked(lib.vgpu_region_debit(self._open_handle(), card, _natural(gpu_ns, "gpu_ns")), self.directory)

    def charge_overhead(self, card: int, amount: int) -> None:
        """Sets this handle's charge on a card of the limits to `amount` bytes, even above the limit; ends with `close`.

        It is for memory that the driver took for processes and that they have not charged. Raises OSError (EBADF) when
        opened read-only, (EINVAL) for no such card, (ENOSPC) when no slot is left.
        """
        _, lib = load()
        raw = _natural(amount, "overhead")
        _checked(lib.vgpu_region_charge_overhead(self._open_handle(), card, raw), self.directory)

    def close(self) -> None:
        """Unmaps the files; a second call has no effect."""
        _, lib = load()
        if self._handle is not None:
            lib.vgpu_region_close(self._handle)
            self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
