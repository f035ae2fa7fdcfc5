"""What is made once and used by all later runs: folders named by what they hold and the hash of how it is made.

`$VGPU_CACHE`, else `vgpu` in `$XDG_CACHE_HOME` or `~/.cache`. A folder appears by a rename once it is whole, so a
run that was killed leaves nothing that counts, and of two runs at once one makes it and the other waits.
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

KEEP_DAYS: Final = 7  #: what was not used for so long goes when something of its name is made

KEEP: Final = 4  #: entries of one name: those that were used last


def root() -> Path:
    """The folder of everything that is kept; made if absent."""
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
    """One process at a time; the lock ends with its process."""
    with (root() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def entry(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder `<name>-<key>`; where there is none, `make` fills an empty one, which then takes its place."""
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
