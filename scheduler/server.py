"""HTTP and HTTPS listeners on cheroot."""

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from cheroot import wsgi
from cheroot.server import HTTPConnection
from cheroot.ssl.builtin import BuiltinSSLAdapter

log = logging.getLogger(__name__)

WsgiApp = Callable[[dict[str, Any], Any], Iterable[bytes]]
STOP_SECONDS: Final = 1  #: for requests that are still being answered when the listener ends
KEPT_CONNECTIONS: Final = 256  #: idle connections kept open for their next request


def any_address() -> str:
    """The address that means all of this machine's, of both families where there are two."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


class _Connection(HTTPConnection):
    """Waits without a thread until its client has said something, and shakes hands in the thread that answers.

    cheroot's own gives every new connection a thread, after the handshake in the one thread that accepts: clients that
    connect and stay silent would hold up all others.
    """

    waited = False
    shaken = False

    def communicate(self) -> bool:
        if not self.shaken and isinstance(self.socket, ssl.SSLSocket):
            try:
                self.socket.do_handshake()
            except OSError as error:  # port scanners, clients that trust somebody else: everyday life
                log.debug("TLS with %s: %s", self.remote_addr, error)
                return False
        self.shaken = True
        return bool(super().communicate())  # type: ignore[no-untyped-call]  # cheroot is typed in part


class _Tls(BuiltinSSLAdapter):
    """Leaves the handshake to the connection."""

    def __init__(self, context: Callable[[], ssl.SSLContext]) -> None:
        # The base class's constructor reads certificate files, which this context has read already.
        self._context = context

    def wrap(self, sock: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
        wrapped = self._context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return wrapped, {"wsgi.url_scheme": "https", "HTTPS": "on"}


class _Server(wsgi.Server):
    ConnectionClass = _Connection

    def process_conn(self, conn: _Connection) -> None:
        if conn.waited:
            super().process_conn(conn)
        else:
            conn.waited = True
            self.put_conn(conn)  # among the idle ones; it comes back here when there is something to read

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        log.log(logging.ERROR if level >= logging.ERROR else logging.DEBUG, "%s", msg, exc_info=traceback)


class Listener:
    """One address on which an app is served; with `tls` only over TLS. Raises OSError when the address is not free.

    `tls` tells the context of each new connection.
    """

    def __init__(
        self,
        name: str,
        app: WsgiApp,
        address: str,
        port: int,
        *,
        threads: int,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._server = _Server((address, port), app, numthreads=threads, shutdown_timeout=STOP_SECONDS)
        self._server.keep_alive_conn_limit = KEPT_CONNECTIONS
        self._server.request_queue_size = 128
        self._server.expiration_interval = 0.2  # also how long stopping may take
        if tls is not None:
            self._server.ssl_adapter = _Tls(tls)
        self._thread = threading.Thread(target=self._server.serve, name=name, daemon=True)
        try:
            self._server.prepare()
        except OSError as error:
            raise OSError(f"{name}: port {port} on {address}: {error}") from None
        self._thread.start()
        log.info("%s listens on %s", name, self.port)

    @property
    def port(self) -> int:
        port: int = self._server.bind_addr[1]
        return port

    def stop(self) -> None:
        self._server.stop()
        self._thread.join()
