"""Says what this machine lacks to build vgpu, and which packages have it. Standard library only.

Run by the Makefile with the Python that will run vgpu; `CC` is the compiler. Exit status 1: something is missing.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

#: what → the packages that have it: of Debian and Ubuntu, of Fedora, of Alpine
PACKAGES = {
    "a C compiler": ("gcc", "gcc", "gcc"),
    "the headers of the C library": ("libc6-dev", "glibc-devel", "musl-dev"),
    "the headers of Python": ("python3-dev", "python3-devel", "python3-dev"),
    "Python's venv": ("python3-venv", "python3", "python3"),
}


def missing(compiler: str) -> list[str]:
    """Of PACKAGES, what is not here."""
    found = []
    command = shlex.split(compiler) or ["cc"]
    if shutil.which(command[0]) is None:
        found.append("a C compiler")
    else:
        program = b"#include <stdint.h>\n#include <stdlib.h>\n#include <pthread.h>\n"
        done = subprocess.run(
            [*command, "-x", "c", "-fsyntax-only", "-"], input=program, capture_output=True, check=False
        )
        if done.returncode:
            found.append("the headers of the C library")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append("the headers of Python")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        found.append("Python's venv")
    return found


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 it is what runs this file first
        print("vgpu needs Python 3.11 or newer: make PYTHON=python3.11 ...", file=sys.stderr)
        return 1
    found = missing(os.environ.get("CC", "cc"))
    if not found:
        return 0
    print(f"vgpu cannot be built here: this machine lacks {', '.join(found)}.", file=sys.stderr)
    for place, name in enumerate(("Debian, Ubuntu: apt install", "Fedora: dnf install", "Alpine: apk add")):
        print(f"  {name} {' '.join(PACKAGES[what][place] for what in found)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
