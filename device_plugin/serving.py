"""The agent's HTTP server: `/readyz` for the kubelet, metrics under every other path."""

import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

log = logging.getLogger(__name__)

READY: Final = "/readyz"
_PATIENCE: Final = 10  #: seconds in which a client has to say what it wants
_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: who scrapes comes every few seconds."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 signature of socketserver
        log.debug("%s", client_address, exc_info=True)  # who goes away, or says nothing

    def server_bind(self) -> None:
        """Without HTTPServer's question for a name, which waits for DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]  # of sockets of all kinds
        self.setup_environ()


class _DualServer(_Server):
    """On the addresses of both families."""

    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def app(registry: CollectorRegistry, left: Callable[[], str]) -> _App:
    """`left` says what is missing until the agent is ready; empty: nothing."""
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != READY:
            found: Iterable[bytes] = metrics(environ, start_response)
            return found
        missing = left()
        start_response("503 Service Unavailable" if missing else "200 OK", [("Content-Type", "text/plain")])
        return [f"{missing or 'ready'}\n".encode()]

    return answer


def serve(application: _App, port: int) -> None:
    """On all addresses, in threads that end with the program; raises OSError when the port is taken."""
    kind, address = (_DualServer, "::") if socket.has_dualstack_ipv6() else (_Server, "0.0.0.0")
    server = kind((address, port), _Handler)
    server.set_app(application)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
