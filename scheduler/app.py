"""The two Flask apps.

One has the verbs for the kube-scheduler in the same pod, the other the paths that the Service offers the cluster.
"""

import logging
from collections.abc import Callable
from typing import Final

import msgspec
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from scheduler.admission.webhook import Admission
from scheduler.binder import Binder, Refused
from scheduler.leader_check import Behind, Fence
from scheduler.metrics import DURATION
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
#: bytes; the API server accepts objects of up to 1.5 MiB, and a review may contain two
MAX_REVIEW_BODY: Final = 3 * 2**20
NOT_READY: Final = "the scheduler has not read the cluster yet"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), mimetype="application/json")


def _text(status: int, sentence: str) -> Response:
    return Response(sentence + "\n", status=status, mimetype="text/plain")


def _app(name: str) -> Flask:
    app = Flask(name, static_folder=None)

    @app.errorhandler(BadBody)
    def bad_body(error: BadBody) -> Response:
        log.warning("%s from %s: %s", request.path, request.remote_addr, error)
        return _text(400, str(error))

    @app.errorhandler(HTTPException)
    def http_error(error: HTTPException) -> Response:
        return _text(error.code or 500, error.description or error.name)

    return app


def extender_app(verbs: Verbs, binder: Binder, ready: Callable[[], bool], fence: Fence) -> Flask:
    """kube-scheduler's extender v1: /filter, /prioritize, /bind. Must be served on a loopback address only."""
    app = _app("extender")

    def obstacle() -> str:
        """Why no verb can be answered now; empty: verbs can be answered."""
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
                log.warning("did not bind pod %s/%s to %s: %s", args.PodNamespace, args.PodName, args.Node, refused)
                return _json(ExtenderBindingResult(str(refused)))
            return _json(ExtenderBindingResult())

    return app


def service_app(admission: Admission, ready: Callable[[], bool]) -> Flask:
    """/webhook for the API server, /healthz and /readyz for the kubelet. Must be served over TLS only."""
    app = _app("service")

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
