"""HTTP and HTTPS listeners for WSGI apps. A client gets a thread only once its whole request has arrived.

One event loop per listener does handshakes, reads and writes. A complete request goes to a pool of threads, where the
app answers it. A slow client never occupies a thread. It occupies only a socket, for a limited time:

* A request must be complete within REQUEST_SECONDS of its first byte (the first request of a connection: of the
  connect). This includes the TLS handshake, the header and the body. Reading the answer has a deadline, too. A late
  client gets 408. Time in which the listener itself was behind (a busy machine, hundreds of handshakes at once) does
  not count.
* Limits exist for connections, connections of each peer, bytes of bodies and bytes of answers. A client that comes when
  a limit is reached is served. Instead, the listener closes a connection of the peer that has most of them: the one
  that has waited longest.

A request whose end is ambiguous is refused (RFC 9112, 6.1): a proxy in front might read it in another way.
"""

import asyncio
import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from io import BytesIO
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import h11

from vgpu import sockets
from vgpu.crowd import Crowd
from vgpu.wsgi import Errors, WsgiApp, call

log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0  #: for the TLS handshake and all of a request
ANSWER_SECONDS: Final = 10.0  #: time in which a client has to read an answer
#: between two requests: longer than Go's clients keep a connection (90 s, http.DefaultTransport)
IDLE_SECONDS: Final = 120.0
STOP_SECONDS: Final = 1.0  #: for requests that are still being answered when the listener ends
MAX_CONNECTIONS: Final = 1024  #: of one listener
MAX_OF_PEER: Final = 512  #: of a listener's connections, from one address
MAX_HEADER: Final = 16 * 2**10  #: bytes
MAX_BODY: Final = 64 * 2**10  #: bytes, where a listener sets no other value
BODIES: Final = 8  #: times the largest body: limit for all bodies together
ANSWERS: Final = 64 * 2**20  #: bytes of all answers that clients have not read yet, without the newest answer
MAX_DRAINED: Final = 64 * 2**20  #: bytes that are read of a too large body, so that its sender reads the refusal
DRAIN_SECONDS: Final = 5.0
FREE_CHUNKS: Final = 1024  #: chunks of a body; further chunks must have LEAST_CHUNK bytes on average
LEAST_CHUNK: Final = 64  #: bytes: each chunk costs the event loop as much as many bytes do
_TURN: Final = 64  #: chunks that are read before other connections have a turn
LATE_SECONDS: Final = 0.05  #: an event loop that has not looked at its sockets for this long is behind
PATIENCE: Final = 4  #: largest extension of a client's deadline, as a factor, when the event loop is behind
_STEP: Final = 64 * 2**10  #: bytes of one read or write
#: bytes of answers that the kernel stores for a client; by default these would be megabytes
_IN_KERNEL: Final = 128 * 2**10
_FILES: Final = 16 * MAX_CONNECTIONS  #: open files that a program with a few listeners needs


def any_address() -> str:
    """The address that means all addresses of this machine, of both families where there are two."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


class Listener:
    """One address on which an app is served; with `tls` only over TLS. Raises OSError when the address is not free.

    `tls` returns the context for each new connection; `max_body`: bytes of the largest accepted body.
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
        max_body: int = MAX_BODY,
    ) -> None:
        sockets.allow_files(_FILES)
        sockets.return_large_blocks()
        self._name = name
        try:
            self._socket = sockets.bound(address, port, MAX_CONNECTIONS, _IN_KERNEL)
        except OSError as error:
            raise OSError(f"{name}: port {port} on {address}: {error}") from None
        self.port: int = self._socket.getsockname()[1]
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._crowd = Crowd(MAX_CONNECTIONS, MAX_OF_PEER, BODIES * max_body, ANSWERS)
        turns = asyncio.Semaphore(2 * threads)
        self._site = _Site(app, self._threads, turns, self._crowd, self._socket.getsockname()[:2], max_body, tls)
        self._loop = asyncio.SelectorEventLoop(_Selector(self._crowd.postpone))
        self._accepting = self._loop.create_task(self._accept())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        log.info("%s listens on %s", name, self.port)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._crowd.size

    def stop(self) -> None:
        """Ends the listener; returns when the port is free. Requests that are being answered have STOP_SECONDS."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._accepting.cancel)
        self._thread.join()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(_until(self._accepting))

    async def _accept(self) -> None:
        serving: set[asyncio.Task[None]] = set()
        complaint = ""
        try:
            while True:
                try:
                    client, address = await self._loop.sock_accept(self._socket)
                except OSError as error:  # no more files: a connection has to go
                    log.log(logging.DEBUG if str(error) == complaint else logging.WARNING, "%s: %s", self._name, error)
                    complaint = str(error)
                    self._crowd.shrink()
                    await asyncio.sleep(0.05)
                    continue
                one = _Connection(self._site, client, address[0])
                self._crowd.add(one)
                task = self._loop.create_task(one.serve())
                one.task = task
                serving.add(task)
                task.add_done_callback(serving.discard)
                task.add_done_callback(lambda _, one=one: self._crowd.remove(one))  # type: ignore[misc]  # the default
        finally:
            self._socket.close()
            self._crowd.end()
            if serving:
                await asyncio.wait(serving, timeout=STOP_SECONDS)


async def _until(task: "asyncio.Task[None]") -> None:
    await task


class _Selector(selectors.DefaultSelector):
    """Reports how long the event loop did other work while clients' bytes were unread."""

    def __init__(self, report: Callable[[float], None]) -> None:
        super().__init__()
        self._report = report
        self._looked = time.monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        away = time.monotonic() - self._looked
        if away > LATE_SECONDS:
            self._report(away)
        found = super().select(timeout)
        self._looked = time.monotonic()
        return found


