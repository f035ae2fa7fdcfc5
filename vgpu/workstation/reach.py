"""Which commands start programs that the library does not reach, as far as can be seen before they start."""

import os
import re
import shlex
import shutil
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Programs that start others and hand their environment on
_TRANSPARENT: Final = frozenset(
    ("nice", "nohup", "timeout", "setsid", "stdbuf", "taskset", "numactl", "ionice", "chrt", "time", "exec", "prlimit")
)
_SHELLS: Final = frozenset(["sh", "bash", "dash", "zsh", "ksh"])
CLEARED: Final = "starts its program without LD_PRELOAD"  #: in answers that `--strict` makes wrong
_BY_OTHERS: Final = "lets another process start its program, outside this slice"
_ALWAYS: Final = {
    **dict.fromkeys(("sudo", "su", "doas", "pkexec", "runuser", "machinectl"), CLEARED),
    **dict.fromkeys(("ssh", "at", "batch", "crontab", "systemd-run", "srun", "sbatch", "qsub", "bsub"), _BY_OTHERS),
    **dict.fromkeys(("docker", "podman", "nerdctl", "kubectl", "lxc", "lxc-attach", "incus"), _BY_OTHERS),
    **dict.fromkeys(("snap", "flatpak"), "runs its program in a sandbox that has other libraries"),
    "chroot": "runs its program under another root directory, where the library may not be",
}
_DEEPEST: Final = 8  #: wrappers around wrappers
_SETTING: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_AMOUNT: Final = re.compile(r"[0-9.,:x-]+[a-z]?")
_ELF64: Final = b"\x7fELF\x02\x01"
_ELF32: Final = b"\x7fELF\x01"
_PT_INTERP: Final = 3  # elf(5)


def doubt(command: Sequence[str]) -> str:
    """Why the limits will not hold for a program that `command` starts, as half a sentence; empty: nothing is known."""
    words = list(command)
    for _ in range(_DEEPEST):
        if not words:
            return ""
        name = os.path.basename(words[0])
        if name == "env":
            if cleared := _clears(words[1:]):
                return f"{cleared} {CLEARED}"
            words = _inner(words[1:])
        elif name in _TRANSPARENT:
            words = _inner(words[1:])
        elif name in _SHELLS and "-c" in words[1:3] and (rest := words[words.index("-c") + 1 :]):
            with suppress(ValueError):
                words = _inner(shlex.split(rest[0]))
                continue
            return ""
        elif name in _ALWAYS:
            return f"{name} {_ALWAYS[name]}"
        elif name.startswith("snap.") or words[0].startswith("/snap/bin/"):
            return f"{name} {_ALWAYS['snap']}"
        else:
            return _of_file(words[0])
    return ""


def _inner(words: Sequence[str]) -> list[str]:
    """What a wrapper starts: behind its options, their amounts, and settings of variables."""
    for at, word in enumerate(words):
        if not (word.startswith("-") or _AMOUNT.fullmatch(word) or _SETTING.fullmatch(word)):
            return list(words[at:])
    return []


def _clears(words: Sequence[str]) -> str:
    """`env` with what it does to the environment, where that drops LD_PRELOAD."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word == "-" or word == "--ignore-environment" or re.fullmatch(r"-[0v]*i.*", word):
            return f"env {word}"
        if word in ("-u", "--unset") and following == "LD_PRELOAD":
            return f"env {word} LD_PRELOAD"
        if word in ("-uLD_PRELOAD", "--unset=LD_PRELOAD", "LD_PRELOAD="):
            return f"env {word}"
        if not word.startswith("-") and not _SETTING.fullmatch(word) and not (at and words[at - 1] in ("-u", "-C")):
            return ""
    return ""


def _of_file(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        return ""
    try:
        status = os.stat(path)
        with Path(path).open("rb") as file:
            start = file.read(4096)
            if start.startswith(b"#!"):
                return ""  # the kernel heeds neither its rights nor ours; its interpreter is a usual one
            if not start.startswith((_ELF32, _ELF64)):
                return ""
            interpreter = _interpreter(start) if start.startswith(_ELF64) else None
    except OSError:
        return ""
    if start.startswith(_ELF32):
        return f"{name} is a 32-bit program, which cannot load the library"
    if interpreter == "":
        return f"{name} is linked statically, so it does not load the library"
    if interpreter and "musl" in interpreter:
        return f"{name} is linked with musl, which does not load the library"
    raised = (status.st_mode & stat.S_ISUID and status.st_uid != os.geteuid()) or (
        status.st_mode & stat.S_ISGID and status.st_gid != os.getegid()
    )
    with suppress(OSError):
        raised = raised or (os.geteuid() != 0 and bool(os.getxattr(path, "security.capability")))
    return f"{name} runs with rights of its own (setuid, setgid or capabilities), so {_IGNORED}" if raised else ""


_IGNORED: Final = "the dynamic linker ignores LD_PRELOAD"


def _interpreter(start: bytes) -> str | None:
    """The dynamic linker that an ELF file names; empty: none; None: it cannot be told from these bytes (elf(5))."""
    try:
        table, entry, count = (*struct.unpack_from("<Q", start, 32), *struct.unpack_from("<HH", start, 54))
        for at in range(count):
            kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", start, table + at * entry)
            if kind == _PT_INTERP:
                return start[offset : offset + size].rstrip(b"\0").decode("utf-8", "replace") or None
    except (struct.error, OverflowError):
        return None
    return ""
