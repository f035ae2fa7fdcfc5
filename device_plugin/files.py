"""Files that are replaced in one step: a reader, or the state after a crash, sees either the old or the new file."""

import os
import shutil
import tempfile
from pathlib import Path


def replace(target: Path, content: bytes, mode: int) -> None:
    """Replaces `target` in one step: temporary file in the same folder, fsync, rename; OSError names the path."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(target)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        # an error of a descriptor has no name, for example when the disk is full
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(target)) from None
        raise


def link(target: Path, place: Path) -> None:
    """Makes or repoints the symbolic link `place` in one step.

    A folder at this place is removed: a runtime creates one for a missing mount source.
    """
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    if place.is_symlink() and place.readlink() == target:
        return
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(place)
