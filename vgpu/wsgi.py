"""Runs a WSGI app (PEP 3333) for one request."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger(__name__)

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
Answer = tuple[int, list[tuple[str, str]], bytes]  #: status, headers, body


class Errors:
    """wsgi.errors: what an app writes there is logged."""

    def write(self, text: str) -> int:
        if text.strip():
            log.error("%s", text.rstrip())
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Does nothing: there is no buffer."""


def call(app: WsgiApp, environ: dict[str, Any]) -> Answer:
    """Runs the app: status, headers and body; in a thread of the pool."""
    answered: list[tuple[int, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], _: object = None) -> Callable[[bytes], None]:
        answered.append((int(status.split(" ", 1)[0]), headers))
        return written.append

    try:
        parts = app(environ, start_response)
        try:
            written.extend(parts)
        finally:
            close = getattr(parts, "close", None)
            if close is not None:
                close()
        status, headers = answered[-1]
    except Exception:
        log.exception("%s %s", environ["REQUEST_METHOD"], environ["PATH_INFO"])
        return 500, [("Content-Type", "text/plain")], b"internal error\n"
    return status, headers, b"".join(written)
