"""What a command that waits for a slice shows on stderr.

On a terminal, this is one line that changes; elsewhere, one plain line per change.
"""

import sys
import time
from types import TracebackType
from typing import Final, Protocol, Self

REPEAT: Final = 60.0  #: seconds after which an unchanged plain line comes again


class Progress(Protocol):
    """A context manager for the time of waiting."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def update(self, position: int, reason: str) -> None:
        """Shows the place in the queue; `position` 1: served next."""


def text(position: int, reason: str) -> str:
    place = "next in the queue" if position == 1 else f"number {position} in the queue"
    return f"waiting for a slice, {place}: {reason}"


class PlainProgress:
    def __init__(self) -> None:
        self._shown = ""
        self._when = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, position: int, reason: str) -> None:
        line, now = text(position, reason), time.monotonic()
        if line != self._shown or now - self._when > REPEAT:
            print(f"vgpu run: {line}", file=sys.stderr, flush=True)
            self._shown, self._when = line, now


class TerminalProgress:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("waiting for a slice", total=None)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)

    def update(self, position: int, reason: str) -> None:
        self._bar.update(self._task, description=text(position, reason))


def progress() -> Progress:
    """The kind of progress that fits stderr."""
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()
