"""The kubelet's calls do not wait for each other where this is not necessary."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

from device_plugin.cards import Cards
from device_plugin.container_edits import Answer
from device_plugin.plugin import MAX_STARTS, Plugin
from vgpu.devices import Gpu, Inventory
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api

CARD = "GPU-a"
UNUSED = cast(Any, None)


class Waiting:
    """A node whose containers may not start yet."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        self.may_start = threading.Event()

    def steer(self, size: int) -> Sequence[str]:
        return (CARD,) * size

    def answer(self, device_ids: Sequence[str]) -> Answer:
        return Answer(env={"IDS": ",".join(device_ids)})

    def start(self, device_ids: Sequence[str]) -> None:  # noqa: ARG002 of the protocol
        self.waiting.release()
        assert self.may_start.wait(60)


def test_a_pod_is_admitted_while_more_starts_wait_than_there_are_threads() -> None:
    node, ids = Waiting(), [f"{CARD}::0"]
    cards = Cards(Inventory(devices=(Gpu(uuid=CARD, index=0, model="T4", memory=1, physical=1),)))

    async def scenario() -> tuple[list[str], str]:
        plugin = Plugin(cards, node, lambda *_: None)
        start = api.PreStartContainerRequest(devices_ids=ids)
        starts = [asyncio.ensure_future(plugin.PreStartContainer(start, UNUSED)) for _ in range(2 * MAX_STARTS)]
        try:
            async with asyncio.timeout(30):
                for _ in range(MAX_STARTS):
                    await asyncio.to_thread(node.waiting.acquire, timeout=30)
                asked = api.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=1)
                preferred = await plugin.GetPreferredAllocation(
                    api.PreferredAllocationRequest(container_requests=[asked]), UNUSED
                )
                wanted = api.ContainerAllocateRequest(devices_ids=ids)
                given = await plugin.Allocate(api.AllocateRequest(container_requests=[wanted]), UNUSED)
        finally:
            node.may_start.set()
        await asyncio.gather(*starts)
        plugin.stop()
        return list(preferred.container_responses[0].deviceIDs), given.container_responses[0].envs["IDS"]

    assert asyncio.run(scenario()) == (ids, ids[0])