class _Site:
    """What all connections of a listener share."""

    def __init__(
        self,
        app: WsgiApp,
        threads: ThreadPoolExecutor,
        turns: asyncio.Semaphore,
        crowd: Crowd,
        address: tuple[str, int],
        max_body: int,
        tls: Callable[[], ssl.SSLContext] | None,
    ) -> None:
        self.app, self.threads, self.crowd, self.tls = app, threads, crowd, tls
        self.turns = turns  # limits the answers that are made before they are counted, and keeps all threads busy
        self.address = address
        self.max_body = max_body


class _Refused(Exception):
    """The request does not reach the app: status and sentence."""

    def __init__(self, status: int, sentence: str, *headers: tuple[str, str]) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


class _Connection:
    """The connection of one client; used only by the event loop."""

    def __init__(self, site: _Site, client: socket.socket, peer: str) -> None:
        self._site = site
        self._socket = client
        self.peer = peer
        self.task: asyncio.Task[None] | None = None
        self.since = time.monotonic()  #: when the connection began its current step
        self.answering = False  #: the whole request has arrived
        self.held = 0  #: bytes of the request's body
        self.owed = 0  #: bytes of the answer that the client has not read
        self._deadline = self._last = 0.0  #: loop time of the current step's deadline, and of its latest extension
        self._timeout: asyncio.Timeout | None = None

    def postpone(self, seconds: float) -> None:
        """Extends the deadline of the current step."""
        self._deadline = min(self._deadline + seconds, self._last)
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._deadline)

    def _allow(self, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self._deadline, self._last = now + seconds, now + PATIENCE * seconds

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises TimeoutError at the deadline."""
        try:
            async with asyncio.timeout_at(self._deadline) as self._timeout:
                yield
        finally:
            self._timeout = None

    def drop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def serve(self) -> None:
        """Serves until either side ends the connection."""
        reader = asyncio.StreamReader(limit=_STEP)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        transport: asyncio.Transport | None = None
        try:
            self._allow(REQUEST_SECONDS)
            async with self._in_time():
                context = self._site.tls() if self._site.tls is not None else None
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._socket, ssl=context)
            writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            await self._requests(reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError, h11.ProtocolError, asyncio.IncompleteReadError) as error:
            # Port scanners, distrustful clients, silent clients, broken connections: all these errors are normal.
            log.debug("connection of %s: %r", self.peer, error)
        finally:
            if transport is not None:
                transport.abort()
            else:
                self._socket.close()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER)
        loop = asyncio.get_running_loop()
        while True:
            self.since = time.monotonic()
            try:
                found = await self._request(http, reader, writer)
            except _Refused as refused:
                await self._refuse(http, reader, writer, refused)
                return None
            if found is None:
                return None
            request, body = found
            self.answering = True
            try:
                environ = self._environ(request, body)
                async with self._site.turns:
                    answer = await loop.run_in_executor(self._site.threads, call, self._site.app, environ)
                    self._site.crowd.owe(self, len(answer[2]))
            finally:
                self.answering = False
            self._hold(-self.held)
            self.since = time.monotonic()
            await self._send(http, writer, request.method, *answer)
            del answer
            self._site.crowd.owe(self, 0)
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return await _close(writer)
            http.start_next_cycle()
            self.since = time.monotonic()
            if not http.trailing_data[0]:
                async with asyncio.timeout(IDLE_SECONDS):
                    first = await reader.read(_STEP)
                http.receive_data(first)
            self._allow(REQUEST_SECONDS)

    async def _request(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[h11.Request, bytes] | None:
        """The next request, None: the client has ended.

        Raises _Refused, and OSError when the client is gone or silent.
        """
        try:
            async with self._in_time():
                return await self._read(http, reader, writer)
        except TimeoutError:
            if http.their_state is h11.IDLE and not http.trailing_data[0]:  # the client has not begun a request
                raise
            raise _Refused(408, f"the request did not come as a whole within {REQUEST_SECONDS:g} s") from None

    async def _read(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[h11.Request, bytes] | None:
        request: h11.Request | None = None
        body, chunks = bytearray(), 0
        while True:
            try:
                event = http.next_event()
            except h11.RemoteProtocolError as error:
                raise _Refused(error.error_status_hint, f"not HTTP: {error}") from None
            if event is h11.NEED_DATA:
                if http.they_are_waiting_for_100_continue:
                    writer.write(http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
                http.receive_data(await reader.read(_STEP))
            elif isinstance(event, h11.Request):
                request = event
                self._check(_length(event))
            elif isinstance(event, h11.Data):
                self._check(len(body) + len(event.data))
                body += event.data
                self._hold(len(event.data))
                chunks += event.chunk_start
                if (chunks - FREE_CHUNKS) * LEAST_CHUNK > len(body):
                    raise _Refused(400, f"{chunks} chunks for {len(body)} bytes of the body: send larger ones")
                if event.chunk_start and not chunks % _TURN:
                    # bytes that were received already would otherwise be read to their end at once
                    await asyncio.sleep(0)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request, bytes(body)
            else:
                return None

    def _check(self, size: int) -> None:
        if size > self._site.max_body:
            raise _Refused(413, f"the body is larger than {self._site.max_body} bytes")

    def _hold(self, size: int) -> None:
        self.held += size
        self._site.crowd.hold(size)

    async def _refuse(
        self, http: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refused: _Refused
    ) -> None:
        headers = [("Content-Type", "text/plain"), ("Connection", "close"), *refused.headers]
        if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._send(http, writer, b"GET", refused.status, headers, f"{refused}\n".encode())
            if writer.can_write_eof():  # not over TLS
                writer.write_eof()
        # closing with unread bytes would reset the connection and lose the answer
        async with asyncio.timeout(DRAIN_SECONDS):
            taken = 0
            while taken < MAX_DRAINED and (more := await reader.read(_STEP)):
                taken += len(more)
        await _close(writer)

    async def _send(self, http: h11.Connection, writer: asyncio.StreamWriter, method: bytes, *answer: Any) -> None:
        self._allow(ANSWER_SECONDS)
        async with self._in_time():
            await _send(http, writer, method, *answer)

    def _environ(self, request: h11.Request, body: bytes) -> dict[str, Any]:
        """PEP 3333: texts hold bytes as latin-1."""
        target = request.target.decode("latin-1")
        if "://" in target.partition("?")[0]:  # absolute form, as proxies get it
            target = "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        secure = self._site.tls is not None
        environ: dict[str, Any] = {
            "REQUEST_METHOD": request.method.decode("latin-1"),
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
            "QUERY_STRING": query,
            "SERVER_NAME": self._site.address[0],
            "SERVER_PORT": str(self._site.address[1]),
            "SERVER_PROTOCOL": f"HTTP/{request.http_version.decode('latin-1')}",
            "REMOTE_ADDR": self.peer,
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "https" if secure else "http",
            "wsgi.input": BytesIO(body),
            "wsgi.errors": Errors(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        for name, value in request.headers:
            key = name.decode("latin-1").upper().replace("-", "_")
            if key in ("CONTENT_LENGTH", "TRANSFER_ENCODING"):
                continue  # the body is complete
            key = key if key == "CONTENT_TYPE" else f"HTTP_{key}"
            text = value.decode("latin-1")
            environ[key] = f"{environ[key]},{text}" if key in environ else text
        environ["CONTENT_LENGTH"] = str(len(body))
        return environ


def _length(request: h11.Request) -> int:
    """Bytes of the body by its header, 0 where there is none. Raises _Refused for a header that HTTP forbids."""
    headers = dict(request.headers)
    version = request.http_version.decode()
    if version not in ("1.0", "1.1"):
        raise _Refused(400, f"HTTP/{version} is not spoken here: send HTTP/1.1 or HTTP/1.0")
    if request.method == b"CONNECT":
        raise _Refused(405, "CONNECT is for proxies, and this is none", ("Allow", "GET, HEAD, POST"))
    if b"transfer-encoding" in headers:
        if b"content-length" in headers:
            raise _Refused(400, "both Content-Length and Transfer-Encoding: where the body ends is not clear; send one")
        if version == "1.0":
            raise _Refused(400, "Transfer-Encoding does not exist in HTTP/1.0: send Content-Length, or HTTP/1.1")
    return int(headers.get(b"content-length", b"0"))


async def _send(
    http: h11.Connection,
    writer: asyncio.StreamWriter,
    method: bytes,
    status: int,
    headers: list[tuple[str, str]],
    body: bytes,
) -> None:
    found = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    if not any(name.lower() == b"content-length" for name, _ in found):
        found.append((b"Content-Length", b"%d" % len(body)))
    response = h11.Response(status_code=status, headers=found, reason=_reason(status))
    begin = http.send(response) or b""
    if method == b"HEAD":
        body = b""
    if len(body) <= _STEP:  # fits into one packet
        begin += (http.send(h11.Data(data=body)) or b"") if body else b""
        body = b""
    for at in range(0, len(body), _STEP):  # no second copy of a large answer waits for the client
        writer.write(begin + (http.send(h11.Data(data=body[at : at + _STEP])) or b""))
        begin = b""
        await writer.drain()
    writer.write(begin + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Sends what was written, then closes."""
    writer.close()
    async with asyncio.timeout(ANSWER_SECONDS):
        await writer.wait_closed()


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
