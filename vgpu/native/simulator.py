"""What the simulator's cards really hold and really ran, for tests, `vgpu demo` and `vgpu top`.

Mirrors libvgpu/include/vgpu/simulator.h. Memory in bytes, time in nanoseconds, cards by their index in the state
directory.
"""

import errno
import os
from pathlib import Path

import msgspec

from vgpu.native.binding import c_string, load

_MAX_PROCESSES = 1024  # SIM_SLOTS of libvgpu/simulator/common/state.h


class SimCard(msgspec.Struct, frozen=True):
    """One simulated card."""

    uuid: str
    model: str
    memory: int  #: bytes that CUDA can use; NVML's total is this + reserved
    reserved: int
    context_bytes: int  #: bytes of one context
    module_bytes: int  #: bytes of one loaded module
    used: int  #: bytes of all living processes
    peak: int  #: largest `used` since the state was made
    busy_ns: int  #: time in which a kernel ran
    switches: int  #: changes from one process to another
    processes: int  #: number of processes that hold a context or memory
    host: int  #: driver's host memory that living processes have for this card: pinned, registered, physical


class SimProcess(msgspec.Struct, frozen=True):
    """One process that used simulated cards; tuples have one entry per card."""

    pid: int  #: pid as the process itself sees it
    alive: bool  #: the process, or a child that inherited the memory, still holds the process's memory
    start_time: int  #: clock ticks since boot
    used: tuple[int, ...]  #: 0 for a dead process
    peak: tuple[int, ...]
    busy_ns: tuple[int, ...]  #: time in which at least one kernel of the process really ran
    waited_ns: tuple[int, ...]  #: time in which work of the process did not run, because other processes had their turn
    launches: tuple[int, ...]
    host: tuple[int, ...]  #: driver's host memory, by the card for which it exists; 0 for a dead process
    host_peak: tuple[int, ...]
    faults: tuple[int, ...]  #: launches whose memory did not exist, or was unmapped before the launches ended


def profiles() -> list[str]:
    """Names of the boards that can be simulated, as VGPU_SIMULATE accepts them."""
    ffi, lib = load()
    text: bytes = ffi.string(lib.vgpu_sim_profiles())
    return text.decode().split(",")


def drivers() -> list[str]:
    """CUDA versions of the drivers that can be simulated, newest first: the DRIVER of PROFILExN@DRIVER."""
    ffi, lib = load()
    text: bytes = ffi.string(lib.vgpu_sim_drivers())
    return text.decode().split(",")


def _check(result: int, directory: Path) -> int:
    if result >= 0:
        return result
    if result == -errno.ENOENT:
        raise FileNotFoundError(errno.ENOENT, "no simulator state", str(directory))
    if result == -errno.EPROTO:
        raise ValueError(f"{directory}/state is not the state of this version's simulator: remove the directory")
    raise OSError(-result, os.strerror(-result), str(directory))


def create(directory: Path, spec: str) -> None:
    """Makes the state directory of `spec` (PROFILE[xN][@DRIVER]); does nothing when it exists for the same spec.

    Raises ValueError for a spec that names no board, no driver or too many cards, FileExistsError when the directory
    simulates something else, OSError when it cannot be made.
    """
    _, lib = load()
    result: int = lib.vgpu_sim_create(os.fsencode(directory), spec.encode())
    if result == -errno.EINVAL:
        allowed = (
            f"{', '.join(profiles())}, each with xN for N cards up to {lib.VGPU_SIM_MAX_CARDS} "
            f"and @ with a driver of {', '.join(drivers())}"
        )
        raise ValueError(f"simulator profile {spec!r} is unknown: one of {allowed}")
    if result == -errno.EEXIST:
        raise FileExistsError(errno.EEXIST, f"the directory simulates other cards than {spec}", str(directory))
    _check(result, directory)


def cards(directory: Path) -> list[SimCard]:
    """The cards of a state directory; raises FileNotFoundError when the directory is not there."""
    ffi, lib = load()
    views = ffi.new("struct vgpu_sim_card[]", lib.VGPU_SIM_MAX_CARDS)
    count = _check(lib.vgpu_sim_cards(os.fsencode(directory), views, len(views)), directory)
    return [
        SimCard(
            uuid=c_string(view.uuid),
            model=c_string(view.model),
            memory=view.memory,
            reserved=view.reserved,
            context_bytes=view.context_bytes,
            module_bytes=view.module_bytes,
            used=view.used,
            peak=view.peak,
            busy_ns=view.busy_ns,
            switches=view.switches,
            processes=view.processes,
            host=view.host,
        )
        for view in views[0:count]
    ]


def processes(directory: Path) -> list[SimProcess]:
    """The processes that a state directory remembers, also dead ones.

    Raises FileNotFoundError when the directory is not there.
    """
    ffi, lib = load()
    wide = ffi.new("struct vgpu_sim_card[]", lib.VGPU_SIM_MAX_CARDS)
    present = _check(lib.vgpu_sim_cards(os.fsencode(directory), wide, len(wide)), directory)
    views = ffi.new("struct vgpu_sim_process[]", _MAX_PROCESSES)
    count = _check(lib.vgpu_sim_processes(os.fsencode(directory), views, len(views)), directory)
    return [
        SimProcess(
            pid=view.pid,
            alive=bool(view.alive),
            start_time=view.start_time,
            used=tuple(view.used[0:present]),
            peak=tuple(view.peak[0:present]),
            busy_ns=tuple(view.busy_ns[0:present]),
            waited_ns=tuple(view.waited_ns[0:present]),
            launches=tuple(view.launches[0:present]),
            host=tuple(view.host[0:present]),
            host_peak=tuple(view.host_peak[0:present]),
            faults=tuple(view.faults[0:present]),
        )
        for view in views[0:count]
    ]


def inject_xid(directory: Path, card: int, xid: int) -> None:
    """Makes a card report an XID to every process that waits for NVML events; 0 takes the XID back.

    Raises IndexError for an unknown card.
    """
    _, lib = load()
    result: int = lib.vgpu_sim_inject_xid(os.fsencode(directory), card, xid)
    if result == -errno.ENODEV:
        raise IndexError(f"{directory} has no card {card}")
    _check(result, directory)


def inject_error(directory: Path, entry: str, code: int, nth: int = 1) -> None:
    """Makes the `nth` call of an entry point from now on return `code`, once, in any process.

    `entry` is an exported name of either library, such as cuMemAlloc_v2 or nvmlDeviceGetCount_v2; nvmlInitWithFlags
    stands for every form of nvmlInit. A call counts for every entry point that it passes through. An entry has one
    error at a time: the last one. Raises ValueError for a code or a number below 1 or a name that is too long, OSError
    when 32 entries have an error.
    """
    if code < 1 or nth < 1:
        raise ValueError(f"{entry}: code {code} of call {nth}: both must be 1 or more")
    _inject_error(directory, entry, nth, code)


def clear_errors(directory: Path, entry: str = "") -> None:
    """Removes the error that was injected into `entry`, or all injected errors if `entry` is empty."""
    _inject_error(directory, entry, 0, 0)


def _inject_error(directory: Path, entry: str, nth: int, code: int) -> None:
    _, lib = load()
    result: int = lib.vgpu_sim_inject_error(os.fsencode(directory), entry.encode(), nth, code)
    if result == -errno.EINVAL:
        raise ValueError(f"{entry!r} is not the name of an entry point")
    _check(result, directory)
