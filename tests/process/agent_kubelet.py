"""A minimal kubelet side of the device plugin protocol: Registration, dialling back, the stream."""

import asyncio
from pathlib import Path
from typing import Any

import grpc

from vgpu.kubelet import checkpoint
from vgpu.kubelet.checkpoint import Checkpoint
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api
from vgpu.kubelet.deviceplugin_v1beta1.api_pb2_grpc import (
    DevicePluginStub,
    RegistrationServicer,
    add_RegistrationServicer_to_server,
)


class SmallKubelet(RegistrationServicer):
    """Answers Register only after it has dialled the plugin back, as the real one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.registered: list[api.RegisterRequest] = []
        self.devices: list[dict[str, str]] = []  # every list that came: id → health
        self.listening = asyncio.Event()  #: cleared: the kubelet is slow to open the stream of a registered plugin
        self.listening.set()
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        """Like a kubelet that comes up: the folder is wiped, then the socket appears."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.iterdir():
            entry.unlink()
        self._server = grpc.aio.server()
        add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix://{self.folder}/kubelet.sock")
        await self._server.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for channel in self._channels:
            await channel.close()
        if self._server:
            await self._server.stop(None)
        self._tasks, self._channels, self._server = [], [], None

    async def supersede(self) -> None:
        """Acts as when another plugin registers the same resource: the earlier plugin's streams end, the new ids are
        listed.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.lists(["other-0", "other-1"])

    def lists(self, ids: list[str]) -> None:
        """Sets the resource's ids in the checkpoint."""
        checkpoint.write(self.folder / checkpoint.FILE_NAME, Checkpoint([], {"nvidia.com/gpu": ids}))

    async def Register(self, request: api.RegisterRequest, context: Any) -> api.Empty:  # noqa: ARG002 signature of gRPC
        plugin = self.plugin(request.endpoint)
        await plugin.GetDevicePluginOptions(api.Empty(), timeout=5)
        self.registered.append(request)
        self._tasks.append(asyncio.create_task(self._follow(plugin)))
        return api.Empty()

    def plugin(self, endpoint: str = "vgpu.sock") -> Any:
        channel = grpc.aio.insecure_channel(
            # Like Go's clients, which share no connections: a shared one to an earlier plugin would be in back-off.
            f"unix://{self.folder}/{endpoint}",
            [("grpc.use_local_subchannel_pool", 1)],
        )
        self._channels.append(channel)
        return DevicePluginStub(channel)

    async def _follow(self, plugin: Any) -> None:
        await self.listening.wait()
        call = plugin.ListAndWatch(api.Empty())
        try:
            async for update in call:
                self.devices.append({device.ID: device.health for device in update.devices})
                self.lists([device.ID for device in update.devices if device.health == "Healthy"])
        except grpc.aio.AioRpcError:
            self.devices.append({})
        finally:
            call.cancel()  # a task that is cancelled before its first read leaves the call to the garbage collector


async def until(condition: Any, seconds: float = 15) -> None:
    """Polls until `condition()` holds; fails the test after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to be in time"
        await asyncio.sleep(0.01)
