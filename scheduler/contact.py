"""A connection to every agent: the kernel closes it in the moment in which an agent is killed.

The kubelet reports the end of a container after up to two seconds; pods that are bound in this time fail for good. Two
signs prove that an agent starts no pods: its port refuses after it had answered, or it answers that it does not serve.
Slow answers, time-outs and closed connections are no proof. Then only the reports of the kubelet and the node decide.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable
from typing import Final

import h11

from vgpu.kube import agentmark

log = logging.getLogger(__name__)

KILLED: Final = "the node's agent has just ended and has not restarted yet"
CONNECT_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 5.0
#: between two questions on one connection: the agent closes connections that are idle for longer
ASK_SECONDS: Final = 60.0
SOON_SECONDS: Final = 0.05  #: between two looks at an agent that is about to come back, where there are few such agents
SOON_LOOKS: Final = 200  #: looks in a second, at all agents that are about to come back
#: after a connection was opened again; a loss within this time may come from a network that closes all connections
AGAIN_SECONDS: Final = 1.0
LATER_SECONDS: Final = (0.2, 30.0)  #: between two tries to reach an unreachable agent: first pause, longest pause
CERTAIN_SECONDS = 10.0  #: by then the kubelet has reported the agent's end; network rules may refuse connections, too
TOGETHER: Final = 64  #: connections that are opened at the same time, so that the verbs get the processor meanwhile
_TOLD: Final = 100  #: characters of an agent's answer that are kept


class Contact:
    """Follows agents by the uids of their pods.

    Thread-safe, with one thread of its own for all agents.
    """

    def __init__(self, port: int, changed: Callable[[str], None]) -> None:
        """`port`: where agents answer; `changed(uid)` is called when `obstacle` has another answer for this agent."""
        self.port = port
        self.changed = changed
        self._lines: dict[str, _Line] = {}  # used only by the event loop
        self._why: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self.together = asyncio.Semaphore(TOGETHER)
        self._thread = threading.Thread(target=self._loop.run_forever, name="contact", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Closes all connections."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def obstacle(self, uid: str) -> str:
        """Why this agent starts no pods now, as a part of a sentence; empty: it starts pods, or this is not known."""
        return self._why.get(uid, "")

    def follow(self, uid: str, address: str) -> None:
        """Follows an agent from now on; a new address replaces the old one.

        An agent that does not serve is asked at once.
        """
        self._loop.call_soon_threadsafe(self._follow, uid, address)

    def forget(self, uid: str) -> None:
        self._loop.call_soon_threadsafe(self._forget, uid)

    # Of the event loop

    @property
    def soon(self) -> float:
        """Seconds until the next look at an agent that is about to come back."""
        return max(SOON_SECONDS, len(self._why) / SOON_LOOKS)

    def tell(self, uid: str, why: str) -> None:
        if self._why.get(uid, "") == why:
            return
        if why:
            self._why[uid] = why
        else:
            del self._why[uid]
        self.changed(uid)

    def _follow(self, uid: str, address: str) -> None:
        line = self._lines.get(uid)
        if line is not None and line.address == address:
            line.look()
            return
        self._forget(uid)
        self._lines[uid] = _Line(self, uid, address)

    def _forget(self, uid: str) -> None:
        line = self._lines.pop(uid, None)
        if line is not None:
            line.end()
        self.tell(uid, "")

    async def _end(self) -> None:
        for uid in list(self._lines):
            self._forget(uid)


class _Line:
    """The connection to one agent, and what is known about the agent."""

    def __init__(self, contact: Contact, uid: str, address: str) -> None:
        self.address = address
        self._contact = contact
        self._uid = uid
        self._loop = asyncio.get_running_loop()
        self._reached = False  # the agent has answered, and since then nothing made a refused connection doubtful
        self._pause = LATER_SECONDS[0]
        self._timer: asyncio.TimerHandle | None = None  # the next step
        self._doubt: asyncio.TimerHandle | None = None  # ends what a refused connection says
        self._task: asyncio.Task[None] | None = None
        self._connection: _Connection | None = None
        self._ended = False
        self._again = 0.0  # loop time from which on a lost connection is opened again at once
        self._connect()

    def look(self) -> None:
        """The agent's pod has changed, or the agent has answered."""
        if self._connection is None:
            if self._task is None or self._task.done():
                self._pause = LATER_SECONDS[0]
                self._connect()
        elif self._contact.obstacle(self._uid) and not self._connection.asking:
            self._ask()

    def end(self) -> None:
        self._ended = True
        for timer in (self._timer, self._doubt):
            if timer is not None:
                timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.end()

    # Called by the connection

    def answered(self, status: int, text: str) -> None:
        self._reached, self._pause = True, LATER_SECONDS[0]
        if status == 503:
            self._tell(f"the node's agent does not serve: {text[:_TOLD]}")
            self._later(self._contact.soon, self._ask)
        else:  # 404: an agent from before this question
            self._tell("")
            self._later(ASK_SECONDS * random.uniform(0.7, 1.0), self._ask)

    def lost(self, *, answered: bool) -> None:
        """The connection was closed: by the scheduler, by the agent, or by something between them."""
        self._connection = None
        if answered and self._loop.time() > self._again:
            self._again = self._loop.time() + AGAIN_SECONDS
            self._connect()
        else:
            self._try_later()

    # Steps of the line

    def _connect(self) -> None:
        self._cancel()
        self._task = self._loop.create_task(self._connecting())

    async def _connecting(self) -> None:
        try:
            async with self._contact.together, asyncio.timeout(CONNECT_SECONDS):
                address, port = self.address, self._contact.port
                _, self._connection = await self._loop.create_connection(lambda: _Connection(self), address, port)
        except ConnectionRefusedError:
            if not self._reached:
                self._try_later()
                return
            if self._contact.obstacle(self._uid) != KILLED:
                log.info("the agent at %s has ended", self.address)
                self._tell(KILLED)
            self._later(self._contact.soon, self._connect)
        except OSError as error:  # includes TimeoutError
            log.debug("cannot connect to the agent at %s: %r", self.address, error)
            self._try_later()
        else:
            if self._ended:
                self._connection.end()
            else:
                self._ask()

    def _ask(self) -> None:
        if self._connection is None:
            self._connect()
            return
        self._later(ANSWER_SECONDS, self._give_up)
        self._connection.ask(self.address)

    def _give_up(self) -> None:
        if self._connection is not None:
            self._connection.end()
            self._connection = None
        self._try_later()

    def _try_later(self) -> None:
        known = self._reached and self._contact.obstacle(self._uid)
        pause = self._contact.soon if known else self._pause * random.uniform(0.8, 1.2)
        self._pause = min(2 * self._pause, LATER_SECONDS[1])
        self._later(pause, self._connect)

    def _tell(self, why: str) -> None:
        """Reports an obstacle.

        An obstacle ends after CERTAIN_SECONDS. An agent that does not serve repeats its answer before that; a refused
        connection is reported once.
        """
        if self._doubt is not None:
            self._doubt.cancel()
            self._doubt = None
        if why:
            self._doubt = self._loop.call_later(CERTAIN_SECONDS, self._forgive)
        self._contact.tell(self._uid, why)

    def _forgive(self) -> None:
        log.info("cannot find out whether the agent at %s serves; its pod's status decides", self.address)
        self._reached = False
        self._contact.tell(self._uid, "")

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._cancel()
        self._timer = self._loop.call_later(seconds, what)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Connection(asyncio.Protocol):
    """Asks one question after the other."""

    def __init__(self, line: _Line) -> None:
        self._line: _Line | None = line  # None: the line does not listen any more
        self._transport: asyncio.Transport | None = None
        self._http: h11.Connection | None = None  # set while a question is open
        self._status = 0
        self._text = b""
        self._answered = False

    @property
    def asking(self) -> bool:
        """Whether a question is open."""
        return self._http is not None

    def ask(self, host: str) -> None:
        assert self._transport is not None
        self._http, self._status, self._text = h11.Connection(h11.CLIENT), 0, b""
        headers = [("Host", f"[{host}]" if ":" in host else host)]
        data = self._http.send(h11.Request(method="GET", target=agentmark.PATH, headers=headers)) or b""
        self._transport.write(data + (self._http.send(h11.EndOfMessage()) or b""))

    def end(self) -> None:
        self._line = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._take(data)
        except h11.ProtocolError as error:
            log.debug("received an invalid answer from an agent: %s", error)
            assert self._transport is not None
            self._transport.abort()

    def _take(self, data: bytes) -> None:
        if self._http is None:
            raise h11.RemoteProtocolError("an answer without a request")
        self._http.receive_data(data)
        while (event := self._http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Response):
                self._status = event.status_code
            elif isinstance(event, h11.Data):
                self._text = (self._text + event.data)[: 4 * _TOLD]
            elif isinstance(event, h11.EndOfMessage):
                self._http, self._answered = None, True
                text = " ".join(self._text.decode(errors="replace").split())
                if self._line is not None:
                    self._line.answered(self._status, text if text.isprintable() else repr(text))
                return

    def connection_lost(self, _: Exception | None) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.lost(answered=self._answered)
