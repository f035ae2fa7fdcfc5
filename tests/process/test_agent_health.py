"""A card that fails on a running node: what is reported, which pods go on, which pods start, and how the card comes
back.
"""

import signal
from collections.abc import Iterator

import pynvml
import pytest
from agent_machine import NODE, Machine, machines
from agent_world import until
from click.testing import CliRunner

from device_plugin.cards import ABSENT
from vgpu import names
from vgpu.cli import _group
from vgpu.devices import GpuSlice
from vgpu.native import simulator
from vgpu.resources import parse_quantity

SPLIT = 3


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two cards of three slices; parametrized by recoverySeconds."""
    with machines("cdi", 2, SPLIT, f"recoverySeconds: {getattr(request, 'param', 0)}") as made:
        made.start_agent()
        yield made


def xid(machine: Machine, card: int, number: int) -> None:
    until(lambda: "watching 2 cards" in (machine.root / "agent.log").read_text())  # earlier errors are not reported
    simulator.inject_xid(machine.root / "run" / "simulator", card, number)


def offered(machine: Machine) -> tuple[str | None, int]:
    """Ids, and MiB that kube-scheduler counts with."""
    memory = machine.allocatable(names.RESOURCE_TOTAL_MEMORY) or 0
    return machine.allocatable(names.RESOURCE_GPU), int(parse_quantity(memory))


def told(machine: Machine, reason: str, card: str) -> bool:
    return any(one["reason"] == reason and card in one["message"] for one in machine.events())


def vgpu(*arguments: str) -> str:
    """The command's output, on either stream."""
    done = CliRunner().invoke(_group, arguments)
    assert done.exit_code in (0, 1), done.output
    return done.output.strip()


def test_a_full_node_whose_card_fails_keeps_its_pods_through_a_restart_of_the_kubelet(machine: Machine) -> None:
    cards = machine.ready()
    size = machine.inventory().devices[0].memory
    for place in range(2 * SPLIT):
        machine.run(f"p{place}", {"main": [GpuSlice(cards[place % 2], 4000)]}, "signal.pause()")
    running = [f"p{place}" for place in range(2 * SPLIT)]
    until(lambda: all(machine.environment(name).get("VGPU_DIR") for name in running))
    xid(machine, 1, 79)
    held = size + SPLIT * 4000  # all of the card that works, and the part of the other card that pods hold
    until(lambda: offered(machine) == (str(SPLIT), held))
    gpu = machine.inventory().devices[1]
    assert (gpu.healthy, gpu.trouble) == (False, "XID 79")
    until(lambda: machine.condition(names.CONDITION_UNHEALTHY).get("status") == "True")
    assert cards[1] in machine.condition(names.CONDITION_UNHEALTHY)["message"]
    until(lambda: told(machine, names.CONDITION_UNHEALTHY, cards[1]))
    machine.kubelet.restart()
    machine.registered(2)
    until(lambda: offered(machine) == (str(SPLIT), held))
    assert [machine.phase(name) for name in running] == ["Running"] * len(running)
    # A free id of the failed card must not be given to any pod.
    uid = machine.get("/api/v1/namespaces/default/pods/p1")["metadata"]["uid"]
    machine.delete("p1", uid)
    late = machine.run("late", {"main": [GpuSlice(cards[1], 4000)]})
    until(lambda: machine.phase("late") == "Failed")
    machine.delete("late", late)
    machine.mark(names.HEAL, cards[1])
    until(lambda: offered(machine) == (str(2 * SPLIT), 2 * size))
    until(lambda: names.HEAL not in machine.node()["metadata"]["annotations"])
    assert machine.condition(names.CONDITION_UNHEALTHY)["status"] == "False"
    machine.run("again", {"main": [GpuSlice(cards[1], 4000)]})
    until(lambda: machine.phase("again") == "Succeeded")
    assert {machine.phase(name) for name in running if name != "p1"} == {"Running"}


@pytest.mark.parametrize("machine", [2], indirect=True)
def test_a_card_without_further_trouble_comes_back_by_itself(machine: Machine) -> None:
    cards = machine.ready()
    xid(machine, 0, 31)  # a program's own error
    xid(machine, 1, 48)
    until(lambda: told(machine, names.CONDITION_UNHEALTHY, cards[1]))
    until(lambda: told(machine, names.EVENT_HEALTHY, cards[1]))
    until(lambda: machine.allocatable(names.RESOURCE_GPU) == str(2 * SPLIT))
    until(lambda: machine.condition(names.CONDITION_UNHEALTHY).get("status") == "False")
    assert not told(machine, names.CONDITION_UNHEALTHY, cards[0])
    found = until(lambda: machine.metrics().get("vgpu_card_xids_total"))
    assert found == {("", "", cards[0]): 1.0, ("", "", cards[1]): 1.0}


