"""Slow clients do not delay the others: deadlines, limits, and no thread before a request is complete."""

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import pytest
from drippers import BODY, HEADER, Crowd, dripping

from vgpu import listener
from vgpu.listener import Listener
from vgpu.standin.services import wait_for

SECONDS = 20.0
CHUNKS = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + 30 * (b"fff\r\n" + 4095 * b"x" + b"\r\n")


def echo(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    body = environ["wsgi.input"].read()
    start("200 OK", [("Content-Type", "text/plain")])
    return [f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']} {len(body)}".encode()]


@contextmanager
def listening(app: Callable[..., Iterable[bytes]] = echo, **more: Any) -> Iterator[Listener]:
    made = Listener("test", app, "127.0.0.1", 0, **{"threads": 1, "max_body": 100_000, **more})
    try:
        yield made
    finally:
        made.stop()


def ask(port: int, method: str = "GET", path: str = "/a%20b?c", body: Any = None, **more: Any) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, body, **more)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def said_to(port: int, *parts: bytes) -> bytes:
    """All bytes of the answer until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), SECONDS) as client:
        for part in parts:
            client.sendall(part)
        found = b""
        try:
            while more := client.recv(65536):
                found += more
        except ConnectionResetError:
            pass
        return found


def test_requests_of_all_kinds() -> None:
    with listening() as made:
        assert ask(made.port) == (200, "GET /a b?c 0")
        assert ask(made.port, "POST", "/p", b"x" * 70_000) == (200, "POST /p? 70000")
        assert ask(made.port, "POST", "/p", iter([b"xx", b"y"])) == (200, "POST /p? 3"), "chunked"
        assert ask(made.port, "GET", "http://proxied/p?q") == (200, "GET /p?q 0")
        connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=SECONDS)
        for size in (1, 2, 3):  # on one connection
            connection.request("POST", "/", b"x" * size)
            assert connection.getresponse().read().endswith(b"%d" % size)
        wait_for("the others are gone", lambda: made.connections == 1, SECONDS)
        connection.close()
        two = b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert said_to(made.port, two).count(b"HTTP/1.1 200") == 2, "one after the other without waiting"
        head = said_to(made.port, b"HEAD /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"Content-Length: 10" in head
        assert head.endswith(b"\r\n\r\n")
        asked = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
            client.sendall(asked)
            assert client.recv(65536).startswith(b"HTTP/1.1 100")
            client.sendall(b"ab")
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert said_to(made.port, b"GET /old HTTP/1.0\r\n\r\n").endswith(b"GET /old? 0")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n", b"413"),
        (CHUNKS, b"413"),
    ],
)  # fmt: skip
def test_what_is_no_request_is_answered_and_ends_the_connection(sent: bytes, status: bytes) -> None:
    with listening() as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(65536).startswith(b"HTTP/1.1 " + status)
        assert ask(made.port)[0] == 200


@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "both"),
        (b"GET / HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 400, "both"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400, "Content-Length"),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "does not exist in HTTP/1.0"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "transfer-encoding"),
        (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 405, "CONNECT is for proxies"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 400, "HTTP/2.0 is not spoken here"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "HTTP/2.0 is not spoken here"),
        (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", 400, "HTTP/0.9 is not spoken here"),
        (b"GET / HTTP/1.2\r\nHost: x\r\n\r\n", 400, "HTTP/1.2 is not spoken here"),
    ],
)  # fmt: skip
def test_what_could_be_read_in_two_ways_is_refused(sent: bytes, status: int, part: str) -> None:
    """Nothing that follows on the connection is read as a request."""
    asked: list[str] = []

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        asked.append(environ["PATH_INFO"])
        return echo(environ, start)

    with listening(app) as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(sent + b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        found = b""
        while more := client.recv(65536):
            found += more
        assert found.startswith(b"HTTP/1.1 %d " % status)
        assert part.lower() in found.decode().lower()
        assert found.count(b"\r\nContent-Type:") == 1, found
        assert (b"\r\nAllow: GET, HEAD, POST\r\n" in found) == (status == 405)
        assert not asked
        assert ask(made.port)[0] == 200


def test_an_app_that_fails_is_no_end_of_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Iterable[bytes]:
        raise RuntimeError("oh")

    with listening(broken) as made:
        assert ask(made.port) == (500, "internal error\n")
        assert ask(made.port) == (500, "internal error\n")
    assert "oh" in caplog.text


@pytest.mark.parametrize("begin", [b"", b"G", HEADER, BODY], ids=["silent", "one byte", "header", "body"])
def test_a_request_has_to_come_as_a_whole_in_time(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """Even if a byte comes often: a deadline between two bytes would be met.

    A client that sent a request gets the reason.
    """
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 1.0)
    found = b""
    with listening() as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(begin)
        client.settimeout(0.05)
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline, "it is still served"
            try:
                if begin:
                    client.sendall(b"x")
                found += (more := client.recv(65536))
                if more:
                    continue
            except TimeoutError:
                continue
            except OSError:
                pass
            break
        assert ask(made.port)[0] == 200
    head, _, text = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") == (b"Connection: close" in head) == (text != b"") == (begin != b"")


def test_a_body_of_tiny_chunks_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk costs as much as many bytes. Chunks that could be read at once are read in turns with
    other clients.
    """
    begin = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening() as made:
        assert said_to(made.port, begin, 900 * b"1\r\nx\r\n", b"0\r\n\r\n").endswith(b" 900")
        assert said_to(made.port, begin, 1400 * (b"40\r\n" + 64 * b"x" + b"\r\n"), b"0\r\n\r\n").endswith(b" 89600")
        with socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
            client.sendall(begin + 9000 * b"1\r\nx\r\n")
            assert client.recv(65536).startswith(b"HTTP/1.1 400 ")
        wait_for("the others are gone", lambda: made.connections == 0, SECONDS)
        monkeypatch.setattr(listener, "FREE_CHUNKS", 10**6)
        with socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
            read = [0]  # bytes, in each turn of the event loop

            def look() -> None:
                read.append(made._crowd._bytes)
                if read[-1] < 90_000:
                    made._loop.call_soon(look)

            made._loop.call_soon_threadsafe(look)
            client.sendall(begin + 90_000 * b"1\r\nx\r\n")
            wait_for("all chunks", lambda: read[-1] == 90_000, SECONDS)
            assert max(after - before for before, after in pairwise(read)) <= 2 * listener._TURN


def test_time_in_which_the_listener_was_behind_is_not_the_client_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example with hundreds of handshakes on a busy machine. What the client sent in that time
    counts as in time.
    """
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 1.0)
    behind = threading.Event()

    def stall() -> None:
        behind.set()
        time.sleep(1.5)

    with listening() as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        wait_for("the connection", lambda: made.connections == 1, SECONDS)
        client.sendall(b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n")
        made._loop.call_soon_threadsafe(stall)
        assert behind.wait(SECONDS)
        client.sendall(b"Connection: close\r\n\r\nab")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_second_request_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 1.0)
    with listening() as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET / HT")
        assert client.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_who_does_not_take_an_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ANSWER_SECONDS", 0.5)

    def large(_: Any, start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return [b"x" * 2**26]

    with listening(large) as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for("the connection ended", lambda: not made.connections, SECONDS)
        client.settimeout(SECONDS)


def test_a_peer_that_has_too_many_loses_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_OF_PEER", 3)
    with listening() as made:
        first, *others = [socket.create_connection(("127.0.0.1", made.port), SECONDS) for _ in range(3)]
        other = socket.create_connection(("127.0.0.1", made.port), SECONDS, source_address=("127.0.0.9", 0))
        wait_for("all are known", lambda: made.connections == 4, SECONDS)
        assert ask(made.port)[0] == 200
        assert first.recv(1) == b""
        for one in (*others, other):
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
            one.close()
        first.close()


def test_a_full_listener_drops_one_of_the_peer_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 4)

    def from_(number: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", made.port), SECONDS, source_address=(f"127.0.0.{number}", 0))

    with listening() as made:
        alone, *many = [from_(8), from_(9), from_(9), from_(9)]
        wait_for("all are known", lambda: made.connections == 4, SECONDS)
        assert ask(made.port)[0] == 200
        assert many[0].recv(1) == b""
        for one in (alone, *many[1:]):
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
        for one in (alone, *many):
            one.close()


def test_bodies_hold_no_more_than_their_bytes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODIES", 2)
    begin = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 80_000
    with listening() as made:
        clients = []
        for _ in range(3):
            clients.append(socket.create_connection(("127.0.0.1", made.port), SECONDS))
            clients[-1].sendall(begin)
        wait_for("one less", lambda: made.connections == 2, SECONDS)
        assert clients[0].recv(1) == b""
        for one in clients[1:]:
            one.sendall(b"x" * 20_000)
            assert b"100000" in one.recv(65536)
        for one in clients:
            one.close()


ANSWER: Final = 3 * 2**20  #: bytes
#: A listener whose answers all exist before a client reads them; prints its port, then its memory (kB) per line
UNREAD = """
import sys
from vgpu.listener import Listener

def app(environ, start):
    start("200 OK", [])
    return [bytes([len(environ["PATH_INFO"]) % 251 + 1]) * int(sys.argv[1])]

made = Listener("test", app, "127.0.0.1", 0, threads=2)
print(made.port, flush=True)
for _ in sys.stdin:
    status = open("/proc/self/status").read()
    print(status.partition("VmRSS:")[2].split()[0], made.connections, flush=True)
"""


def test_answers_that_clients_do_not_read_hold_a_bounded_memory() -> None:
    """400 clients ask for 3 MiB each and read nothing: 1.2 GB, if each were kept."""
    line = [sys.executable, "-c", UNREAD, str(ANSWER)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        port = int(process.stdout.readline())

        def look() -> tuple[int, int]:
            """MiB, connections."""
            assert process.stdin
            assert process.stdout
            print(file=process.stdin, flush=True)
            memory, connections = map(int, process.stdout.readline().split())
            return memory // 1024, connections

        before, _ = look()
        peak = 0
        clients = []
        try:
            for number in range(400):
                clients.append(socket.create_connection(("127.0.0.1", port), SECONDS))
                clients[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                clients[-1].sendall(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number)
                peak = max(peak, look()[0])
            wait_for("most are dropped", lambda: look()[1] < 50, SECONDS)
            peak = max(peak, look()[0])
            assert len(said_to(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")) > ANSWER
        finally:
            for client in clients:
                client.close()
            process.stdin.close()
    assert peak - before < 200, f"{peak - before} MiB"


def test_an_answer_that_is_larger_than_all_may_hold_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "ANSWERS", 1000)

    def large(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        start("200 OK", [])
        return [environ["PATH_INFO"].encode() * 1_000_000]

    with listening(large) as made:
        for name in ("/a", "/bc"):
            status, text = ask(made.port, path=name)
            assert (status, text) == (200, name * 1_000_000)
        idle = socket.create_connection(("127.0.0.1", made.port), SECONDS)  # it sends no request, so it is not to blame
        with socket.create_connection(("127.0.0.1", made.port), SECONDS) as silent:
            silent.sendall(b"GET /not-taken HTTP/1.1\r\nHost: x\r\n\r\n")
            assert silent.recv(1)
            assert ask(made.port, path="/d") == (200, "/d" * 1_000_000)
            wait_for("it is dropped", lambda: made.connections == 1, SECONDS)
        idle.sendall(b"GET /e HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        idle.close()


def test_one_thread_answers_beside_hundreds_that_drip() -> None:
    with listening() as made, dripping(Crowd(made.port, 300, begin=BODY)) as counts:
        wait_for("all drip", lambda: counts.begun[0] == 300, SECONDS)
        assert [ask(made.port)[0] for _ in range(20)] == [200] * 20


def test_stopping_waits_for_nobody_who_dawdles() -> None:
    with listening() as made, dripping(Crowd(made.port, 20)) as counts:
        wait_for("all drip", lambda: counts.begun[0] == 20, SECONDS)
        made.stop()
        with pytest.raises(ConnectionRefusedError):
            ask(made.port)
