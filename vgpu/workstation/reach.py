"""Finds commands that start programs without the library, as far as this is visible before they start."""

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

#: Programs that start other programs with the same environment
_TRANSPARENT: Final = frozenset(
    ("nice", "nohup", "timeout", "setsid", "stdbuf", "taskset", "numactl", "ionice", "chrt", "time", "exec", "prlimit")
)
#: Options of these programs and of `env` whose value is a separate word and not a program
_VALUED: Final = {
    "env": ("-u", "--unset", "-C", "--chdir"),
    "timeout": ("-s", "--signal", "-k", "--kill-after"),
    "stdbuf": ("-i", "--input", "-o", "--output", "-e", "--error"),
    "numactl": ("-N", "--cpunodebind", "-m", "--membind", "-i", "--interleave", "-C", "--physcpubind"),
    "exec": ("-a",),
    "time": ("-f", "--format", "-o", "--output"),
}
_SHELLS: Final = frozenset(["sh", "bash", "dash", "zsh", "ksh"])
_SHELL_VALUED: Final = re.compile(r"[-+][a-zA-Z]*[oO]|--(rcfile|init-file)")
#: Shell words that come before a command
_BEFORE: Final = frozenset(("if", "then", "elif", "else", "while", "until", "do", "!", "{"))
CLEARED: Final = "starts its program without LD_PRELOAD"  #: part of answers that `--strict` makes wrong
_BY_OTHERS: Final = "lets another process start its program, outside this slice"
_OTHER_ROOT: Final = "runs its program under another root directory, where the library may not be"
_ALWAYS: Final = {
    **dict.fromkeys(("sudo", "su", "doas", "pkexec", "runuser", "machinectl"), CLEARED),
    **dict.fromkeys(("ssh", "at", "batch", "crontab", "systemd-run", "run0"), _BY_OTHERS),
    **dict.fromkeys(("srun", "sbatch", "qsub", "bsub"), _BY_OTHERS),
    **dict.fromkeys(("docker", "podman", "nerdctl", "kubectl", "lxc", "lxc-attach", "incus"), _BY_OTHERS),
    **dict.fromkeys(("snap", "flatpak"), "runs its program in a sandbox that has other libraries"),
    **dict.fromkeys(("chroot", "bwrap", "proot", "apptainer", "singularity", "enroot", "ch-run"), _OTHER_ROOT),
}
_DEEPEST: Final = 8  #: wrappers around wrappers
_SETTING: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_AMOUNT: Final = re.compile(r"[0-9.,:x-]+[a-z]?")
_MASK: Final = re.compile(r"(0x)?[0-9a-fA-F]+")
#: A new LD_PRELOAD without the library; a value that the shell expands may contain it
_REPLACED: Final = re.compile(r"LD_PRELOAD=(?!.*(\$|libvgpu)).*", re.DOTALL)
_EXPANDED: Final = re.compile(r"\$\([^()]*\)|`[^`]*`")
_ELF64: Final = b"\x7fELF\x02\x01"
_ELF32: Final = b"\x7fELF\x01"
_PT_INTERP: Final = 3  # elf(5)


def doubt(command: Sequence[str]) -> str:
    """Why the limits will not hold for a program that `command` starts, as half a sentence.

    Empty: no reason is known.
    """
    words = list(command)
    for _ in range(_DEEPEST):
        if not words:
            return ""
        name = os.path.basename(words[0])
        if name == "env":
            if cleared := _clears(words[1:]):
                return cleared
            words = _inner(name, words[1:])
        elif name in _TRANSPARENT:
            words = _inner(name, words[1:])
        elif name in _SHELLS and (line := _line(words[1:])):
            return _of_line(name, line)
        elif name in _ALWAYS:
            return f"{name} {_ALWAYS[name]}"
        elif name.startswith("snap.") or words[0].startswith("/snap/bin/"):
            return f"{name} {_ALWAYS['snap']}"
        else:
            return _of_file(words[0])
    return ""


def _inner(name: str, words: Sequence[str]) -> list[str]:
    """The command that the wrapper `name` starts: after its options, their values, and settings of variables."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _VALUED.get(name, ()):
            left = left[1:]
        elif name == "taskset" and _MASK.fullmatch(word):
            continue
        elif not (word.startswith("-") or _AMOUNT.fullmatch(word) or _SETTING.fullmatch(word)):
            return [word, *left]
    return []


def _line(words: Sequence[str]) -> str:
    """The text after a shell's -c, which may be combined with other letters.

    Empty: the shell gets a file, or nothing.
    """
    left, asked = list(words), False
    while left:
        word = left.pop(0)
        if word[:1] not in ("-", "+"):
            return word if asked else ""
        asked = asked or re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word) is not None
        if _SHELL_VALUED.fullmatch(word):
            left = left[1:]
    return ""


def _of_line(shell: str, text: str) -> str:
    """The first doubt about a command of a shell's line; expansions and conditions of the shell are not followed."""
    flat = _EXPANDED.sub("$", text.replace("\\\n", " ").replace("\n", ";"))
    reader = shlex.shlex(flat, posix=True, punctuation_chars=True)
    reader.whitespace_split, reader.commenters = True, ""
    with suppress(ValueError):
        found: list[list[str]] = [[]]
        for word in reader:
            if set(word) <= set("();<>|&"):
                found.append([])
            else:
                found[-1].append(word)
        for words in found:
            while words and words[0] in _BEFORE:
                words = words[1:]
            at = next((at for at, word in enumerate(words) if not _SETTING.fullmatch(word)), len(words))
            settings, words = words[:at], words[at:]
            if words[:1] == ["export"]:
                settings, words = words[1:], []
            if lost := next((word for word in settings if _REPLACED.fullmatch(word)), ""):
                return f"{shell} with {lost} {CLEARED} of vgpu"
            if words[:1] == ["unset"] and "LD_PRELOAD" in words:
                return f"{shell} with unset LD_PRELOAD {CLEARED}"
            if told := doubt(words):
                return told
    return ""


def _clears(words: Sequence[str]) -> str:
    """What `env` does, where it drops LD_PRELOAD or what LD_PRELOAD names."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "-" or word == "--ignore-environment" or re.fullmatch(r"-[0v]*i.*", word):
            return f"env {word} {CLEARED}"
        if word in ("-u", "--unset") and left[:1] == ["LD_PRELOAD"]:
            return f"env {word} LD_PRELOAD {CLEARED}"
        if word in ("-uLD_PRELOAD", "--unset=LD_PRELOAD"):
            return f"env {word} {CLEARED}"
        if _REPLACED.fullmatch(word):
            return f"env {word} {CLEARED} of vgpu"
        if word in _VALUED["env"]:
            left = left[1:]
        elif not (word.startswith("-") or _SETTING.fullmatch(word)):
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
                return ""  # the kernel ignores setuid bits of scripts; the interpreter is a usual program
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
    """The dynamic linker that an ELF file names; empty: none; None: these bytes do not show it (elf(5))."""
    try:
        table, entry, count = (*struct.unpack_from("<Q", start, 32), *struct.unpack_from("<HH", start, 54))
        for at in range(count):
            kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", start, table + at * entry)
            if kind == _PT_INTERP:
                return start[offset : offset + size].rstrip(b"\0").decode("utf-8", "replace") or None
    except (struct.error, OverflowError):
        return None
    return ""
