"""A missing build requirement is reported before anything is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def needs(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", ROOT / "libvgpu/needs.py"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_here_nothing_is_missing() -> None:
    done = needs()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("compiler", "what", "package"),
    [
        ("no-such-compiler -O2", "a C compiler", "gcc"),
        ("cc -nostdinc", "the headers of the C library", "libc6-dev"),
    ],
)
def test_what_is_missing_is_said_with_the_packages(compiler: str, what: str, package: str) -> None:
    done = needs(CC=compiler)
    assert done.returncode == 1
    first, debian, *_ = done.stderr.splitlines()
    assert first == f"vgpu cannot be built here: this machine lacks {what}."
    assert debian == f"  Debian, Ubuntu: apt install {package}"
