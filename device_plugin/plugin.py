"""The kubelet's device plugin service (v1beta1).

Knows gRPC; other modules know what a card is and which pod may have it.

Source of the protocol: k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto (vgpu/kubelet/deviceplugin_v1beta1).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import grpc

from device_plugin import ids
from device_plugin.cards import Cards
from device_plugin.conflict import Told
from device_plugin.container_edits import Answer
from device_plugin.refusal import Refusal
from vgpu.devices import Gpu
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api
from vgpu.kubelet.deviceplugin_v1beta1.api_pb2_grpc import DevicePluginServicer

log = logging.getLogger(__name__)

MAX_STARTS: Final = 32  #: containers prepared at once; further containers wait
#: threads for the calls that are answered at once; the kubelet makes them when it admits a pod, one pod after the other
MAX_ANSWERS: Final = 4


class Node(Protocol):
    """What the plugin needs from the rest of the agent; called in worker threads."""

    def steer(self, size: int) -> Sequence[str]:
        """UUIDs of the cards that the next container with `size` cards should get; empty: unknown."""

    def answer(self, device_ids: Sequence[str]) -> Answer:
        """What the plugin gives a container with these ids; raises Refusal or OSError."""

    def start(self, device_ids: Sequence[str]) -> None:
        """Prepares the container that is about to be created with these ids; raises Refusal or OSError."""


class Plugin(DevicePluginServicer):
    """All five calls; `observe(call, seconds)` receives how long Allocate and PreStartContainer took.

    `taken` is called each time the kubelet has accepted a list of ids, `lost` when the kubelet does not follow the ids
    any more.
    """

    def __init__(
        self,
        cards: Cards,
        node: Node,
        observe: Callable[[str, float], None],
        taken: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._cards = cards
        self._node = node
        self._observe = observe
        self._taken = taken
        self._lost = lost
        # Starts may wait for seconds, all at once: the admission of other pods does not wait behind them.
        self._starts = ThreadPoolExecutor(MAX_STARTS, thread_name_prefix="start")
        self._answers = ThreadPoolExecutor(MAX_ANSWERS, thread_name_prefix="answer")
        self._stopping = asyncio.Event()
        self.streams = 0  #: open ListAndWatch streams
        self.told: Told | None = None  #: the last list that went to the kubelet

    def stop(self) -> None:
        """Ends the streams; calls in progress end by themselves."""
        self._stopping.set()
        for threads in (self._starts, self._answers):
            threads.shutdown(wait=False, cancel_futures=True)

    async def GetDevicePluginOptions(self, request: api.Empty, context: Any) -> api.DevicePluginOptions:  # noqa: ARG002 signature of gRPC
        return options()

    async def ListAndWatch(self, request: api.Empty, context: Any) -> AsyncIterator[api.ListAndWatchResponse]:  # noqa: ARG002 signature of gRPC
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        unlisten = self._cards.listen(wake)
        self.streams += 1
        told: list[api.Device] | None = None
        try:
            while not self._stopping.is_set():
                changed.clear()
                devices = [device for gpu in self._cards.inventory.devices for device in listed(gpu)]
                if devices != told:  # not every change of the cards changes the ids
                    healthy = sum(device.health == "Healthy" for device in devices)
                    log.info("reporting %d ids to the kubelet, %d of them healthy", len(devices), healthy)
                    self.told = Told(
                        healthy=frozenset(device.ID for device in devices if device.health == "Healthy"),
                        all=frozenset(device.ID for device in devices),
                        at=time.time(),
                    )
                    yield api.ListAndWatchResponse(devices=devices)
                    told = devices
                    self._taken()  # gRPC continues here when the list has been sent
                waits = [asyncio.ensure_future(event.wait()) for event in (changed, self._stopping)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        finally:
            self.streams -= 1
            unlisten()
            if not self.streams:
                self._lost()

    async def GetPreferredAllocation(
        self,
        request: api.PreferredAllocationRequest,
        context: Any,  # noqa: ARG002 signature of gRPC
    ) -> api.PreferredAllocationResponse:
        answers = []
        for one in request.container_requests:
            cards = await self._run(self._answers, self._node.steer, one.allocation_size)
            chosen = ids.prefer(
                one.available_deviceIDs, list(one.must_include_deviceIDs), one.allocation_size, list(cards)
            )
            answers.append(api.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return api.PreferredAllocationResponse(container_responses=answers)

    async def Allocate(self, request: api.AllocateRequest, context: Any) -> api.AllocateResponse:
        began = time.monotonic()
        known = self._cards.by_uuid
        answers = []
        for one in request.container_requests:
            strange = [device_id for device_id in one.devices_ids if ids.card(device_id) not in known]
            if strange:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not ids of this node: {', '.join(strange)}")
            try:
                answers.append(response(await self._run(self._answers, self._node.answer, list(one.devices_ids))))
            except (Refusal, OSError) as error:
                log.warning("refused Allocate: %s", error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, f"vgpu: {error}")
        self._observe("Allocate", time.monotonic() - began)
        return api.AllocateResponse(container_responses=answers)

    async def PreStartContainer(
        self, request: api.PreStartContainerRequest, context: Any
    ) -> api.PreStartContainerResponse:
        began = time.monotonic()
        try:
            await self._run(self._starts, self._node.start, list(request.devices_ids))
        except Refusal as refusal:
            log.warning("refused to start a container: %s", refusal)
            code = grpc.StatusCode.UNAVAILABLE if refusal.transient else grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, f"vgpu: {refusal}")
        except OSError as error:
            log.error("could not prepare a container: %s", error)  # without a trace: the kubelet tries again and again
            await context.abort(grpc.StatusCode.INTERNAL, f"vgpu: the agent could not prepare the container: {error}")
        finally:
            self._observe("PreStartContainer", time.monotonic() - began)
        return api.PreStartContainerResponse()

    async def _run(self, threads: ThreadPoolExecutor, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, call, *arguments)


def options() -> api.DevicePluginOptions:
    return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


def listed(gpu: Gpu) -> list[api.Device]:
    """All ids of a card, as ListAndWatch lists them."""
    topology = api.TopologyInfo(nodes=[api.NUMANode(ID=gpu.numa)]) if gpu.numa >= 0 else None
    health = "Healthy" if gpu.healthy else "Unhealthy"
    return [api.Device(ID=device_id, health=health, topology=topology) for device_id in ids.of(gpu)]


def response(answer: Answer) -> api.ContainerAllocateResponse:
    return api.ContainerAllocateResponse(
        envs=answer.env,
        mounts=[
            api.Mount(host_path=str(mount.host), container_path=mount.container, read_only=mount.read_only)
            for mount in answer.mounts
        ],
        cdi_devices=[api.CDIDevice(name=name) for name in answer.cdi_names],
        devices=[
            api.DeviceSpec(host_path=node.host, container_path=node.container, permissions="rw")
            for node in answer.devices
        ],
    )
