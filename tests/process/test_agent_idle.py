"""An agent on a node without a driver."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_machine import Machine, machines
from agent_world import until

from vgpu import names

pytestmark = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")


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
    until(lambda: readiness(machine) == "ok\n")
    until(lambda: "idle: no NVIDIA driver on this machine" in (machine.root / "agent.log").read_text())
    node = machine.node()
    assert names.DEVICES not in node["metadata"].get("annotations", {})
    assert machine.metrics()["vgpu_node_unenforced"]
    assert "vgpu_card_info" not in machine.metrics()
