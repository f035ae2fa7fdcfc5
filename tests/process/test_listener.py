"""What keeps clients that dawdle from holding up the others: deadlines, limits, no thread before a request is whole."""

import http.client
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from drippers import BODY, HEADER, Drippers, dripping

from vgpu import listener
from vgpu.listener import Listener
from vgpu.local.services import wait_for

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
    """All that is answered until the connection is closed."""
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
        assert said_to(made.port, asked, b"ab").count(b"HTTP/1.1 ") == 2
        assert said_to(made.port, b"GET /old HTTP/1.0\r\n\r\n").endswith(b"GET /old? 0")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", b"431"),
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


def test_an_app_that_fails_is_no_end_of_the_listener(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Iterable[bytes]:
        raise RuntimeError("oh")

    with listening(broken) as made:
        assert ask(made.port) == (500, "internal error\n")
        assert ask(made.port) == (500, "internal error\n")
    assert "oh" in caplog.text


@pytest.mark.parametrize("begin", [b"", b"G", HEADER, BODY], ids=["silent", "one byte", "header", "body"])
def test_a_request_has_to_come_as_a_whole_in_time(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    """However often a byte comes; a deadline between two bytes would be met."""
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 1.0)
    with listening() as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(begin)
        client.settimeout(0.05)
        deadline = time.monotonic() + SECONDS
        while True:
            assert time.monotonic() < deadline, "it is still served"
            try:
                if begin:
                    client.sendall(b"x")
                assert client.recv(1) == b"", "nobody has asked anything"
            except TimeoutError:
                continue
            except OSError:
                pass
            break
        assert ask(made.port)[0] == 200


def test_a_second_request_has_a_deadline_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUEST_SECONDS", 1.0)
    with listening() as made, socket.create_connection(("127.0.0.1", made.port), SECONDS) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET / HT")
        assert client.recv(1) == b""


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


def test_one_thread_answers_beside_hundreds_that_drip() -> None:
    with listening() as made:
        crowd = Drippers(made.port, 300, tls=False, begin=BODY)
        with dripping([crowd]):
            wait_for("all drip", lambda: len(crowd.begun) == 300, SECONDS)
            assert [ask(made.port)[0] for _ in range(20)] == [200] * 20
            assert not crowd.dropped


def test_stopping_waits_for_nobody_who_dawdles() -> None:
    with listening() as made:
        crowd = Drippers(made.port, 20, tls=False)
        with dripping([crowd]):
            wait_for("all drip", lambda: len(crowd.begun) == 20, SECONDS)
            made.stop()
            with pytest.raises(ConnectionRefusedError):
                ask(made.port)
