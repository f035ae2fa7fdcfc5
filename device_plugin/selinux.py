"""SELinux labels of the files that containers mount.

Without these labels a confined container can neither read its limits nor load the library. A library that is not loaded
limits nothing.

Source: container-selinux, container_file_t: files that every confined container may use; level s0 is below all
container levels.
"""

import os
from pathlib import Path
from typing import Final

SELINUX: Final = "sys/fs/selinux"  #: below the host's root; its file `enforce` is there where SELinux is on
ATTRIBUTE: Final = "security.selinux"
CONTAINER_FILE: Final = "system_u:object_r:container_file_t:s0"


class Labels:
    """Does nothing where SELinux is off."""

    def __init__(self, host_root: Path) -> None:
        self.on = (host_root / SELINUX / "enforce").exists()

    def put(self, path: Path) -> None:
        """Labels a file, or a folder with all that is in it; raises OSError naming the path."""
        if not self.on:
            return
        for each in [path, *(path.rglob("*") if path.is_dir() else ())]:
            if _label(each) != CONTAINER_FILE:
                os.setxattr(each, ATTRIBUTE, CONTAINER_FILE.encode() + b"\0", follow_symlinks=False)


def _label(path: Path) -> str:
    try:
        return os.getxattr(path, ATTRIBUTE, follow_symlinks=False).rstrip(b"\0").decode()
    except OSError:
        return ""
