"""The arbiter of a machine: tells each container how much of its cards it may use now (vgpu/agent.h has the details).

C code does the work in its own thread, which holds no lock of the interpreter.
"""

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from vgpu.native.binding import load

log = logging.getLogger(__name__)


class ArbiterState(msgspec.Struct, frozen=True):
    """The amount of work of the arbiter."""

    passes: int  #: looks at all containers since the start
    cpu_ns: int  #: CPU time of these looks
    containers: int  #: containers at the last look
    active: int  #: containers with work on some card


class Arbiter:
    """Follows regions and writes into their limits; libraries notice its end within a second. Thread-safe."""

    def __init__(self) -> None:
        ffi, lib = load()
        handle = lib.vgpu_arbiter_new()
        if handle == ffi.NULL:
            raise MemoryError("not enough memory for the arbiter")
        self._handle: Any = handle
        self._lock = threading.Lock()
        self._followed: frozenset[Path] = frozenset()
        self._failed: dict[Path, int] = {}
        self._thread = threading.Thread(target=lib.vgpu_arbiter_run, args=(handle,), name="arbiter", daemon=True)

    def start(self) -> None:
        """Begins to look at the containers, in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the looks and releases all containers; a second call has no effect.

        After that, no other method works.
        """
        _, lib = load()
        if self._handle is None:
            return
        lib.vgpu_arbiter_stop(self._handle)
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            lib.vgpu_arbiter_free(self._handle)
            self._handle = None

    def _open_handle(self) -> Any:
        if self._handle is None:
            raise ValueError("the arbiter has been stopped")
        return self._handle

    def look(self) -> None:
        """One look at all containers, for a caller that does not use `start`."""
        _, lib = load()
        lib.vgpu_arbiter_look(self._open_handle())

    def follow(self, directories: Iterable[Path]) -> None:
        """Follows only these regions from now on; a recreated region in the same place counts as new.

        A directory without a usable region is skipped with a log line; the next call tries it again.
        """
        _, lib = load()
        wanted = frozenset(directories)
        with self._lock:
            handle = self._open_handle()
            for gone in self._followed - wanted:
                lib.vgpu_arbiter_detach(handle, os.fsencode(gone))
            failed = {}
            for directory in wanted:
                result = lib.vgpu_arbiter_attach(handle, os.fsencode(directory))
                if result < 0:
                    failed[directory] = result
                    if self._failed.get(directory) != result:
                        log.debug("cannot follow %s: %s", directory, os.strerror(-result))
            self._failed = failed
            self._followed = wanted

    def state(self) -> ArbiterState:
        """The work so far."""
        ffi, lib = load()
        raw = ffi.new("struct vgpu_arbiter_state *")
        lib.vgpu_arbiter_state(self._open_handle(), raw)
        return ArbiterState(raw.passes, raw.cpu_ns, raw.containers, raw.active)
