"""Processes that are restarted whenever they end, as a DaemonSet or Deployment restarts its pods."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """A TCP port of 127.0.0.1 on which no process listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_us() -> list[str]:
    """The prefix of a command with which the kernel ends the process when this one is killed by kill -9.

    Empty where util-linux lacks the option.
    """
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class Service:
    """One supervised process. Its output goes to a log file; it is restarted until `stop`."""

    RESTART_DELAY = 0.2  #: seconds

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        self.restarts = 0
        self._command = [*_die_with_us(), *command]
        self._env = {**os.environ, **(env or {})}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._supervise, name=f"service-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            with self.log.open("ab") as output, self._lock:
                if self._stopping.is_set():
                    return
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env
                )
            self._process.wait()
            if not self._stopping.wait(self.RESTART_DELAY):
                self.restarts += 1

    @property
    def pid(self) -> int | None:
        """Pid of the running process; None between two processes."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def kill(self) -> bool:
        """Sends kill -9; False when no process was running."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                return False
            self._process.send_signal(signal.SIGKILL)
            return True

    def stop(self, grace: float = 3.0) -> None:
        """Ends the process for good: SIGTERM, after `grace` seconds SIGKILL."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread.is_alive():
            self._thread.join(grace)

    def tail(self, lines: int = 15) -> str:
        """The end of the log, for error messages."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def wait_for(what: str, condition: Callable[[], object], timeout: float, *, every: float = 0.05) -> None:
    """Polls `condition` until it is true; TimeoutError naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not reached within {timeout:g} s")
        time.sleep(every)
