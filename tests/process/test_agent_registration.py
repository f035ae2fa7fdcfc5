"""The plugin on a real socket: served, registered, and registered again after every change of its folder
by a kubelet.
"""

import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from agent_kubelet import SmallKubelet, until

from device_plugin import conflict, registration
from device_plugin.cards import Cards
from device_plugin.container_edits import Answer, Mount
from device_plugin.plugin import Plugin
from device_plugin.refusal import Refusal
from device_plugin.registration import Registration
from vgpu.devices import Gpu, Inventory
from vgpu.kubelet import checkpoint
from vgpu.kubelet.checkpoint import Checkpoint
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api

A, B = "GPU-aaaa", "GPU-bbbb"
IDS = [f"{uuid}::{n}" for uuid in (A, B) for n in range(2)]


class FakeNode:
    refusal: Exception | None = None

    def __init__(self) -> None:
        self.started: list[Sequence[str]] = []

    def steer(self, size: int) -> Sequence[str]:
        return [B, A][:size]

    def answer(self, device_ids: Sequence[str]) -> Answer:
        return Answer({"K": "V"}, (Mount(Path("/host"), "/inside"),), (f"vgpu.io/gpu={len(device_ids)}",))

    def start(self, device_ids: Sequence[str]) -> None:
        if self.refusal:
            raise self.refusal
        self.started.append(device_ids)


class World:
    def __init__(self, folder: Path) -> None:
        gpus = tuple(Gpu(uuid=u, index=i, model="T4", memory=15360, slots=2, numa=i - 1) for i, u in enumerate((A, B)))
        self.cards = Cards(Inventory(devices=gpus))
        self.node = FakeNode()
        self.durations: list[str] = []
        self.conflicts: list[str] = []
        self.plugin = Plugin(self.cards, self.node, self.observe)
        self.registration = Registration(folder, "nvidia.com/gpu", self.plugin, self.cards, tell=self.conflicts.append)
        self.kubelet = SmallKubelet(folder)

    def observe(self, call: str, seconds: float) -> None:
        assert seconds >= 0
        self.durations.append(call)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.registration.run())
        try:
            yield
            assert not task.done(), task
        finally:
            self.plugin.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.kubelet.stop()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="vgpu", dir="/tmp") as folder:  # a socket's path is short
        yield World(Path(folder) / "device-plugins")


def play(world: World, story: Callable[[World], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await story(world)

    asyncio.run(all_of_it())


def test_registers_and_tells_ids_at_once(world: World) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            request = world.kubelet.registered[0]
            assert (request.version, request.endpoint, request.resource_name) == (
                "v1beta1",
                "vgpu.sock",
                "nvidia.com/gpu",
            )
            assert request.options.pre_start_required
            assert request.options.get_preferred_allocation_available
            assert world.kubelet.devices[0] == dict.fromkeys(IDS, "Healthy")

    play(world, story)


def test_waits_for_a_kubelet_that_is_not_there_yet(world: World) -> None:
    async def story(world: World) -> None:
        async with world.running():
            await asyncio.sleep(0)
            await world.kubelet.start()
            await until(lambda: world.kubelet.devices)

    play(world, story)


def test_a_kubelet_restart_that_wipes_the_folder_is_followed(world: World) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            for turn in range(1, 4):
                await until(lambda turn=turn: len(world.kubelet.registered) >= turn and world.plugin.streams == 1)
                await world.kubelet.stop()
                await world.kubelet.start()
            await until(lambda: len(world.kubelet.registered) >= 4 and any(world.kubelet.devices[-1:]))
            assert world.kubelet.devices[-1] == dict.fromkeys(IDS, "Healthy")

    play(world, story)


def test_an_event_that_comes_with_the_end_does_not_hold_it_up(world: World) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        for turn in range(20):
            task = asyncio.create_task(world.registration.run())
            await until(lambda turn=turn: len(world.kubelet.registered) == turn + 1)
            await asyncio.sleep(0.02)
            (world.kubelet.folder / f"event-{turn}").touch()
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,), timeout=10)
            assert task.done()
        await world.kubelet.stop()

    play(world, story)


def test_our_own_socket_removed_is_made_again(world: World) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            (world.kubelet.folder / "vgpu.sock").unlink()
            await until(lambda: len(world.kubelet.registered) == 2 and any(world.kubelet.devices[-1:]))

    play(world, story)


