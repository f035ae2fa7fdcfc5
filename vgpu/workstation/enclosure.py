"""`vgpu run --strict`: a mount namespace in which the dynamic linker preloads the library for any environment.

The command sees an /etc of its own, which it cannot write. The `ld.so.preload` there names the library (ld.so(8)), and
the region is next to it. Even programs that start without their environment, such as by `env -i`, then keep their
limits. A user who may not mount gets a user namespace with only this user in it: setuid programs have no rights there.

`vgpu run` executes this file as a program of its own, and this program executes the command. Only a process with one
thread can make a user namespace, and libraries that `vgpu run` has loaded may have started threads. This file needs
only the standard library.
"""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = "/etc/vgpu-slice"  #: as in libvgpu/src/ledger/attach.c
_PRELOAD: Final = "ld.so.preload"
_NEW_MOUNTS: Final = 0x0002_0000  # CLONE_NEWNS, CLONE_NEWUSER: unshare(2)
_NEW_USERS: Final = 0x1000_0000
_READ_ONLY: Final = 0x1
_REMOUNT: Final = 0x20
_DETACH: Final = 2  # MNT_DETACH: umount2(2)
_BIND: Final = 0x1000  # MS_BIND, MS_REC, MS_SLAVE: mount(2)
_WITH_ALL_BELOW: Final = 0x4000
_SLAVE: Final = 0x8_0000


def through(region: Path, library: Path, program: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `program` in the namespace, with the arguments of `command`.

    `region`: folder of limits and usage.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(region), str(library), program, *command]


def enclose(region: Path, library: Path) -> None:
    """Moves this process into the namespace; raises OSError where the kernel forbids it."""
    user, group = os.geteuid(), os.getegid()
    back = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _unshare(_NEW_MOUNTS | (_NEW_USERS if user else 0))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _mount("none", "/", "", _WITH_ALL_BELOW | _SLAVE)
        _own_etc(region, library)
        os.fchdir(back)
    finally:
        os.close(back)


def _own_etc(region: Path, library: Path) -> None:
    below = sorted(_mounts_below("/etc/"))
    work = region / "strict"
    work.mkdir(mode=0o755, exist_ok=True)
    _mount("tmpfs", str(work), "tmpfs", 0, "mode=755")
    os.chdir(work)  # so that no path is in the options of a mount, where some characters have a meaning
    for folder in ("old", "top", f"top/{Path(FOLDER).name}"):
        Path(folder).mkdir(mode=0o755)
    _mount("/etc", "old", "", _BIND | _WITH_ALL_BELOW)
    _mount("none", "old", "", _BIND | _REMOUNT | _READ_ONLY)
    there = Path("old", _PRELOAD)
    others = there.read_text(errors="surrogateescape") if there.exists() else ""
    Path("top", _PRELOAD).write_text(f"{library}\n{others}", errors="surrogateescape")
    _mount("overlay", "/etc", "overlay", _READ_ONLY, "lowerdir=top:old")
    for place in below:
        _mount(f"old/{place.removeprefix('/etc/')}", place, "", _BIND | _WITH_ALL_BELOW)
    # A process that later removes the region must not find the machine's own /etc in it.
    _detach(str(work))
    # The folder, not its files: separately mounted files are the sign of an agent's container.
    _mount(str(region), FOLDER, "", _BIND)


def _mounts_below(prefix: str) -> list[str]:
    """Mount points in a folder.

    Source: proc(5), mountinfo: the fifth field, where octal escapes stand for blanks.
    """
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        place = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line.split()[4])
        if place.startswith(prefix.encode()):
            found.append(os.fsdecode(place))
    return found


def _checked(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _unshare(flags: int) -> None:
    _checked(ctypes.CDLL(None, use_errno=True).unshare(flags))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    mount = ctypes.CDLL(None, use_errno=True).mount
    mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    texts = [os.fsencode(text) or None for text in (source, target, kind, data)]
    _checked(mount(texts[0], texts[1], texts[2], flags, texts[3]))


def _detach(target: str) -> None:
    _checked(ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(target), _DETACH))


def main(arguments: Sequence[str]) -> int:
    """Executes the command; on failure, writes a line to stderr and returns an exit code."""
    region, library, program, *command = arguments
    try:
        enclose(Path(region), Path(library))
    except OSError as error:
        print(
            f"vgpu run: --strict: this machine does not let user {os.geteuid()} create a mount namespace "
            f"({error.strerror}): leave --strict out, or let an administrator allow user namespaces",
            file=sys.stderr,
        )
        return 1
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # as in vgpu.workstation.run.become
    try:
        os.execv(program, command)
    except OSError as error:
        print(f"vgpu run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 126


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
