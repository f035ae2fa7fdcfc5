"""A separate machine for tests of `vgpu run`: a state directory, simulated cards, and the installed command line."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROBE = (sys.executable, "-m", "vgpu.probe")
DEADLINE = 60.0


class Machine:
    def __init__(self, state: Path, spec: str) -> None:
        self.state = state
        self.spec = spec
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VGPU", "CUDA", "NVIDIA", "LD_"))}
        self.environ = {**inherited, "PYTHONPATH": str(ROOT), "VGPU_STATE_DIR": str(state), "VGPU_CONFIG": os.devnull}
        self.started: list[subprocess.Popen[str]] = []

    @property
    def simulator(self) -> Path:
        return self.state / "simulator" / self.spec

    def vgpu(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vgpu", *arguments],
            capture_output=True,
            text=True,
            env={**self.environ, **environ},
            timeout=DEADLINE,
            check=False,
        )

    def run(self, *options: str, command: tuple[str, ...], **environ: str) -> subprocess.CompletedProcess[str]:
        return self.vgpu("run", "--simulate", self.spec, *options, "--", *command, **environ)

    def start(self, *options: str, command: tuple[str, ...], **environ: str) -> subprocess.Popen[str]:
        """A runner in the background; its stdin is a pipe, and the end of the pipe ends a command that reads it."""
        process = subprocess.Popen(
            [sys.executable, "-m", "vgpu", "run", "--simulate", self.spec, *options, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environ, **environ},
        )
        self.started.append(process)
        return process

    def hold(self, *options: str, **environ: str) -> subprocess.Popen[str]:
        """Holds a slice until `end`."""
        process = self.start(*options, command=("sh", "-c", "echo running; read line"), **environ)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "running\n", process.communicate()
        return process

    def ps(self) -> list[dict[str, Any]]:
        done = self.vgpu("ps", "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def probe(self, *options: str, probe: tuple[str, ...] = ()) -> dict[str, Any]:
        """What a process in a slice sees."""
        done = self.run(*options, command=(*PROBE, *probe))
        assert done.stdout.startswith("{"), done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def waiting(self) -> int:
        """Number of ticket files, including those of dead waiters."""
        return len(list((self.state / "queue").glob("*")))

    def stop(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()  # not communicate: children may have inherited the pipes
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Ends a reading command and waits for it: (stdout, stderr)."""
    return process.communicate("\n", timeout=DEADLINE)


def eventually(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.02)
