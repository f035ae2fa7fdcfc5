"""The two Flask apps: verbs for the kube-scheduler of the same pod, and what the Service shows to the cluster."""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO, Any, Final

import msgspec
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from scheduler import neighbour
from scheduler.admission.webhook import Admission
from scheduler.binder import Binder, Refused
from scheduler.fence import Behind, Fence
from scheduler.metrics import DURATION
from scheduler.server import WsgiApp
from scheduler.verbs import Verbs
from scheduler.wire import (
    BadBody,
    ExtenderArgs,
    ExtenderBindingArgs,
    ExtenderBindingResult,
    ExtenderFilterResult,
    parse,
)

log = logging.getLogger(__name__)

MAX_VERB_BODY: Final = 16 * 2**20  #: bytes; 5,000 node names are 100 kB, 5,000 whole nodes can be 15 MiB
MAX_REVIEW_BODY: Final = 3 * 2**20  #: bytes; the API server takes objects of up to 1.5 MiB, a review may carry two
MAX_DRAINED: Final = 64 * 2**20  #: bytes that are taken of a body that is too large, so that its sender reads why
DRAIN_STEP: Final = 64 * 2**10
DRAIN_SECONDS: Final = 5.0
NOT_READY: Final = "the scheduler has not read the cluster yet"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), mimetype="application/json")


def _text(status: int, sentence: str) -> Response:
    return Response(sentence + "\n", status=status, mimetype="text/plain")


def _drain(body: IO[bytes]) -> None:
    """Takes what the client still sends after the answer: closing on unread bytes resets the connection under it."""
    deadline = time.monotonic() + DRAIN_SECONDS
    try:
        for _ in range(0, MAX_DRAINED, DRAIN_STEP):
            if not body.read(DRAIN_STEP) or time.monotonic() > deadline:
                return
    except OSError as error:
        log.debug("the rest of a body that is too large: %s", error)


def _app(name: str, max_body: int) -> Flask:
    app = Flask(name, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = max_body

    @app.errorhandler(BadBody)
    def bad_body(error: BadBody) -> Response:
        log.warning("%s from %s: %s", request.path, request.remote_addr, error)
        return _text(400, str(error))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        if error.code != 413:
            return _text(error.code or 500, error.description or error.name)
        answer = _text(413, f"the body is larger than {max_body} bytes")
        answer.call_on_close(partial(_drain, request.environ["wsgi.input"]))
        return answer

    return app


def extender_app(verbs: Verbs, binder: Binder, ready: Callable[[], bool], fence: Fence) -> Flask:
    """kube-scheduler's extender v1: /filter, /prioritize, /bind. To be served on a loopback address only."""
    app = _app("extender", MAX_VERB_BODY)

    def obstacle() -> str:
        """Why no verb can be answered now; empty when it can."""
        if not ready():
            return NOT_READY
        try:
            fence.pass_()
        except Behind as behind:
            return str(behind)
        return ""

    @app.post("/filter")
    def filter_() -> Response:
        with DURATION.labels("filter").time():
            args = parse(request.get_data(cache=False), ExtenderArgs)
            error = obstacle()
            return _json(ExtenderFilterResult(Error=error) if error else verbs.filter(args))

    @app.post("/prioritize")
    def prioritize() -> Response:
        with DURATION.labels("prioritize").time():
            args = parse(request.get_data(cache=False), ExtenderArgs)
            error = obstacle()
            return _text(503, error) if error else _json(verbs.prioritize(args))

    @app.post("/bind")
    def bind() -> Response:
        with DURATION.labels("bind").time():
            args = parse(request.get_data(cache=False), ExtenderBindingArgs)
            try:
                if error := obstacle():
                    raise Refused(error)
                binder.bind(args)
            except (Refused, Behind) as refused:
                log.warning("pod %s/%s not bound to %s: %s", args.PodNamespace, args.PodName, args.Node, refused)
                return _json(ExtenderBindingResult(str(refused)))
            return _json(ExtenderBindingResult())

    return app


def open_app(metrics: WsgiApp, obstacle: Callable[[], str]) -> WsgiApp:
    """/metrics for everybody, /kube-scheduler for the kubelet, both without TLS, which waits for its certificate.

    `obstacle` says why the kube-scheduler of the same pod should be started anew, "" where it should not.
    """

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != neighbour.PATH:
            return metrics(environ, start)
        said = obstacle()
        if said:
            log.warning("%s", said)
        return (_text(503, said) if said else _text(200, "ok"))(environ, start)

    return app


def service_app(admission: Admission, ready: Callable[[], bool]) -> Flask:
    """/webhook for the API server, /healthz and /readyz for the kubelet. To be served over TLS only."""
    app = _app("service", MAX_REVIEW_BODY)

    @app.post("/webhook")
    def webhook() -> Response:
        with DURATION.labels("webhook").time():
            return _json(admission.review(request.get_data(cache=False)))

    @app.get("/healthz")
    def healthz() -> Response:
        return _text(200, "ok")

    @app.get("/readyz")
    def readyz() -> Response:
        return _text(200, "ok") if ready() else _text(503, NOT_READY)

    return app
