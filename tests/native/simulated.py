"""Runs programs on the simulated cards without the intercept library, and compares them with the
simulator's own count.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vgpu.native import paths, simulator

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
#: prefixes of variables that would limit, simulate or preload in the environment of the test run itself
OURS = ("CUDA_", "VGPU_", "LD_", "NVIDIA_")


class Machine:
    """Simulated cards of one state directory and the programs that a test runs on them."""

    def __init__(self, folder: Path, spec: str = "T4") -> None:
        self.folder = folder
        self.spec = spec

    def environment(self, **variables: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
        return clean | {
            "LD_LIBRARY_PATH": str(paths.simulator()),
            "VGPU_SIMULATE": self.spec,
            "VGPU_SIM_DIR": str(self.folder),
            "PYTHONPATH": str(HERE),
            **variables,
        }

    def run(self, script: str, **variables: str) -> Any:
        """The value that a script with `from simulator_client import *` gave to `report`, after it has ended well."""
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout) if done.stdout else None

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        """Starts a script; it reports lines on its output by `report` and waits for lines on its input."""
        return subprocess.Popen(
            [sys.executable, "-u", "-c", script],
            env=self.environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def card(self, index: int = 0) -> simulator.SimCard:
        return simulator.cards(self.folder)[index]

    def process(self, pid: int) -> simulator.SimProcess:
        return next(p for p in reversed(simulator.processes(self.folder)) if p.pid == pid)


def heard(process: subprocess.Popen[str]) -> Any:
    """The next report of a started script."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the script ended with {process.wait()}"
    return json.loads(line)


def tell(process: subprocess.Popen[str], line: str = "go") -> None:
    """Lets a started script continue after its next `wait()`."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def eventually(what: str, condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.005)
