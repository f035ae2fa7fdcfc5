"""Refused starts end: by waiting, or by an event and, where a controller owns the pod, an eviction."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from agent_world import NODE, A, B, World, until, worlds

from device_plugin import pod_events, starts
from device_plugin.cards import Cards
from device_plugin.refusal import Refusal
from vgpu.devices import Gpu, GpuSlice, Inventory
from vgpu.native import paths, simulator
from vgpu.standin.apiserver import ApiServer

ID_A, NEXT_A, ID_B = f"{A}::0", f"{A}::1", f"{B}::0"
HOLD = """
import ctypes, sys
cuda, memory, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def world() -> Iterator[World]:
    with worlds() as make:
        yield make()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(starts, "RECORD_SECONDS", 0.1)


def gone(world: World, name: str) -> bool:
    pod = world.read_pod(name)
    return pod is None or "deletionTimestamp" in pod["metadata"]


def test_a_start_waits_while_a_pod_that_was_deleted_by_force_still_computes(world: World) -> None:
    simulator.create(world.root / "sim", "T4")
    card = Gpu(uuid=simulator.cards(world.root / "sim")[0].uuid, index=0, model="Tesla T4", memory=15360)
    world.cards = Cards(Inventory(devices=(card,)))
    world.agent()
    old = world.pod("old", {"main": [GpuSlice(card.uuid, mem=10000)]})
    world.allocate(old, "main", [f"{card.uuid}::0"])
    world.starts.start([f"{card.uuid}::0"])
    env = {
        **os.environ,
        "LD_PRELOAD": str(paths.libvgpu()),
        "LD_LIBRARY_PATH": str(paths.simulator()),
        "VGPU_SIM_DIR": str(world.root / "sim"),
        "VGPU_DIR": str(world.sandboxes.directory(old, "main")),
    }
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        world.delete_pod("old")
        until(lambda: world.pods.get(old) is None)
        new = world.pod("new", {"main": [GpuSlice(card.uuid, mem=10000)]}, owner="ReplicaSet")
        world.allocate(new, "main", [f"{card.uuid}::1"])
        started = threading.Event()
        thread = threading.Thread(target=lambda: (world.starts.start([f"{card.uuid}::1"]), started.set()))
        thread.start()
        assert not started.wait(0.5)
        process.kill()
        assert started.wait(20)
        thread.join()
    assert not gone(world, "new")
    assert not [event for event in world.events() if event["reason"] == "VgpuMismatch"]


def test_while_the_api_server_is_away_known_pods_start_and_others_wait(world: World) -> None:
    known = world.pod("known", {"main": [GpuSlice(A, mem=100)]})
    until(lambda: world.pods.get(known))
    world.pods.stop()
    unknown = world.pod("unknown", {"main": [GpuSlice(A, mem=200)]}, owner="ReplicaSet")
    for uid, device in ((known, ID_A), (unknown, NEXT_A)):
        world.allocate(uid, "main", [device])
    world.api.stop()
    world.starts.start([ID_A])
    started = threading.Event()
    thread = threading.Thread(target=lambda: (world.starts.start([NEXT_A]), started.set()))
    thread.start()
    assert not started.wait(0.5)
    world.api = ApiServer(world.api.port, store=world.api.store)
    world.api.start()
    assert started.wait(20)
    thread.join()
    assert not gone(world, "unknown")


@pytest.mark.usefixtures("impatient")
def test_waiting_that_leads_to_nothing_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.allocate(world.pod("holder", {"main": [GpuSlice(A, mem=10000)]}), "main", [ID_A])
    world.starts.start([ID_A])
    for number, (name, owner) in enumerate((("owned", "ReplicaSet"), ("bare", ""), ("static", "Node")), 1):
        world.allocate(world.pod(name, {"main": [GpuSlice(A, mem=10000)]}, owner=owner), "main", [f"{A}::{number}"])

    def refuse(number: int) -> None:
        with pytest.raises(Refusal, match="do not fit") as caught:
            world.starts.start([f"{A}::{number}"])
        assert caught.value.transient  # the kubelet's next try may succeed

    for number in (1, 2, 3) * (starts.END_TRIES - 1):
        refuse(number)
    assert not [event for event in world.events() if event["reason"] == "VgpuMismatch"]
    monkeypatch.setattr(starts, "END_SECONDS", 0.0)
    for number in (1, 2, 3):
        refuse(number)
    until(lambda: gone(world, "owned"))
    until(lambda: {e["involvedObject"]["name"] for e in world.events() if e["reason"] == "VgpuMismatch"} >= {"bare"})
    until(lambda: len([event for event in world.events() if event["reason"] == "VgpuMismatch"]) == 3)
    assert not gone(world, "bare")
    assert not gone(world, "static")
    world.finish_pod("holder")
    until(lambda: (pod := world.pods.find("default", "holder")) and pod.finished)
    world.starts.start([f"{A}::2"])  # a pod without a controller starts after all


@pytest.mark.usefixtures("impatient")
def test_waiting_is_counted_anew_after_a_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = world.pod("p", {"main": [GpuSlice(A, mem=10000)]}, owner="ReplicaSet")
    holder = world.pod("holder", {"main": [GpuSlice(A, mem=10000)]})
    world.allocate(holder, "main", [ID_A])
    world.allocate(uid, "main", [NEXT_A])
    world.starts.start([ID_A])
    clock = [0.0]
    monkeypatch.setattr(starts, "ANSWER_SECONDS", -1.0)
    monkeypatch.setattr(starts.time, "monotonic", lambda: clock[0])
    with pytest.raises(Refusal, match="do not fit"):
        world.starts.start([NEXT_A])
    world.finish_pod("holder")
    until(lambda: (pod := world.pods.get(holder)) and pod.finished)
    world.starts.start([NEXT_A])
    clock[0] = 10 * starts.END_SECONDS
    monkeypatch.setattr(world.granting, "grant", _no_space)
    with pytest.raises(OSError, match="no space"):
        world.starts.start([NEXT_A])
    assert not gone(world, "p")
    clock[0] += 10 * starts.END_SECONDS  # the node stood still
    for _ in range(starts.END_TRIES - 1):
        assert not gone(world, "p")
        with pytest.raises(OSError, match="no space"):
            world.starts.start([NEXT_A])
    until(lambda: gone(world, "p"))
    told = [event for event in world.events() if event["reason"] == "VgpuMismatch"]
    assert f"could not prepare the container: no space (for more than {starts.END_SECONDS:.0f} s)" in told[0]["message"]


def _no_space(*_: object) -> None:
    raise OSError("no space")


@pytest.mark.usefixtures("impatient")
def test_pods_of_one_owner_are_not_evicted_in_a_storm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {name: f"{A}::{n}" for n, name in enumerate(("one", "two"))} | {"other": ID_B}
    for name, device in devices.items():
        world.allocate(world.pod(name, None, owner="Job" if name == "other" else "ReplicaSet"), "main", [device])
    for device in devices.values():
        with pytest.raises(Refusal, match="did not place it"):
            world.starts.start([device])
    until(lambda: gone(world, "one"))
    until(lambda: gone(world, "other"))
    assert not gone(world, "two")
    monkeypatch.setattr(pod_events, "EVICTION_SECONDS", 0.0)
    with pytest.raises(Refusal, match="did not place it"):
        world.starts.start([devices["two"]])
    until(lambda: gone(world, "two"))
    assert {event["source"]["host"] for event in world.events()} == {NODE}
