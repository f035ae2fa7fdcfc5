"""The agent as a real process with a kubelet and an API server: up to running containers, and through kills."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_machine import NODE, Machine, machines
from agent_world import MIB, until

from vgpu import names
from vgpu.devices import GpuSlice
from vgpu.kube import writes
from vgpu.native import simulator
from vgpu.standin.apiserver import ApiServer

#: A program that takes 1000 MiB of its card, tries for more than its slice, and waits
CLIENT = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
print(f"total={total.value}\\npid={os.getpid()}")
print("fits", cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1000 << 20)), sep="=")
print("over", cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2500 << 20)), sep="=", flush=True)
signal.pause()
"""


@pytest.fixture(params=["cdi", "envvar"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machines(request.param) as made:
        yield made


cdi_only = pytest.mark.parametrize("machine", ["cdi"], indirect=True)


@cdi_only
def test_a_node_tells_what_it_has(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    node = machine.node()
    assert node["metadata"]["labels"][names.LABEL_PRESENT] == "true"
    inventory = machine.inventory()
    assert [gpu.index for gpu in inventory.devices] == [0, 1]
    assert len(set(cards)) == 2
    memory = sum(gpu.memory for gpu in inventory.devices)
    for resource in (names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_MEMORY):
        assert int(node["status"]["capacity"][resource]) == memory
    assert node["status"]["capacity"][names.RESOURCE_TOTAL_CORES] == "200"
    patch = {"status": {"capacity": {names.RESOURCE_TOTAL_MEMORY: "0"}}}  # as a kubelet without its checkpoint does
    machine.client.request(
        "PATCH", f"/api/v1/nodes/{NODE}/status", body=patch, content_type="application/merge-patch+json"
    )
    until(lambda: machine.node()["status"]["capacity"][names.RESOURCE_TOTAL_MEMORY] == str(memory))


def test_containers_run_with_their_slices_and_show_in_the_metrics(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    uid = machine.run(
        "p",
        {"first": [GpuSlice(cards[1], 500)], "main": [GpuSlice(cards[1], 3000, cores=30)]},
        init="first",
    )
    until(lambda: machine.phase("p") == "Succeeded")
    first, main = machine.environment("p", "first"), machine.environment("p")
    assert first["LD_PRELOAD"] == main["LD_PRELOAD"]
    assert Path(main["LD_PRELOAD"]).name.startswith("libvgpu-")
    assert main["NVIDIA_VISIBLE_DEVICES"] == cards[1]
    assert Path(main["LD_LIBRARY_PATH"]).joinpath("libcuda.so.1").exists()
    by_name = "CUDA_DEVICE_MEMORY_LIMIT_0" in main
    if by_name:
        assert first["VGPU_DIR"].endswith(f"{uid}_first")
        assert (first["CUDA_DEVICE_MEMORY_LIMIT_0"], main["CUDA_DEVICE_MEMORY_LIMIT_0"]) == ("500m", "3000m")
    assert main["VGPU_DIR"].endswith(f"{uid}_main")
    until(lambda: machine.sample("vgpu_container_memory_limit_bytes", "p", "main", cards[1]) == 3000 * MIB)
    until(lambda: machine.sample("vgpu_container_memory_limit_bytes", "p", "first", cards[1]) == 500 * MIB)
    writes.delete_pod(machine.client, "default", "p", uid, grace_seconds=0)
    until(lambda: not list((machine.root / "run" / "containers").iterdir()))
    until(lambda: not list((machine.root / "cdi").iterdir()))
    until(lambda: not list((machine.root / "run" / "by-ids").iterdir()))


@cdi_only
def test_what_a_container_uses_is_seen_and_freed_when_it_dies(machine: Machine) -> None:
    machine.start_agent()
    card = machine.ready()[1]
    machine.run("p", {"main": [GpuSlice(card, 3000)]}, CLIENT)
    told = until(lambda: (found := machine.environment("p")).get("over") and found)
    assert (told["total"], told["fits"], told["over"]) == (str(3000 * MIB), "0", "2")
    until(lambda: (machine.sample("vgpu_container_memory_used_bytes", "p", "main", card) or 0) >= 1000 * MIB)
    until(lambda: machine.sample("vgpu_container_oom_total", "p", "main", card) == 1)
    assert machine.sample("vgpu_container_processes", "p", "main", card) == 1
    assert (machine.sample("vgpu_card_memory_used_bytes", "", "", card) or 0) >= 1000 * MIB
    os.kill(int(told["pid"]), signal.SIGKILL)
    until(lambda: machine.sample("vgpu_container_memory_used_bytes", "p", "main", card) == 0)
    assert machine.sample("vgpu_container_processes", "p", "main", card) == 0


def test_kills_of_the_agent_lose_nothing_and_touch_no_pod(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    machine.run("long", {"main": [GpuSlice(cards[0], 9000)]}, "signal.pause()")
    until(lambda: machine.environment("long").get("VGPU_DIR"))
    checkpoint = machine.root / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
    for turn in range(3):
        uid = machine.run(f"short{turn}", {"main": [GpuSlice(cards[turn % 2], 1000)]})
        until(lambda uid=uid: uid in checkpoint.read_text())  # admitted, and about to start
        machine.stop_agent(signal.SIGKILL)
        machine.start_agent()
        until(lambda turn=turn: machine.phase(f"short{turn}") == "Succeeded", 40)
        machine.registered(turn + 2)
    assert machine.phase("long") == "Running"
    assert machine.stop_agent(signal.SIGTERM) == 0
    assert machine.phase("long") == "Running"
    assert list((machine.root / "run" / "containers").glob("*_main/usage"))
    machine.start_agent()
    machine.registered(5)
    machine.ready()
    # what was granted before the kills still counts
    greedy = machine.run("greedy", {"main": [GpuSlice(cards[0], 9000)]})
    until(lambda: [e for e in machine.events() if "do not fit" in e.get("message", "")], 40)
    assert machine.phase("greedy") == "Pending"
    writes.delete_pod(machine.client, "default", "greedy", greedy, grace_seconds=0)


@cdi_only
def test_a_kubelet_restart_leaves_pods_running_and_the_node_whole(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    machine.run("long", {"main": [GpuSlice(cards[0], 9000)]}, "signal.pause()")
    until(lambda: machine.environment("long").get("VGPU_DIR"))
    machine.kubelet.restart()
    machine.registered(2)
    machine.ready()
    machine.run("next", {"main": [GpuSlice(cards[0], 1000)]})
    until(lambda: machine.phase("next") == "Succeeded")
    assert machine.phase("long") == "Running"


@cdi_only
def test_a_sick_card_takes_no_pods(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    until(lambda: "watching 2 cards" in (machine.root / "agent.log").read_text())  # earlier errors are not reported
    simulator.inject_xid(machine.root / "run" / "simulator", 1, 13)  # a program's own error
    simulator.inject_xid(machine.root / "run" / "simulator", 0, 79)
    until(lambda: machine.allocatable("nvidia.com/gpu") == "10")
    until(lambda: [gpu.healthy for gpu in machine.inventory().devices] == [False, True])
    until(lambda: [e for e in machine.events() if e["reason"] == "VgpuUnhealthy" and cards[0] in e["message"]])
    until(lambda: machine.metrics()["vgpu_card_healthy"] == {("", "", cards[0]): 0.0, ("", "", cards[1]): 1.0})
    machine.stop_agent(signal.SIGKILL)
    machine.start_agent()
    until(lambda: machine.metrics())
    until(lambda: machine.allocatable("nvidia.com/gpu") == "10")
    assert [gpu.healthy for gpu in machine.inventory().devices] == [False, True]


@cdi_only
def test_a_pod_that_went_past_the_scheduler_does_not_start_and_says_why(machine: Machine) -> None:
    machine.start_agent()
    cards = machine.ready()
    machine.run("bypass", {"main": [GpuSlice(cards[0], 100)]}, record=False)
    told = until(lambda: [event for event in machine.events() if event["reason"] == "VgpuMismatch"])
    assert "has no allocation" in told[0]["message"]
    assert machine.phase("bypass") == "Pending"
    assert not machine.environment("bypass")


@cdi_only
def test_an_agent_without_api_server_or_kubelet_waits(machine: Machine) -> None:
    machine.api.stop()
    machine.start_agent()
    machine.registered(1)
    again = ApiServer(machine.api.port, store=machine.api.store)
    again.start()
    machine.api = again
    machine.ready()


def test_wrong_flags_and_files_are_one_sentence(tmp_path: Path) -> None:
    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "NODE_NAME"}
        command = [sys.executable, "-m", "device_plugin", *flags]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)

    assert "--node-name" in run().stderr
    (tmp_path / "config.yaml").write_text("devicePlugin: {deviceSplitCount: none}")
    wrong = run("--node-name", "n", "--config", str(tmp_path / "config.yaml"))
    assert wrong.returncode == 1
    assert "deviceSplitCount" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    (tmp_path / "good.yaml").write_text("simulate: T4")
    missing = run(
        "--node-name", "n", "--config", str(tmp_path / "good.yaml"), "--kubeconfig", str(tmp_path / "nothing")
    )
    assert missing.returncode == 1
    assert "nothing" in missing.stderr
    assert "Traceback" not in missing.stderr
