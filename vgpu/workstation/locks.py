"""Locks that die with their holder: flock(2), held by an open file description and everybody who inherited it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock on `path` (made if absent), waiting for it. The file stays.

    FileNotFoundError: its folder is not there, or was removed while this waited.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(descriptor, path):  # else it was removed meanwhile, and others lock the next one
                os.utime(descriptor)  # what is used is not old for those who clean up
                yield
                return
        finally:
            os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether what is open is still what has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def hold(path: Path) -> int:
    """Makes `path` and locks it; returns the close-on-exec descriptor with the lock. FileExistsError if there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def hold_folder(path: Path) -> int:
    """Locks a folder; returns the close-on-exec descriptor with the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(path: Path) -> bool:
    """Whether anybody holds the lock on `path`; an absent file is held by nobody."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