def test_health_changes_are_told(world: World) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            world.cards.sicken(B, "XID 79")
            await until(lambda: len(world.kubelet.devices) == 2)
            assert [world.kubelet.devices[1][one] for one in IDS] == ["Healthy"] * 2 + ["Unhealthy"] * 2
            world.cards.heal(B)
            await until(lambda: len(world.kubelet.devices) == 3)
            assert set(world.kubelet.devices[2].values()) == {"Healthy"}

    play(world, story)


def test_a_change_that_is_none_of_ids_is_not_told(world: World) -> None:
    async def story(world: World) -> None:
        lists = aiter(world.plugin.ListAndWatch(api.Empty(), None))
        await anext(lists)
        following = asyncio.ensure_future(anext(lists))
        for _ in range(20):  # turns of the event loop, in which the plugin could answer
            world.cards.used_by_others({})
            world.cards.used_by_others({A: 1})
            await asyncio.sleep(0)
        world.cards.sicken(B, "XID 79")
        told = await following
        assert {one.health for one in told.devices} == {"Healthy", "Unhealthy"}

    play(world, story)


def test_preferred_ids_answers_and_refusals_reach_the_kubelet(world: World) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            plugin = world.kubelet.plugin()
            wish = api.ContainerPreferredAllocationRequest(available_deviceIDs=IDS, allocation_size=1)
            preferred = await plugin.GetPreferredAllocation(
                api.PreferredAllocationRequest(container_requests=[wish, wish])
            )
            assert [list(one.deviceIDs) for one in preferred.container_responses] == [[f"{B}::0"]] * 2
            ask = api.ContainerAllocateRequest(devices_ids=[f"{A}::0"])
            given = (await plugin.Allocate(api.AllocateRequest(container_requests=[ask]))).container_responses[0]
            assert (dict(given.envs), given.cdi_devices[0].name) == ({"K": "V"}, "vgpu.io/gpu=1")
            assert (given.mounts[0].host_path, given.mounts[0].container_path, given.mounts[0].read_only) == (
                "/host",
                "/inside",
                True,
            )
            await plugin.PreStartContainer(api.PreStartContainerRequest(devices_ids=[f"{A}::0"]))
            assert world.node.started == [[f"{A}::0"]]
            assert world.durations == ["Allocate", "PreStartContainer"]
            strange = api.ContainerAllocateRequest(devices_ids=["GPU-zzzz::0"])
            with pytest.raises(grpc.aio.AioRpcError, match="GPU-zzzz::0"):
                await plugin.Allocate(api.AllocateRequest(container_requests=[strange]))

    play(world, story)


def test_another_plugin_that_takes_our_resource_is_told_and_not_fought(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conflict, "PATIENCE_SECONDS", (0.2, 1.0))
    monkeypatch.setattr(registration, "_LEAVE_SECONDS", 0.05)

    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            for turn in range(1, 4):
                await until(lambda turn=turn: len(world.kubelet.registered) == turn and world.plugin.streams)
                await world.kubelet.supersede()
            await until(lambda: len(world.kubelet.registered) == 4 and world.plugin.streams)
            assert [said.partition(" with ")[0] for said in world.conflicts] == [
                "another device plugin registers nvidia.com/gpu"
            ]

    play(world, story)


