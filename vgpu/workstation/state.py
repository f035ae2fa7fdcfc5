"""The state directory of this machine's commands, and what the kernel reports about their processes."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from vgpu import names
from vgpu.errors import UserError

ROOT_DIR = Path("/run/vgpu/local")
USERS_DIR = Path("/tmp")  #: neither $TMPDIR nor a session's folder: all sessions of a user share one state


def state_dir() -> Path:
    """The state directory of this user, made if absent.

    Raises UserError when the directory belongs to another user or is open to others.

    The path is $VGPU_STATE_DIR, else /run/vgpu/local for root, else /tmp/vgpu-<uid>. It is the same for everything that
    a user starts (shells, cron, batch systems). It outlives the session, whose end removes $XDG_RUNTIME_DIR. Root's
    directory is readable for all: root's commands may change their user, and must still reach their region.
    """
    chosen = os.environ.get(names.ENV_STATE_DIR)
    user = os.getuid()
    if chosen:
        try:
            path = Path(chosen).resolve()
        except FileNotFoundError:
            raise UserError(
                f"{names.ENV_STATE_DIR} is {chosen!r}, and the current directory was removed: write an absolute path"
            ) from None
    elif user == 0:
        path = ROOT_DIR
    else:
        path = USERS_DIR / f"vgpu-{user}"
    mode = 0o755 if user == 0 else 0o700
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=mode)
    except OSError as error:
        raise UserError(
            f"cannot create {path}: {error.strerror}; choose another place with ${names.ENV_STATE_DIR}, "
            "the same for all of your commands"
        ) from None
    found = path.lstat()  # not stat: in /tmp, any user may have put a symbolic link here
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
        raise UserError(
            f"{path} must be a directory that belongs to user {user} and that only this user may write; "
            f"choose another one with ${names.ENV_STATE_DIR}, the same for all of your commands"
        )
    return path


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process (proc(5), stat field 22); None when there is no such process.

    Start time and pid together identify a process for ever: pids are used again.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def carriers(name: str, value: str) -> list[int]:
    """Processes that were started with `name=value` in their environment, as far as this user can see them."""
    wanted = f"\0{name}={value}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's process
            continue
        if wanted in b"\0" + environment:
            found.append(int(entry.name))
    return sorted(found)
