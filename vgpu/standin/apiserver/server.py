"""An API server in memory: the Kubernetes wire protocol for any resource, without discovery, authorisation or schemas.

It accepts every bearer token as the name of its user. Objects live as long as their `Store`. So a test can stop a
server and start another one on the same port with the same objects, as if the server had been restarted.
"""

import base64
import binascii
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from cheroot import wsgi
from flask import Flask, Request, Response, request
from werkzeug.exceptions import HTTPException

from vgpu.kube.client import ApiError
from vgpu.standin.apiserver.registry import Caller, Registry, Where
from vgpu.standin.apiserver.selectors import Match, SelectorError, field_selector, label_selector
from vgpu.standin.apiserver.store import Change, Expired, Object, Store, key_of
from vgpu.standin.apiserver.webhooks import AddressBook, Webhooks, user_info
from vgpu.standin.services import free_port

THREADS = 96  #: each watch uses one
BOOKMARK_SECONDS = 5.0
POLL_SECONDS = 0.5  #: a watch checks this often whether the server stops
MAX_BODY = 4 << 20  #: bytes; etcd takes 1.5 MiB
ADMIN = "kubernetes-admin"


def parse_path(path: str) -> Where | None:
    """The resource that a path names; None when it is not the path of a resource."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = None
    if rest[0] == "namespaces" and len(rest) > 2 and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    return Where(group, version, rest[0], namespace, rest[1] if len(rest) > 1 else None, "/".join(rest[2:]))


def _json(body: object, status: int = 200, warnings: list[str] | None = None) -> Response:
    response = Response(msgspec.json.encode(body), status, mimetype="application/json")
    for text in warnings or ():
        quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        response.headers.add("Warning", f'299 - "{quoted}"')
    return response


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure" if code >= 400 else "Success",
        **({"message": message} if message else {}),
        **({"reason": reason} if reason else {}),
        "code": code,
    }


def _body(request: Request) -> Any:
    if (request.content_length or 0) > MAX_BODY:
        raise ApiError(413, "RequestEntityTooLarge", f"limit is {MAX_BODY}")
    try:
        return msgspec.json.decode(request.get_data() or b"{}")
    except msgspec.MsgspecError as error:
        raise ApiError(400, "BadRequest", f"the body is not JSON: {error}") from None


def _object(request: Request) -> Object:
    body = _body(request)
    if not isinstance(body, dict) or not isinstance(body.get("metadata", {}), dict):
        raise ApiError(400, "BadRequest", "the body is not a Kubernetes object")
    return body


def _matcher(where: Where) -> Match:
    """The filter by name, namespace and selectors of a list or watch request."""
    try:
        labels = label_selector(request.args.get("labelSelector", ""))
        fields = field_selector(request.args.get("fieldSelector", ""), where.resource)
    except SelectorError as error:
        raise ApiError(400, "BadRequest", str(error)) from None

    def match(item: Any) -> bool:
        inside = where.namespace is None or item["metadata"].get("namespace") == where.namespace
        return inside and labels(item) and fields(item)

    return match


class ApiServer:
    """Listens on 127.0.0.1. `services`: Service in a webhook configuration → its real address."""

    def __init__(self, port: int = 0, *, store: Store | None = None, services: AddressBook | None = None) -> None:
        self.store = store if store is not None else Store()
        self.port = port
        self._registry = Registry(self.store, Webhooks(self.store, services))
        self._stopping = threading.Event()
        self._server: wsgi.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server; returns when it accepts connections. Raises OSError when the port is taken."""
        self.port = self.port or free_port()  # cheroot binds port 0 in a way that the same port cannot be bound again
        self._server = wsgi.Server(("127.0.0.1", self.port), self._application(), numthreads=THREADS, timeout=30)
        self._server.shutdown_timeout = 2
        self._server.expiration_interval = 0.1  # time for which `stop` waits for the accepting thread
        self._server.prepare()
        self._thread = threading.Thread(target=self._server.serve, name="apiserver", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all watches and closes all connections; the store stays."""
        self._stopping.set()
        with self.store.lock:
            self.store.lock.notify_all()
        if self._server is not None:
            self._server.stop()
        if self._thread is not None:
            self._thread.join()

    def write_kubeconfig(self, path: Path, user: str = ADMIN) -> None:
        """Writes a kubeconfig for requests of `user`, e.g. "system:serviceaccount:kube-system:vgpu-agent"."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "local", "cluster": {"server": self.url}}],
            "users": [{"name": user, "user": {"token": user}}],
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": user}}],
            "current-context": "local",
        }
        path.write_text(yaml.safe_dump(config, sort_keys=False))

    def _application(self) -> Flask:
        app = Flask("apiserver")
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        app.add_url_rule("/", "root", self._serve, methods=methods)
        app.add_url_rule("/<path:_path>", "any", self._serve, methods=methods)
        app.register_error_handler(
            ApiError, lambda error: _json(_status(error.status, error.reason, error.message), error.status)
        )
        app.register_error_handler(
            HTTPException,
            lambda error: _json(_status(error.code or 500, "", error.description or ""), error.code or 500),
        )
        return app

    def _serve(self, _path: str = "") -> Response:
        if request.path in ("/healthz", "/livez", "/readyz"):
            return Response("ok", mimetype="text/plain")
        if request.path == "/version":
            return _json({"major": "1", "minor": "36", "gitVersion": "v1.36.3"})
        where = parse_path(request.path)
        if where is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        if where.subresource not in ("", "status", "binding", "eviction"):
            raise ApiError(404, "NotFound", f"{where.title}/{where.subresource} is not served here")
        if request.method == "GET":
            return self._read(where)
        return self._write(where)

    def _write(self, where: Where) -> Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        caller = Caller(user_info(token or "system:anonymous"), "All" in request.args.getlist("dryRun"))
        if request.method == "POST":
            return self._post(where, caller)
        if request.method == "DELETE":
            options = _object(request)
            if (seconds := request.args.get("gracePeriodSeconds", type=int)) is not None:
                options["gracePeriodSeconds"] = seconds
            if where.name is not None:
                return _json(self._registry.delete(where, options, caller))
            match = _matcher(where)
            for item in filter(match, self.store.items(where.collection)[0]):
                namespace, name = key_of(item)
                self._registry.delete(where._replace(namespace=namespace, name=name), options, caller)
            return _json(_status(200, "", ""))
        if where.name is None or where.subresource not in ("", "status"):
            raise ApiError(405, "MethodNotAllowed", f"{request.method} is not possible here")
        if request.method == "PUT":
            item, warnings = self._registry.update(where, _object(request), caller)
        else:
            kind = (request.content_type or "").partition(";")[0]
            item, warnings = self._registry.patch(where, _body(request), kind, caller)
        return _json(item, 200, warnings)

    def _post(self, where: Where, caller: Caller) -> Response:
        body = _object(request)
        if where.collection == "/pods" and where.subresource == "binding":
            self._registry.bind(where, body)
            return _json(_status(201, "", ""), 201)
        if where.collection == "/pods" and where.subresource == "eviction":
            self._registry.delete(where, body.get("deleteOptions") or {}, caller)
            return _json(_status(201, "", ""), 201)
        if where.name is not None:
            raise ApiError(405, "MethodNotAllowed", "POST goes to a collection")
        item, warnings = self._registry.create(where, body, caller)
        return _json(item, 201, warnings)

    def _read(self, where: Where) -> Response:
        if where.name is not None:
            return _json(self._registry.get(where))
        match = _matcher(where)
        if request.args.get("watch") in ("true", "1"):
            return Response(self._watch(where, match), mimetype="application/json")
        return _json(self._list(where, match))

    def _list(self, where: Where, match: Match) -> dict[str, Any]:
        found, version = self.store.items(where.collection, where.namespace)
        # A list of a version comes from the cache of its kind, which moves only with changes of this kind. Seen with
        # Kubernetes 1.36: a request for a version that only other kinds have reached waits without effect, and gets an
        # error.
        wanted = request.args.get("resourceVersion") or ""
        if wanted.isdecimal():
            version = self.store.reached(where.collection)
            if int(wanted) > version:
                raise ApiError(504, "Timeout", f"Too large resource version: {wanted}, current: {version}")
        items = [item for item in found if match(item)]
        meta = {"resourceVersion": str(version)}
        token = request.args.get("continue")
        if token:
            try:
                after = tuple(msgspec.json.decode(base64.urlsafe_b64decode(token), type=list[str]))
            except (msgspec.MsgspecError, binascii.Error) as error:
                raise ApiError(400, "BadRequest", f"continue key is not valid: {error}") from None
            # The remaining pages show newer states than this version; a watch from it reports those changes again.
            meta["resourceVersion"] = after[0]
            items = [item for item in items if key_of(item) > after[1:]]
        limit = request.args.get("limit", 0, type=int)
        if limit and len(items) > limit:
            items = items[:limit]
            place = [meta["resourceVersion"], *key_of(items[-1])]
            meta["continue"] = base64.urlsafe_b64encode(msgspec.json.encode(place)).decode()
        bare = [{key: value for key, value in item.items() if key not in ("kind", "apiVersion")} for item in items]
        return {"kind": f"{where.kind}List", "apiVersion": where.api_version, "metadata": meta, "items": bare}

    def _watch(self, where: Where, match: Match) -> Iterator[bytes]:
        """Lines of a watch. The request's arguments are read at once; each line is made when it is sent."""
        bookmarks = request.args.get("allowWatchBookmarks") in ("true", "1")
        seconds = request.args.get("timeoutSeconds", 1800, type=int)
        start = request.args.get("resourceVersion") or "0"
        if not start.isdecimal():
            raise ApiError(400, "BadRequest", f'resourceVersion: Invalid value: "{start}"')
        return self._lines(where, match, int(start), bookmarks, time.monotonic() + seconds)

    def _lines(self, where: Where, match: Match, since: int, bookmarks: bool, end: float) -> Iterator[bytes]:
        if not since:
            items, since = self.store.items(where.collection)
            yield from (_line("ADDED", item) for item in items if match(item))
        mark = time.monotonic() + BOOKMARK_SECONDS
        yield b"\n"  # sends the head of the answer at once
        while not self._stopping.is_set() and time.monotonic() < end:
            try:
                changes, since = self.store.changes(where.collection, since, POLL_SECONDS)
            except Expired:
                yield _line("ERROR", _status(410, "Expired", f"too old resource version: {since}"))
                return
            yield from filter(None, (_told(change, match) for change in changes))
            if bookmarks and time.monotonic() > mark:
                mark = time.monotonic() + BOOKMARK_SECONDS
                meta = {"resourceVersion": str(since), "creationTimestamp": None}
                yield _line("BOOKMARK", {"kind": where.kind, "apiVersion": where.api_version, "metadata": meta})


def _line(type_: str, item: Object) -> bytes:
    return msgspec.json.encode({"type": type_, "object": item}) + b"\n"


def _told(change: Change, match: Match) -> bytes:
    """The line for a watch with this selector: an object that leaves the selection counts as DELETED."""
    before = change.old is not None and match(change.old)
    after = change.type != "DELETED" and match(change.new)
    if not before and not after:
        return b""
    return _line("MODIFIED" if before and after else "ADDED" if after else "DELETED", change.new)
