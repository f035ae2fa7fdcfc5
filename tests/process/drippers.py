"""Clients that never finish what they begin: a listener has to answer the others all the same."""

import asyncio
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

DRIP_SECONDS: Final = 0.5
HEADER: Final = b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\nX-Long: "
BODY: Final = b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n"


class Drippers:
    """`count` clients of a port, which connect again when they are dropped. `begun`: how many have sent something."""

    def __init__(self, port: int, count: int, *, tls: bool, begin: bytes = HEADER, peers: int = 1) -> None:
        self._port, self._count, self._begin, self._peers = port, count, begin, peers
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.create_default_context()
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE
        self.begun: set[int] = set()
        self.dropped = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._drip(number) for number in range(self._count)))

    async def _drip(self, number: int) -> None:
        while True:
            with suppress(OSError):
                await self._once(number)
            self.begun.discard(number)
            self.dropped += 1
            await asyncio.sleep(0.1)

    async def _once(self, number: int) -> None:
        here = (f"127.0.0.{2 + number % self._peers}", 0) if self._peers > 1 else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context, local_addr=here)
        try:
            writer.write(self._begin)
            while not reader.at_eof():
                self.begun.add(number)
                writer.write(b"x")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(1), DRIP_SECONDS)
        finally:
            writer.transport.abort()


@contextmanager
def dripping(crowds: Sequence[Drippers]) -> Iterator[None]:
    """All of them at once, in a thread of their own, until the block ends."""
    loop = asyncio.new_event_loop()

    async def all_of_them() -> None:
        await asyncio.gather(*(one.run() for one in crowds))

    task = loop.create_task(all_of_them())

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
