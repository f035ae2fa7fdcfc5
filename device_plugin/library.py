"""The intercept library on the host: file names contain a hash of the content, and a mounted file never changes.

When the source of a mount is missing, the runtime creates an empty directory. Then the loader ignores the preload, and
the container runs without limits. So the agent checks every source before a container starts.
"""

import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from device_plugin import files
from device_plugin.refusal import Refusal
from vgpu import names
from vgpu.native.region import REGION_ABI

log = logging.getLogger(__name__)

_LIBRARY: Final = re.compile(r"libvgpu-([0-9a-f]{16})\.so")
_SIMULATOR: Final = re.compile(r"simulator-([0-9a-f]{16})")
_PRELOAD: Final = "ld.so.preload"
_PRELOAD_TEXT: Final = f"{names.LIBRARY_PATH}\n".encode()


class Rollout(msgspec.Struct, frozen=True):
    """The files that the containers of this agent get."""

    library: Path
    preload: Path
    simulator: Path | None = None  #: folder of the simulator's libraries

    def sources(self) -> tuple[Path, ...]:
        return (self.library, self.preload) + ((self.simulator,) if self.simulator else ())


def install(folder: Path, library: Path, simulator: Path | None = None) -> Rollout:
    """Puts the files into `folder` where they are not there yet; raises OSError naming the path."""
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    content = library.read_bytes()
    target = folder / f"libvgpu-{_digest(content)}.so"
    _place(target, content, 0o755)
    _place(_abi_file(target), f"{REGION_ABI}\n".encode(), 0o644)
    preload = folder / _PRELOAD
    _place(preload, _PRELOAD_TEXT, 0o644)
    return Rollout(target, preload, _install_folder(folder, simulator) if simulator else None)


def verify(source: Path) -> None:
    """Raises Refusal unless a mount source of ours exists and is unharmed; other names are not checked."""
    if source.name == _PRELOAD:
        sound = _is_file(source) and source.read_bytes() == _PRELOAD_TEXT
    elif match := _LIBRARY.fullmatch(source.name):
        sound = _is_file(source) and _digest(source.read_bytes()) == match[1]
        if sound and os.statvfs(source).f_flag & os.ST_NOEXEC:
            # The loader would report that it cannot map the library, and go on without it.
            raise Refusal(
                f"{source.parent} on the node is mounted noexec: the container would run without limits; choose "
                "another folder with global.gpuHookPath"
            )
    elif match := _SIMULATOR.fullmatch(source.name):
        sound = source.is_dir() and _folder_digest(source) == match[1]
    else:
        return
    if not sound:
        raise Refusal(
            f"{source} on the node is missing or changed: the container would run without limits", transient=True
        )


def reads_regions(source: Path) -> bool:
    """Whether a library among the mount sources understands the regions of this agent; other names are not checked."""
    if not _LIBRARY.fullmatch(source.name):
        return True
    try:
        return _abi_file(source).read_text() == f"{REGION_ABI}\n"
    except OSError:
        return False  # a library of an agent from before such files existed, or a removed file


def _abi_file(library: Path) -> Path:
    """The file next to a library with the version of the regions that the library reads."""
    return library.with_suffix(".abi")


def prune(folder: Path, unnamed: Collection[Path]) -> list[Path]:
    """Removes those versions in `unnamed` that neither cached answers nor CDI specs name."""
    removed = []
    for entry in folder.iterdir():
        if entry not in unnamed or not (_LIBRARY.fullmatch(entry.name) or _SIMULATOR.fullmatch(entry.name)):
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
            _abi_file(entry).unlink(missing_ok=True)
        removed.append(entry)
        log.info("removed %s: no container uses it", entry)
    return removed


def _sweep(folder: Path) -> None:
    """Removes the remains of an agent that was killed during a rollout; only one agent works on a folder."""
    for entry in folder.iterdir():
        if entry.name.startswith((".libvgpu-", ".simulator-", f".{_PRELOAD}.")):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def _place(target: Path, content: bytes, mode: int) -> None:
    if target.is_dir() and not target.is_symlink():  # a runtime creates a folder for a missing mount source
        target.rmdir()
    if not (_is_file(target) and target.read_bytes() == content):
        files.replace(target, content, mode)


def _install_folder(folder: Path, source: Path) -> Path:
    target = folder / f"simulator-{_folder_digest(source)}"
    if target.is_dir() and _folder_digest(target) == target.name.partition("-")[2]:
        return target
    shutil.rmtree(target, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    for file in source.iterdir():
        shutil.copyfile(file, temporary / file.name)
        (temporary / file.name).chmod(0o755)
    temporary.chmod(0o755)
    temporary.rename(target)
    return target


def _is_file(path: Path) -> bool:
    """Whether this is a regular file that every user (so also the loader) can read, and only its owner can change."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and mode & 0o444 == 0o444 and not mode & 0o022


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(f"{file.name}\0{_digest(file.read_bytes())}\n".encode())
    return digest.hexdigest()[:16]
