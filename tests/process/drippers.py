"""Clients that never finish their requests: a listener must still answer the others."""

import asyncio
import multiprocessing
import resource
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

DRIP_SECONDS: Final = 2.0
HEADER: Final = b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\nX-Long: "
BODY: Final = b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"


class Crowd(NamedTuple):
    """`count` clients of a port, which connect again when they are dropped."""

    port: int
    count: int
    tls: bool = False
    begin: bytes = HEADER


class Counts(NamedTuple):
    """By crowd: clients that have sent something and are still connected, and how often a client was dropped."""

    begun: Any
    dropped: Any


class _Drippers:
    def __init__(self, crowd: Crowd, at: int, begun: Any, dropped: Any) -> None:
        self._crowd, self._at, self._begun, self._dropped = crowd, at, begun, dropped
        self._context: ssl.SSLContext | None = None
        if crowd.tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    async def run(self) -> None:
        await asyncio.gather(*(self._drip() for _ in range(self._crowd.count)))

    async def _drip(self) -> None:
        while True:
            with suppress(OSError):
                await self._once()
            self._dropped[self._at] += 1
            await asyncio.sleep(0.1)

    async def _once(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._crowd.port, ssl=self._context)
        self._begun[self._at] += 1
        try:
            writer.write(self._crowd.begin)
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), DRIP_SECONDS)
        finally:
            self._begun[self._at] -= 1
            writer.transport.abort()


@contextmanager
def dripping(*crowds: Crowd) -> Iterator[Counts]:
    """Runs all crowds at once, in a separate process, until the block ends."""
    context = multiprocessing.get_context("spawn")
    counts = Counts(context.Array("i", len(crowds)), context.Array("i", len(crowds)))
    process = context.Process(target=_run, args=(crowds, counts.begun, counts.dropped), daemon=True)
    process.start()
    try:
        yield counts
    finally:
        process.kill()
        process.join()


def _run(crowds: Sequence[Crowd], begun: Any, dropped: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))

    async def all_of_them() -> None:
        each = (_Drippers(crowd, at, begun, dropped) for at, crowd in enumerate(crowds))
        await asyncio.gather(*(one.run() for one in each))

    asyncio.run(all_of_them())
