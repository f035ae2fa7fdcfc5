"""`helm uninstall`: removes from the nodes what the agents published, and nothing else."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_world import World, pod

from device_plugin import cleanup
from vgpu import names
from vgpu.kube.client import STRATEGIC_PATCH
from vgpu.standin.services import wait_for

DAEMONSETS = "/apis/apps/v1/namespaces/default/daemonsets"
SECONDS = 60.0
CARDS = {
    "nvidia.com/gpu": "10",
    "nvidia.com/gpumem": "8192",
    "nvidia.com/gpumem-percentage": "100",
    "nvidia.com/gpucores": "100",
    "vgpu.io/memory": "8192",
    "vgpu.io/cores": "100",
}
FLAGS = ["--namespace=default", "--daemonset=agents", "--selector=app=agent", "--node-selector=gpu=yes"]
PLAIN = {"cpu": "4", "memory": "1Gi", "example.com/fpga": "1"}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.close()


def add_node(world: World, name: str, gpu: str, ready: str = "True") -> None:
    notes = {names.DEVICES: "{}", names.MODE: "cdi: why", names.AGENT: "leaving", names.CORDON: "GPU-1", "note": "x"}
    labels = {names.LABEL_PRESENT: "true", "gpu": gpu}
    world.send("POST", "/api/v1/nodes", {"metadata": {"name": name, "annotations": notes, "labels": labels}})
    told = [{"type": "Ready", "status": ready}, {"type": names.CONDITION_UNENFORCED, "status": "True"}]
    status = {"capacity": CARDS | PLAIN, "allocatable": CARDS | PLAIN, "conditions": told}
    body = {"status": status}
    world.send("PATCH", f"/api/v1/nodes/{name}/status", body, content_type=STRATEGIC_PATCH)


def start(world: World) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "device_plugin.cleanup",
        f"--kubeconfig={world.folder}/kubeconfig-kubernetes-admin",
    ]
    return subprocess.Popen([*command, *FLAGS], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_nodes_are_cleaned_after_their_agents_have_gone(world: World) -> None:
    add_node(world, "ours", "yes")
    add_node(world, "theirs", "no")
    world.send("POST", DAEMONSETS, {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "agents"}})
    world.create(pod("agent", metadata={"labels": {"app": "agent"}}))
    world.create(pod("bystander", metadata={"labels": {"app": "other"}}))
    cleanup = start(world)
    try:
        wait_for("the DaemonSet is deleted", lambda: not world.get(DAEMONSETS)["items"], SECONDS)
        assert world.node("ours")["status"]["capacity"] == CARDS | PLAIN, "an agent still runs"
        # In place of the garbage collector
        goes = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        threading.Timer(1, lambda: world.send("DELETE", "/api/v1/namespaces/default/pods/agent", goes)).start()
        _, said = cleanup.communicate(timeout=SECONDS)
    finally:
        cleanup.kill()
    assert cleanup.returncode == 0, said
    assert "cleaned 1 nodes" in said
    node = world.node("ours")
    assert node["status"]["capacity"] == node["status"]["allocatable"] == PLAIN
    assert [condition["type"] for condition in node["status"]["conditions"]] == ["Ready"]
    assert node["metadata"]["annotations"] == {names.CORDON: "GPU-1", "note": "x"}
    assert node["metadata"]["labels"] == {"gpu": "yes"}
    assert world.node("theirs")["status"]["capacity"] == CARDS | PLAIN
    assert world.pod("bystander")
    again = start(world)
    assert "cleaned 0 nodes" in again.communicate(timeout=SECONDS)[1]


def test_an_agent_that_stays_keeps_no_other_node_from_being_cleaned(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cleanup, "GONE_SECONDS", 0.0)
    flags = [f"--kubeconfig={world.folder}/kubeconfig-kubernetes-admin", *FLAGS]
    add_node(world, "down", "yes", ready="Unknown")
    add_node(world, "fine", "yes")
    world.create(pod("agent-of-down", metadata={"labels": {"app": "agent"}}, nodeName="down"))
    cleanup.main(flags)  # a node that is down is no failure, and its agent writes nothing any more
    assert "pod agent-of-down on down still exists" in caplog.text
    for name in ("down", "fine"):
        assert world.node(name)["status"]["capacity"] == PLAIN
    for name in ("busy", "other"):
        add_node(world, name, "yes")
    world.create(pod("agent-of-busy", metadata={"labels": {"app": "agent"}}, nodeName="busy"))
    with pytest.raises(SystemExit, match="did not clean the ready nodes busy"):
        cleanup.main(flags)
    assert world.node("other")["status"]["capacity"] == PLAIN
    assert world.node("busy")["status"]["capacity"] == CARDS | PLAIN
