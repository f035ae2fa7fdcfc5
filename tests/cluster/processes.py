"""Programs that run until the end of the cluster, each with its own log."""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError

LAST_LINES = 20


class Service:
    """One program; `restart` starts it again with the same command."""

    def __init__(self, name: str, command: Sequence[str], logs: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._command = list(command)
        self._env = dict(env)
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.begun = time.time()  #: Unix time of the last start
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9; returns when the process is gone."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        """kill -9 if it still runs, and a new start."""
        if self.alive():
            self.kill()
        self._process = self._start()

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def until(what: str, condition: Callable[[], bool], seconds: float, services: Sequence[Service] = ()) -> float:
    """Polls until `condition` holds; seconds it took. ClusterError at the deadline, or when a service ended."""
    begin = time.monotonic()
    while not condition():
        for service in services:
            if not service.alive():
                raise ClusterError(f"{service.name} ended while waiting: {what}\n{service.last_words()}")
        if time.monotonic() > begin + seconds:
            words = "\n".join(f"{service.name}:\n{service.last_words()}" for service in services)
            raise ClusterError(f"not after {seconds:.0f} s: {what}\n{words}".rstrip())
        time.sleep(0.2)
    return time.monotonic() - begin