def test_a_kubelet_that_asks_another_plugin_and_keeps_our_stream_is_told_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after our stream has ended: otherwise the kubelet would drop the plugin that registered last."""
    monkeypatch.setattr(conflict, "PATIENCE_SECONDS", (0.2, 1.0))
    monkeypatch.setattr(registration, "_OTHERS_SECONDS", 0.1)

    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            world.kubelet.lists(["x-0", "x-1"])
            await until(lambda: len(world.kubelet.registered) == 2)
            await until(lambda: len(world.kubelet.devices) >= 3)
            ours = dict.fromkeys(IDS, "Healthy")
            assert world.kubelet.devices[:3] == [ours, {}, ours], "the stream did not end before"
            assert world.plugin.streams == 1

    play(world, story)


def test_a_kubelet_that_was_stopped_is_no_conflict(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflict, "PATIENCE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(registration, "_LEAVE_SECONDS", 0.0)
    world.kubelet.folder.mkdir()
    path = world.kubelet.folder / "kubelet.sock"

    async def story(world: World) -> None:
        with socket.socket(socket.AF_UNIX) as stopped:  # its file stays without a listener
            stopped.bind(str(path))
        await world.registration._others()
        assert world.registration._server is None, "it would register again"
        path.unlink()
        with socket.socket(socket.AF_UNIX) as serving:
            serving.bind(str(path))
            serving.listen()
            await world.registration._others()
        assert world.registration._server is not None
        await world.registration._stop_server()
        assert world.conflicts == [], "nobody else is known"

    play(world, story)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every 50 ms, and gives up after ten looks."""
    monkeypatch.setattr(conflict, "PATIENCE_SECONDS", (0.5, 60.0))
    monkeypatch.setattr(conflict, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(registration, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(registration, "_OTHERS_SECONDS", 0.05)
    monkeypatch.setattr(registration, "_LEAVE_SECONDS", 0.01)


@pytest.mark.usefixtures("impatient")
def test_an_event_loop_that_stands_still_proves_no_other_plugin(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The test's kubelet restarts several times, while no other task runs for longer than the patience."""

    async def starve() -> None:
        for _ in range(10):
            time.sleep(0.7)  # like an overloaded node
            await asyncio.sleep(0.05)

    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            starving = asyncio.create_task(starve())
            for _ in range(3):
                await world.kubelet.stop()
                await world.kubelet.start()
            await starving
            await until(lambda: world.plugin.streams == 1 and world.kubelet.devices[-1])
            assert world.conflicts == []
            assert world.registration._contest.lost == 0

    play(world, story)
    assert "another device plugin" not in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_kubelet_that_is_slow_proves_no_other_plugin(world: World) -> None:
    """The kubelet has answered Register and opens the stream late: the agent asks again, each time after
    the same wait.
    """

    async def story(world: World) -> None:
        world.kubelet.listening.clear()
        await world.kubelet.start()
        async with world.running():
            await until(lambda: len(world.kubelet.registered) >= 4)
            assert world.registration._contest.lost == 0
            world.kubelet.listening.set()
            await until(lambda: world.plugin.streams and world.kubelet.devices and world.kubelet.devices[-1])
        assert world.conflicts == []

    play(world, story)


@pytest.mark.usefixtures("impatient")
def test_a_checkpoint_from_before_our_list_proves_nothing(world: World) -> None:
    """An agent with fewer slices follows one with more; the kubelet has not processed its list yet."""

    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            world.kubelet.lists([*IDS, f"{A}::2"])
            old = time.time() - 60
            os.utime(world.kubelet.folder / checkpoint.FILE_NAME, (old, old))
            looks = 0
            while looks < 30:
                await asyncio.sleep(0.05)
                looks += 1
            assert len(world.kubelet.registered) == 1
            world.kubelet.lists([A, B])  # whole cards, as NVIDIA's plugin names them
            await until(lambda: len(world.kubelet.registered) == 2)
            assert world.conflicts
            assert world.registration._contest.lost == 1

    play(world, story)


def test_the_kubelet_s_checkpoint_tells_of_ids_that_are_not_ours(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_OTHERS_SECONDS", 0.1)
    path = world.kubelet.folder / checkpoint.FILE_NAME

    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            checkpoint.write(path, Checkpoint([], {"nvidia.com/gpu": [*IDS, "GPU-zzzz-0"], "other.com/nic": ["eth0"]}))
            await until(lambda: world.conflicts)
            checkpoint.write(path, Checkpoint([], {"nvidia.com/gpu": IDS}))
            await until(lambda: len(world.conflicts) == 2)
            assert world.conflicts[1] == ""

    play(world, story)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Refusal("no allocation"), grpc.StatusCode.FAILED_PRECONDITION, "vgpu: no allocation"),
        (Refusal("later", transient=True), grpc.StatusCode.UNAVAILABLE, "vgpu: later"),
        (OSError(28, "No space left on device", "/run/vgpu"), grpc.StatusCode.INTERNAL, "No space left on device"),
    ],
)
def test_a_start_that_fails_says_why(world: World, error: Exception, code: grpc.StatusCode, text: str) -> None:
    async def story(world: World) -> None:
        await world.kubelet.start()
        async with world.running():
            await until(lambda: world.kubelet.devices)
            world.node.refusal = error
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await world.kubelet.plugin().PreStartContainer(api.PreStartContainerRequest(devices_ids=[IDS[0]]))
            assert caught.value.code() == code
            assert text in (caught.value.details() or "")

    play(world, story)
