"""Locks that end with their holder: flock(2).

The lock belongs to an open file description, so every process that inherited the descriptor holds it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock on `path` (made if absent), and waits for it if needed. The file stays.

    FileNotFoundError: its folder does not exist, or was removed during the wait.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if is_at(descriptor, path):  # else the file was removed meanwhile, and others lock a new file
                os.utime(descriptor)  # cleaners of old files then see that the file is in use
                yield
                return
        finally:
            os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether this name still means the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def hold(path: Path) -> int:
    """Makes `path` and locks it; returns the close-on-exec descriptor with the lock.

    FileExistsError if `path` exists.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def hold_folder(path: Path) -> int:
    """Locks a folder; returns the close-on-exec descriptor with the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def is_held(path: Path) -> bool:
    """Whether any process holds the lock on `path`; for an absent file, no."""
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
