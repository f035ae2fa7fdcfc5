"""The answers to the kubelet's probes, on a separate listener: other requests do not delay them."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vgpu.wsgi import WsgiApp

log = logging.getLogger(__name__)


def app(checks: Mapping[str, Callable[[], str]]) -> WsgiApp:
    """`checks` maps a path to a function.

    The function returns a sentence that says what is missing, or an empty string. The app answers 200 if
    nothing is missing, and 503 otherwise. On other paths the app answers 404.
    """
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
