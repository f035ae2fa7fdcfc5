"""Results that are made once and used by all later runs: folders named by their content and the hash of their recipe.

The place is `$VGPU_CACHE`, else `vgpu` in `$XDG_CACHE_HOME` or `~/.cache`. A rename makes a folder appear once it is
complete. So a killed run leaves no incomplete folder, and of two runs at once one makes the folder while the other
waits.
"""

import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

KEEP_DAYS: Final = 7  #: an entry that was not used for this long is removed when another entry of its name is made

KEEP: Final = 4  #: number of entries of one name: the most recently used


def root() -> Path:
    """The folder of all entries; made if absent."""
    chosen = os.environ.get("VGPU_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vgpu"
    folder = (Path(chosen) if chosen else base) / "cluster"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def digest(parts: Iterable[str | bytes | Path]) -> str:
    """Twelve hexadecimal digits for texts and the contents of files, in their order."""
    found = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        found.update(f"{len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Runs one process at a time; the lock ends with its process."""
    with (root() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def entry(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder `<name>-<key>`; where it is missing, `make` fills an empty folder, which then gets this name."""
    target = root() / f"{name}-{key}"
    if target.is_dir():
        os.utime(target)
        return target
    with alone(name):
        if target.is_dir():
            return target
        for half in root().glob(f".{name}-*.half"):
            shutil.rmtree(half)
        half = root() / f".{name}-{key}.half"
        half.mkdir()
        begin = time.monotonic()
        make(half)
        half.rename(target)
        os.utime(target)
        print(f"     {name}: made in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        kept = sorted(root().glob(f"{name}-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for number, old in enumerate(kept):
            if number >= KEEP or old.stat().st_mtime < time.time() - KEEP_DAYS * 86400:
                shutil.rmtree(old)
    return target
