"""Processes outside our containers, and containers that have more than they were charged."""

import os
import subprocess
import sys

import pytest
from agent_machine import machines
from agent_world import MIB, A, until, worlds

from device_plugin.backstop import TURNS
from device_plugin.foreign import Observed, Process
from device_plugin.overhead import Identity
from device_plugin.sandbox import Entry
from device_plugin.watch import Watch
from vgpu import names
from vgpu.devices import GpuSlice
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.native import CardUsage, Region, Usage, paths

#: Takes 500 MiB of the first card, says so, and waits for the end of its input
USER = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(500 << 20)) == 0
print("taken=1", flush=True)
"""
HOST = USER + "sys.stdin.read()"
T4 = 14912  #: MiB of the card that programs can have


def test_a_process_of_the_host_is_seen_and_a_container_is_none() -> None:
    host = 2000
    tier = f"deviceMemoryScaling: 2, hostMemory: {host}, memoryMode: movable"
    with machines("cdi", 1, plugin=tier, reserved=host + 100) as machine:
        machine.start_agent()
        (card,) = machine.ready()
        until(lambda: machine.inventory().devices[0].memory > machine.inventory().devices[0].physical_memory)
        free = T4 - T4 // 64 - 3000 - 11000
        machine.run("p", {"main": [GpuSlice(card, 4000, phys=3000)]}, USER + "signal.pause()")
        machine.run("q", {"main": [GpuSlice(card, 11000)]}, "signal.pause()")
        until(lambda: machine.environment("p").get("taken"))

        def lent() -> float:
            return (machine.sample("vgpu_container_memory_lent_bytes", "p", "main", card) or 0) / MIB

        until(lambda: free - 2 <= lent() <= free)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LD_", "VGPU_", "CUDA_"))}
        env |= {"LD_LIBRARY_PATH": str(paths.simulator()), names.ENV_SIMULATOR_DIR: str(machine.root / "run/simulator")}
        with subprocess.Popen([sys.executable, "-c", HOST], env=env, stdin=subprocess.PIPE) as foreign:
            try:
                until(lambda: machine.sample("vgpu_card_foreign_processes", "", "", card) == 1)
                assert (machine.sample("vgpu_card_foreign_memory_bytes", "", "", card) or 0) >= 500 * MIB
                events = until(lambda: [e for e in machine.events() if e["reason"] == names.EVENT_FOREIGN])
                assert [f"process {foreign.pid} (" in e["message"] for e in events] == [True]
                until(lambda: machine.inventory().devices[0].foreign)
                assert machine.inventory().devices[0].others % 256 == 0
                until(lambda: machine.inventory().devices[0].others >= 500)  # the scheduler gives this memory to no pod
                until(lambda: lent() <= free - 500)  # memory that cannot be taken back is not lent
                assert machine.sample("vgpu_container_untracked_bytes", "p", "main", card) == 0
                assert machine.sample("vgpu_container_observed_gpu_seconds_total", "p", "main", card) == 0
            finally:
                foreign.kill()
        until(lambda: machine.sample("vgpu_card_foreign_processes", "", "", card) == 0)
        until(lambda: not machine.inventory().devices[0].foreign and not machine.inventory().devices[0].others)
        until(lambda: lent() >= free - 2)


@pytest.mark.parametrize(
    ("evict", "owner", "gone"),
    [
        (False, "ReplicaSet", False),
        (True, "ReplicaSet", True),
        (True, "", False),  # no controller would recreate the pod
        (True, "Node", False),  # a static pod
    ],
)
def test_a_container_that_keeps_out_of_its_ledger_is_told_and_evicted_where_that_is_wanted(
    evict: bool, owner: str, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def refused_once(client: KubeClient, namespace: str, name: str, uid: str) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise ApiError(429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.")
        evict_(client, namespace, name, uid)

    evict_ = writes.evict
    monkeypatch.setattr(writes, "evict", refused_once)
    with worlds() as make:
        world = make()
        uid = world.pod("p", {"main": [GpuSlice(A, 1000)]}, owner=owner)
        until(lambda: world.pods.get(uid))
        world.allocate(uid, "main", [f"{A}::0"])
        world.starts.start([f"{A}::0"])
        with Region.open(world.sandboxes.directory(uid, "main")) as region:
            usage = region.usage()
        (entry,) = world.sandboxes.entries()
        watch = Watch(
            world.cards,
            world.pods,
            world.consequences,
            evict=evict,
            look=lambda: [Observed(A, 1234, 900 * MIB)],
            who=lambda _: Process("thief", Identity(7, 1, 1), uid),  # its cgroup names the pod
            strangers=dict,
        )

        def look_for_a_while() -> None:
            for _ in range(TURNS):
                watch.once({entry: ((GpuSlice(A, 1000),), usage)}, lambda _: None)
            world.consequences._worker.submit(lambda: None).result(timeout=60)  # all earlier calls are done

        for _ in range(2):
            look_for_a_while()
        assert watch.of(entry, A) == (900 * MIB, 0)
        assert watch.foreign(A) == ()
        told = until(lambda: [e for e in world.events() if e["reason"] == names.EVENT_UNTRACKED])
        assert "it uses 900 MiB, but vgpu charged only 0 MiB" in told[0]["message"]
        assert [one["count"] for one in told] == [1]
        pod = world.read_pod("p")
        assert (pod is None or "deletionTimestamp" in pod["metadata"]) is gone


def test_a_container_that_allocates_while_nvml_is_asked_has_nothing_untracked() -> None:
    with worlds() as make:
        world = make()
        uid = world.pod("p", {"main": [GpuSlice(A, 1000)]})
        until(lambda: world.pods.get(uid))
        world.allocate(uid, "main", [f"{A}::0"])
        world.starts.start([f"{A}::0"])
        (entry,) = world.sandboxes.entries()
        taken = [0]

        def look() -> list[Observed]:
            taken[0] += 100 * MIB
            return [Observed(A, 1234, taken[0])]

        def charged(_: Entry) -> tuple[tuple[GpuSlice, ...], Usage]:
            return (GpuSlice(A, 1000),), Usage((CardUsage(used=taken[0]),), ())

        who = Process("trainer", Identity(7, 1, 1), uid)
        watch = Watch(
            world.cards,
            world.pods,
            world.consequences,
            evict=False,
            look=look,
            who=lambda _: who,
            strangers=world.holdings.strangers,
        )
        for _ in range(2 * TURNS):
            watch.once({entry: charged(entry)}, charged)
            assert watch.of(entry, A) == (0, 0)


def test_gpu_time_that_only_nvml_counts_is_charged_to_the_container() -> None:
    with worlds() as make:
        world = make()
        uid = world.pod("p", {"main": [GpuSlice(A, 1000, cores=20)]})
        until(lambda: world.pods.get(uid))
        world.allocate(uid, "main", [f"{A}::0"])
        world.starts.start([f"{A}::0"])
        (entry,) = world.sandboxes.entries()
        directory = world.sandboxes.directory(uid, "main")
        who = Process("trainer", Identity(7, 1, 1), uid)
        watch = Watch(
            world.cards,
            world.pods,
            world.consequences,
            evict=False,
            look=lambda: [Observed(A, 1234, 0, seconds=0.9)],
            who=lambda _: who,
            strangers=world.holdings.strangers,
        )

        def charged(_: Entry) -> tuple[tuple[GpuSlice, ...], Usage]:
            with Region.open(directory) as region:
                return (GpuSlice(A, 1000, cores=20),), region.usage()

        turns = 10
        for _ in range(turns):
            watch.once({entry: charged(entry)}, charged)
        assert 0.9 * (turns - 3) <= charged(entry)[1].cards[0].gpu_ns / 1e9 <= 0.9 * turns
