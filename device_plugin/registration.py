"""Serving the plugin's socket and telling the kubelet about it, again and again: a kubelet restart wipes the folder.

The kubelet answers Register only after it has dialled back, so the socket is served first.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
from asyncinotify import Inotify, Mask

from device_plugin.plugin import Plugin, options
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api
from vgpu.kubelet.deviceplugin_v1beta1.api_pb2_grpc import RegistrationStub, add_DevicePluginServicer_to_server

log = logging.getLogger(__name__)

VERSION: Final = "v1beta1"
SOCKET: Final = "vgpu.sock"
KUBELET_SOCKET: Final = "kubelet.sock"
_POLL_SECONDS: Final = 1.0  #: a look without any inotify event: the folder itself may have been replaced
_RETRY_SECONDS: Final = 0.1  #: the kubelet's socket appears shortly before it answers
_STREAM_SECONDS: Final = 15.0  #: registered, and yet no stream for so long: the kubelet has dropped us

Identity = tuple[int, int, int]


class Registration:
    """Keeps the plugin served and registered, whatever happens to the kubelet or to its folder."""

    def __init__(self, folder: Path, resource: str, plugin: Plugin) -> None:
        self._folder = folder
        self._resource = resource
        self._plugin = plugin
        self._server: grpc.aio.Server | None = None
        self._served: Identity | None = None
        self._registered: Identity | None = None
        self._registered_at = 0.0
        self._complaint = ""

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async for _ in self._occasions():
                await self._look()
        finally:
            await self._stop_server()

    async def _occasions(self) -> AsyncIterator[None]:
        """Every event in the kubelet's folder, and at least one look per period."""
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
                        with suppress(TimeoutError):
                            await asyncio.wait_for(inotify.get(), pause)
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
            self._complain(f"waiting for the kubelet: {self._folder / KUBELET_SOCKET} is not there")
            return
        now = asyncio.get_running_loop().time()
        if kubelet == self._registered and not self._plugin.streams and now - self._registered_at > _STREAM_SECONDS:
            log.warning(
                "the kubelet has left our stream; does a second device plugin register %s on this node?", self._resource
            )
            self._registered = None
        if kubelet != self._registered:
            await self._register(kubelet)

    async def _serve(self, socket: Path) -> None:
        await self._stop_server()
        socket.unlink(missing_ok=True)
        server = grpc.aio.server()
        add_DevicePluginServicer_to_server(self._plugin, server)
        server.add_insecure_port(f"unix://{socket}")
        await server.start()
        self._server, self._served, self._registered = server, identity(socket), None
        log.info("serving %s", socket)

    async def _stop_server(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = self._served = None

    async def _register(self, kubelet: Identity) -> None:
        request = api.RegisterRequest(version=VERSION, endpoint=SOCKET, resource_name=self._resource, options=options())
        try:
            async with grpc.aio.insecure_channel(f"unix://{self._folder / KUBELET_SOCKET}") as channel:
                stub = RegistrationStub(channel)
                await stub.Register(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            self._complain(f"the kubelet does not register us yet: {error.details()}")
            return
        self._registered = kubelet
        self._registered_at = asyncio.get_running_loop().time()
        self._complaint = ""
        log.info("registered %s with the kubelet", self._resource)

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.info("%s", text)
            self._complaint = text


def identity(path: Path) -> Identity | None:
    """Which file it is that has this name now; None when there is none. A number is used again, hence the time too."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns if path.is_socket() else 0
