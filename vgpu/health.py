"""The answers to the kubelet's probes, on a separate listener: other requests do not delay them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vgpu.wsgi import WsgiApp

log = logging.getLogger(__name__)


def app(checks: Mapping[str, Callable[[], str]]) -> WsgiApp:
    """`checks`: path → a sentence that says what is missing; empty: nothing. Answers 200 or 503, and 404 elsewhere."""
    told = dict.fromkeys(checks, "")

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        check = checks.get(path)
        if check is None:
            status, text = "404 Not Found", f"not one of {', '.join(checks)}"
        else:
            missing = check()
            status, text = ("503 Service Unavailable", missing) if missing else ("200 OK", "ok")
            if missing != told[path]:
                log.warning("%s: %s", path, missing or "well again")
                told[path] = missing
        start_response(status, [("Content-Type", "text/plain")])
        return [f"{text}\n".encode()]

    return answer
