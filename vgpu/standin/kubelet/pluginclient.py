"""The kubelet's side of one device plugin's connection."""

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2, api_pb2_grpc

DIAL_SECONDS: Final = 10.0
PRE_START_SECONDS: Final = 30.0  #: KubeletPreStartContainerRPCTimeoutInSecs

Devices = Sequence[api_pb2.Device]


class PluginError(Exception):
    """A plugin could not be reached or refused a call; the text is that of the kubelet's Go client."""


def _error(error: grpc.RpcError) -> PluginError:
    name = "".join(part.capitalize() for part in error.code().name.split("_"))
    return PluginError(f"rpc error: code = {name} desc = {error.details()}")


class Endpoint:
    """A registered plugin: dialled back, asked for its options, then watched until its stream ends."""

    def __init__(
        self,
        resource: str,
        socket: Path,
        on_devices: "Callable[[Endpoint, Devices], None]",
        on_end: "Callable[[Endpoint], None]",
    ) -> None:
        """Connects to the plugin; raises PluginError when it does not answer."""
        self.resource = resource
        self._on_devices = on_devices
        self._on_end = on_end
        # A subchannel pool of its own: a shared pool would keep a dead connection to an earlier plugin at this path in
        # back-off.
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub: Any = api_pb2_grpc.DevicePluginStub(self._channel)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=DIAL_SECONDS)
            self.options = self._stub.GetDevicePluginOptions(api_pb2.Empty(), timeout=DIAL_SECONDS)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise PluginError(
                f"failed to dial device plugin at {socket}: no connection in {DIAL_SECONDS:g} s"
            ) from None
        except grpc.RpcError as error:
            self._channel.close()
            raise PluginError(f"failed to get device plugin options: {_error(error)}") from None
        self._stream = self._stub.ListAndWatch(api_pb2.Empty())
        self._thread = threading.Thread(target=self._watch, name=f"listandwatch {resource}", daemon=True)

    def watch(self) -> None:
        """Starts to follow ListAndWatch."""
        self._thread.start()

    def _watch(self) -> None:
        try:
            for message in self._stream:
                self._on_devices(self, message.devices)
        except grpc.RpcError:
            pass  # the stream has ended: on_end reports it
        self._on_end(self)

    def _call(self, method: str, request: object, timeout: float | None = None) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout)
        except grpc.RpcError as error:
            raise _error(error) from None
        except ValueError as error:  # grpc's error for a channel that `stop` has closed
            raise PluginError(f"rpc error: code = Canceled desc = {error}") from None

    def preferred(self, available: Collection[str], must_include: Collection[str], size: int) -> set[str]:
        """Ids that the plugin prefers; empty when it has no preference."""
        if not self.options.get_preferred_allocation_available:
            return set()
        one = api_pb2.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        request = api_pb2.PreferredAllocationRequest(container_requests=[one])
        try:
            answer = self._call("GetPreferredAllocation", request)
        except PluginError as error:
            raise PluginError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from None
        return set(answer.container_responses[0].deviceIDs) if answer.container_responses else set()

    def allocate(self, ids: Collection[str]) -> api_pb2.ContainerAllocateResponse:
        one = api_pb2.ContainerAllocateRequest(devices_ids=ids)
        answer = self._call("Allocate", api_pb2.AllocateRequest(container_requests=[one]))
        if not answer.container_responses:
            raise PluginError("no containers return in allocation response")
        response: api_pb2.ContainerAllocateResponse = answer.container_responses[0]
        return response

    def pre_start(self, ids: Collection[str]) -> None:
        """Calls PreStartContainer; does nothing when the plugin does not ask for the call."""
        if not self.options.pre_start_required:
            return
        try:
            self._call("PreStartContainer", api_pb2.PreStartContainerRequest(devices_ids=ids), PRE_START_SECONDS)
        except PluginError as error:
            raise PluginError(f"device plugin PreStartContainer rpc failed with err: {error}") from None

    def stop(self) -> None:
        """Ends the stream and all calls; calls `on_end` if the stream was followed."""
        self._stream.cancel()
        self._channel.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
