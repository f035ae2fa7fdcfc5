"""An agent on a node whose driver is not there: never was, or is away when the agent starts."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_machine import NODE, Machine, machines
from agent_world import until

from device_plugin.cards import ABSENT
from vgpu import names
from vgpu.devices import Gpu, Inventory, encode_inventory

pytestmark = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
CARD = Gpu(uuid="GPU-a", index=0, model="Tesla T4", memory=1000, slots=3)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with machines("cdi") as made:
        config = made.root / "config.yaml"
        config.write_text("\n".join(line for line in config.read_text().splitlines() if "simulate" not in line))
        yield made


def readiness(machine: Machine) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{machine.port}/readyz", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except OSError:
        return ""


def test_a_node_without_cards_is_ready_and_says_nothing_about_itself(machine: Machine) -> None:
    machine.start_agent()
    until(lambda: readiness(machine) == "ready\n")
    assert "idle: no NVIDIA driver on this machine" in (machine.root / "agent.log").read_text()
    node = machine.node()
    assert names.DEVICES not in node["metadata"].get("annotations", {})
    assert machine.metrics()["vgpu_node_unenforced"]
    assert "vgpu_card_info" not in machine.metrics()


def test_without_the_api_server_nobody_knows_whether_there_were_cards(machine: Machine) -> None:
    machine.api.stop()
    machine.start_agent()
    until(lambda: "idle: no NVIDIA driver on this machine" in (machine.root / "agent.log").read_text())
    assert readiness(machine).startswith("the driver has not been asked")


def test_cards_that_were_there_before_are_shown_as_what_they_are(machine: Machine) -> None:
    until(lambda: machine.node().get("kind"))  # the kubelet has made it
    machine.mark(names.DEVICES, encode_inventory(Inventory(devices=(CARD,))))
    machine.start_agent()
    until(lambda: [(gpu.uuid, gpu.trouble) for gpu in machine.inventory().devices] == [(CARD.uuid, ABSENT)])
    until(lambda: CARD.uuid in machine.condition(names.CONDITION_UNHEALTHY).get("message", ""))
    until(lambda: machine.metrics().get("vgpu_card_healthy") == {("", "", CARD.uuid): 0.0})
    until(lambda: readiness(machine) == "ready\n")
    assert machine.allocatable(names.RESOURCE_GPU) in (None, "0")
    assert NODE in (machine.root / "agent.log").read_text()
