"""Files that are replaced in one step, so that a reader or a crash meets the old one or the new one."""

import os
import tempfile
from pathlib import Path


def replace(target: Path, content: bytes, mode: int) -> None:
    """Replaces `target` in one step: temporary file in the same folder, fsync, rename."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def link(target: Path, place: Path) -> None:
    """Makes or repoints the symbolic link `place` in one step."""
    if place.is_symlink() and place.readlink() == target:
        return
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(place)