def test_a_lost_card_is_out_also_for_the_next_agent(machine: Machine) -> None:
    machine.ready()
    state = machine.root / "run" / "simulator"
    simulator.inject_error(state, "nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_GPU_IS_LOST)
    until(lambda: machine.allocatable(names.RESOURCE_GPU) == str(SPLIT))
    (lost,) = [gpu for gpu in machine.inventory().devices if not gpu.healthy]
    assert "lost" in lost.trouble
    machine.stop_agent(signal.SIGKILL)
    machine.start_agent()
    machine.registered(2)
    until(lambda: [gpu.trouble for gpu in machine.inventory().devices if not gpu.healthy] == [lost.trouble])
    until(lambda: machine.allocatable(names.RESOURCE_GPU) == str(SPLIT))
    log = (machine.root / "agent.log").read_text().rpartition("registered")[0]
    first = f"reporting {2 * SPLIT} ids to the kubelet, {2 * SPLIT} of them healthy"
    assert log.count(first) == 1  # the first log line of the first agent
    machine.mark(names.HEAL, lost.uuid)
    until(lambda: machine.allocatable(names.RESOURCE_GPU) == str(2 * SPLIT))


def test_a_cordoned_card_takes_no_new_pods_and_keeps_those_it_has(machine: Machine) -> None:
    cards = machine.ready()
    size = machine.inventory().devices[0].memory
    machine.run("p", {"main": [GpuSlice(cards[0], 4000)]}, "signal.pause()")
    until(lambda: machine.environment("p").get("VGPU_DIR"))
    config = str(machine.root / "kubeconfig")
    assert (
        vgpu("cordon", "--kubeconfig", config, NODE, "0") == f"{NODE}: card 0 (Tesla T4, {cards[0]}) takes no new pods"
    )
    until(lambda: offered(machine) == (str(2 * SPLIT), 4000 + size))
    assert "it has 0 (" in vgpu("cordon", "--kubeconfig", config, NODE, "7")
    assert "there is no node nowhere" in vgpu("heal", "--kubeconfig", config, "nowhere", "0")
    vgpu("cordon", "--kubeconfig", config, NODE, cards[1])
    assert machine.node()["metadata"]["annotations"][names.CORDON] == ",".join(sorted(cards))
    assert "not cordoned" in vgpu("uncordon", "--kubeconfig", config, NODE, "0", "1")
    assert names.CORDON not in machine.node()["metadata"]["annotations"]
    until(lambda: offered(machine) == (str(2 * SPLIT), 2 * size))
    assert machine.phase("p") == "Running"


def break_at_start(machine: Machine, *errors: tuple[str, int, int]) -> None:
    """(entry point, call, error) of the next agent's calls of the driver."""
    state = machine.root / "run" / "simulator"
    simulator.create(state, "T4x2")
    for entry, call, error in errors:
        simulator.inject_error(state, entry, error, call)


AWAY = ("nvmlInitWithFlags", 1, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
#: An error of a call that is only made to list the cards: the agent asks for other things meanwhile
LOST = ("nvmlDeviceGetName", 1, pynvml.NVML_ERROR_GPU_IS_LOST)


def test_cards_that_are_silent_when_the_next_agent_starts_are_shown_and_come_back(machine: Machine) -> None:
    cards = machine.ready()
    machine.run("p", {"main": [GpuSlice(cards[0], 4000)]}, "signal.pause()")
    until(lambda: machine.environment("p").get("VGPU_DIR"))
    size = machine.inventory().devices[0].memory
    machine.stop_agent(signal.SIGKILL)
    break_at_start(machine, AWAY, LOST)  # first the driver, then one of two cards
    machine.start_agent()
    until(lambda: [gpu.trouble for gpu in machine.inventory().devices] == [ABSENT, ""])
    assert "an earlier agent published 2 cards" in (machine.root / "agent.log").read_text()
    until(lambda: offered(machine) == (str(SPLIT), 4000 + size))
    until(lambda: cards[0] in machine.condition(names.CONDITION_UNHEALTHY).get("message", ""))
    until(lambda: machine.metrics().get("vgpu_card_healthy") == {("", "", cards[0]): 0.0, ("", "", cards[1]): 1.0})
    machine.mark(names.HEAL, cards[0])  # the agent looks for the card at once
    until(lambda: offered(machine) == (str(2 * SPLIT), 2 * size))
    until(lambda: machine.condition(names.CONDITION_UNHEALTHY)["status"] == "False")
    assert [gpu.uuid for gpu in machine.inventory().devices] == cards
    assert machine.phase("p") == "Running"
