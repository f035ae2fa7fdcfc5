"""Programs that the check starts: each has a time limit, and its whole process group ends with it."""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TAIL = 300  #: characters of a program's error output that are reported


class Broken(Exception):
    """A program did not do what it should; `str()` says what happened instead."""


class Budget:
    """The time for the whole command, seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


class Child:
    """A program in its own process group that prints JSON objects, one per line, and obeys lines on its input.

    It is killed with its group on exit. Lines that are not objects are skipped, because libraries print, too.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed when left)
        self._rest = b""
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints,
            start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self) -> dict[str, Any]:
        """The next object; raises Broken when the program or the time ends."""
        while True:
            line = self._line()
            if line is None:
                raise Broken(f"ended with {self._process.wait()}: {self.complaints()}")
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer

    def text(self) -> str:
        """All output until the program ends; raises Broken when its status is not 0, or it ends too late."""
        lines = []
        while (line := self._line()) is not None:
            lines.append(line.decode(errors="replace"))
        code = self._process.wait()
        if code:
            raise Broken(f"ended with {code}: {self.complaints()}")
        return "\n".join(lines)

    def tell(self, line: str = "") -> None:
        """Sends a line; raises Broken when the program does not read any more."""
        assert self._process.stdin
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Broken(f"ended with {self._process.wait()}: {self.complaints()}") from None

    def complaints(self) -> str:
        """The end of its standard error."""
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - TAIL))
        return " ".join(self._complaints.read().decode(errors="replace").split())

    def _line(self) -> bytes | None:
        assert self._process.stdout
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            left = self._end - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise Broken(f"did not answer within {self._seconds:.0f} s: {self.complaints()}")
            read = os.read(descriptor, 65536)
            if not read:
                rest, self._rest = self._rest, b""
                return rest or None
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._complaints):
            assert stream
            with suppress(BrokenPipeError):  # unsent input has no reader
                stream.close()
