"""Serves the plugin's socket and registers the plugin with the kubelet.

The agent does this again and again, because a kubelet restart wipes the folder. The kubelet answers Register only after
it has dialled back, so the agent serves the socket first.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
from asyncinotify import Inotify, Mask

from device_plugin import conflict
from device_plugin.cards import Cards
from device_plugin.conflict import Contest, View
from device_plugin.plugin import Plugin, options
from vgpu.kubelet import checkpoint
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api
from vgpu.kubelet.deviceplugin_v1beta1.api_pb2_grpc import RegistrationStub, add_DevicePluginServicer_to_server

log = logging.getLogger(__name__)

VERSION: Final = "v1beta1"
SOCKET: Final = "vgpu.sock"
KUBELET_SOCKET: Final = "kubelet.sock"
_POLL_SECONDS: Final = 1.0  #: one look even without an inotify event: the folder itself may have been replaced
_RETRY_SECONDS: Final = 0.1  #: the kubelet's socket appears shortly before it answers
_OTHERS_SECONDS: Final = 5.0  #: between two looks for other plugins
#: Time for the kubelet to see that our stream has ended: if we registered earlier, it would drop the new stream
_LEAVE_SECONDS: Final = 0.5

Identity = tuple[int, int, int]


class Registration:
    """Keeps the plugin served and registered when the kubelet restarts or its folder is removed."""

    def __init__(
        self,
        folder: Path,
        resource: str,
        plugin: Plugin,
        cards: Cards,
        *,
        tell: Callable[[str], None],
        registered: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell(sentence)` receives a sentence about other plugins that are in the way; empty: no plugin is.

        `registered` is called each time the kubelet has accepted the plugin.
        """
        self._folder = folder
        self._resource = resource
        self._plugin = plugin
        self._server: grpc.aio.Server | None = None
        self._served: Identity | None = None
        self._registered: Identity | None = None
        self._cards = cards
        self._tell = tell
        self._on_registered = registered
        self._told = ""
        self._view = View()  # what the kubelet listed when we last looked
        self._looked = -_OTHERS_SECONDS
        self._contest = Contest()
        self._complaint = ""

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            async for _ in self._occasions():
                await self._look()
        finally:
            await self._stop_server()

    async def _occasions(self) -> AsyncIterator[None]:
        """Yields on every event in the kubelet's folder, and at least once per period."""
        while True:
            yield
            try:
                with Inotify() as inotify:
                    inotify.add_watch(
                        self._folder, Mask.CREATE | Mask.DELETE | Mask.MOVED_TO | Mask.ATTRIB | Mask.DELETE_SELF
                    )
                    watched = identity(self._folder)
                    while identity(self._folder) == watched:
                        yield
                        pause = _POLL_SECONDS if self._settled() else _RETRY_SECONDS
                        # Not wait_for: before Python 3.12 wait_for may lose a cancellation that comes together with an
                        # event.
                        with suppress(TimeoutError):
                            async with asyncio.timeout(pause):
                                await inotify.get()
            except OSError:
                await asyncio.sleep(_POLL_SECONDS)

    def _settled(self) -> bool:
        kubelet = identity(self._folder / KUBELET_SOCKET)
        return kubelet is None or kubelet == self._registered

    async def _look(self) -> None:
        own, kubelet = self._folder / SOCKET, identity(self._folder / KUBELET_SOCKET)
        if not self._folder.is_dir():
            self._complain(f"waiting for the kubelet: {self._folder} is not there")
            return
        if self._served is None or identity(own) != self._served:
            await self._serve(own)
        if kubelet is None:
            self._registered = None
            self._contest.pause()
            self._complain(f"waiting for the kubelet: {self._folder / KUBELET_SOCKET} is not there")
            return
        if kubelet == self._registered:
            await self._others()
        if kubelet != self._registered:
            await self._register(kubelet)

    async def _others(self) -> None:
        """Looks for a plugin that has taken our resource, or offers our cards under another name."""
        now = asyncio.get_running_loop().time()
        streaming = self._plugin.streams > 0
        if not streaming and not await asyncio.to_thread(answers, self._folder / KUBELET_SOCKET):
            self._contest.pause()  # our socket outlives a stopped kubelet
            return
        ours = streaming and self._view == View()
        if not ours or now - self._looked >= _OTHERS_SECONDS:
            self._looked = now
            self._say(await asyncio.to_thread(self._sentence))
            ours = streaming and self._view == View()
        if self._contest.look(ours, now, rival=self._view.rival):
            why = "does not list this plugin's ids" if streaming else "does not follow this plugin's ids"
            log.warning("the kubelet %s; registering again", "lists ids of another plugin" if self._view.rival else why)
            await self._serve(self._folder / SOCKET)  # this ends our streams
            await asyncio.sleep(_LEAVE_SECONDS)

    def _say(self, found: str) -> None:
        if found != self._told:
            log.warning("%s", found or "no other device plugin interferes now")
            self._tell(found)
            self._told = found

    def _sentence(self) -> str:
        file = self._folder / checkpoint.FILE_NAME
        try:
            written = file.stat().st_mtime  # taken before the file is read: a newer checkpoint counts the next time
            registered = checkpoint.read(file).registered
        except (OSError, checkpoint.CheckpointError):
            registered, written = {}, 0.0
        self._view = conflict.view(registered.get(self._resource), written, self._plugin.told)
        rival = self._view.rival or self._contest.lost > 0
        own = (SOCKET, KUBELET_SOCKET)
        sockets = [one.name for one in self._folder.iterdir() if one.is_socket() and one.name not in own]
        return conflict.sentence(self._resource, self._cards.by_uuid.keys(), registered, sockets, rival)

    async def _serve(self, own: Path) -> None:
        await self._stop_server()
        own.unlink(missing_ok=True)
        server = grpc.aio.server()
        add_DevicePluginServicer_to_server(self._plugin, server)
        server.add_insecure_port(f"unix://{own}")
        await server.start()
        self._server, self._served, self._registered = server, identity(own), None
        log.info("serving %s", own)

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = self._served = None

    async def _register(self, kubelet: Identity) -> None:
        request = api.RegisterRequest(version=VERSION, endpoint=SOCKET, resource_name=self._resource, options=options())
        try:
            # This channel needs connections of its own: a shared one to an earlier kubelet would be in back-off.
            alone = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"unix://{self._folder / KUBELET_SOCKET}", alone) as channel:
                stub = RegistrationStub(channel)
                await stub.Register(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            self._complain(f"the kubelet does not register this plugin yet: {error.details()}; retrying")
            return
        self._registered = kubelet
        self._view = View()
        self._looked = asyncio.get_running_loop().time()  # the kubelet's checkpoint lists our ids a moment later
        self._complaint = ""
        log.info("registered %s with the kubelet", self._resource)
        self._on_registered()

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.info("%s", text)
            self._complaint = text


def answers(path: Path) -> bool:
    """Whether a process listens on this socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


def identity(path: Path) -> Identity | None:
    """Identifies the file that has this name now; None: there is no file.

    The time is included because inode numbers are reused.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns if path.is_socket() else 0
