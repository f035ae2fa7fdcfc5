"""An agent that ends reports that first: no pod is bound to its node until the kubelet has the next agent's ids."""

import http.client
import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from agent_machine import NODE, Machine, machines
from agent_world import until

from device_plugin.presence import STARTING, Presence
from vgpu import names
from vgpu.devices import GpuSlice
from vgpu.kube import agentmark
from vgpu.kube.client import ApiError
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Node

MIB = 100
PAUSE = 0.25  #: seconds between two pods


@pytest.fixture
def machine() -> Iterator[Machine]:
    with machines("cdi", split=40) as made:
        yield made


class Binder:
    """Binds a bare pod every PAUSE seconds unless the node says that its agent can start no pods, as schedulers do."""

    def __init__(self, machine: Machine, card: str) -> None:
        self._machine, self._card = machine, card
        self.node: Node | None = None
        self.bound: list[str] = []
        self.held_back = 0
        self._ending = threading.Event()
        field = {"fieldSelector": f"metadata.name={NODE}"}
        self._informer = Informer(machine.client, "/api/v1/nodes", Node, params=field, on_change=self._change)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _change(self, _: str, node: Node) -> None:
        self.node = node

    @contextmanager
    def running(self) -> Iterator[None]:
        self._informer.start()
        until(lambda: self.node)
        self._thread.start()
        try:
            yield
        finally:
            self._ending.set()
            self._thread.join()
            self._informer.stop()

    def _run(self) -> None:
        for number in itertools.count():
            if self._ending.wait(PAUSE):
                return
            assert self.node is not None
            if agentmark.read(self.node.metadata.annotations.get(names.AGENT)).away:
                self.held_back += 1
                continue
            name = f"p{number}"
            self._machine.run(name, {"main": [GpuSlice(self._card, MIB)]}, command=("true",))
            self.bound.append(name)


def mark(machine: Machine) -> str:
    return str(machine.node()["metadata"].get("annotations", {}).get(names.AGENT, ""))


@pytest.mark.slow
def test_no_bare_pod_is_refused_while_agents_are_replaced(machine: Machine) -> None:
    machine.start_agent()
    card = machine.ready()[0]
    until(lambda: agentmark.read(mark(machine)).since)
    binder = Binder(machine, card)
    with binder.running():
        for turn in range(1, 4):
            until(lambda turn=turn: len(binder.bound) >= 3 * turn)
            said = mark(machine)
            held_back = binder.held_back
            assert machine.stop_agent(signal.SIGTERM) == 0
            assert agentmark.read(mark(machine)).away == "the node's agent is leaving (it is shutting down)"
            until(lambda held_back=held_back: binder.held_back > held_back)
            machine.start_agent()
            until(lambda said=said: mark(machine) not in ("", said) and not agentmark.read(mark(machine)).away)
    until(lambda: all(machine.phase(name) in ("Succeeded", "Failed") for name in binder.bound))
    failed = {name: machine.get(f"/api/v1/namespaces/default/pods/{name}")["status"] for name in binder.bound}
    failed = {name: status for name, status in failed.items() if status["phase"] == "Failed"}
    assert not failed


def test_the_kubelet_has_our_ids_before_the_node_says_so(machine: Machine) -> None:
    machine.mark(names.AGENT, agentmark.leaving("an earlier one"))
    seen: list[int] = []

    def change(_: str, node: Node) -> None:
        if agentmark.read(node.metadata.annotations.get(names.AGENT)).since:
            seen.append(len(machine.kubelet.devices.healthy().get("nvidia.com/gpu", ())))

    field = {"fieldSelector": f"metadata.name={NODE}"}
    informer = Informer(machine.client, "/api/v1/nodes", Node, params=field, on_change=change)
    informer.start()
    machine.start_agent()
    until(lambda: seen)
    informer.stop()
    assert seen[0] == 80


def asked(machine: Machine) -> tuple[int, str]:
    """The agent's answer to schedulers."""
    connection = http.client.HTTPConnection("127.0.0.1", machine.health_port, timeout=20)
    try:
        connection.request("GET", agentmark.PATH)
        answer = connection.getresponse()
        return answer.status, answer.read().decode().strip()
    finally:
        connection.close()


def test_the_agent_answers_whether_pods_can_start(machine: Machine) -> None:
    machine.kubelet.devices.stop()
    machine.start_agent()
    until(lambda: reachable(machine))
    assert asked(machine) == (503, STARTING)
    machine.kubelet.restart()
    until(lambda: asked(machine) == (200, "ok"))
    machine.kubelet.devices.stop()
    until(lambda: asked(machine) == (503, "the kubelet has closed its connection"))
    machine.kubelet.restart()
    until(lambda: asked(machine) == (200, "ok"))
    assert machine.agent is not None
    machine.agent.send_signal(signal.SIGTERM)
    until(lambda: asked(machine) == (503, "it is shutting down"))


def reachable(machine: Machine) -> bool:
    with suppress(OSError):
        return bool(asked(machine))
    return False


def test_the_agent_reports_a_kubelet_that_is_away_until_it_has_our_ids_again(machine: Machine) -> None:
    machine.start_agent()
    until(lambda: agentmark.read(mark(machine)).since)
    machine.kubelet.devices.stop()
    until(lambda: "the kubelet has closed its connection" in agentmark.read(mark(machine)).away)
    machine.kubelet.restart()
    until(lambda: agentmark.read(mark(machine)).since)
    assert len(machine.kubelet.devices.healthy()["nvidia.com/gpu"]) == 80


def test_an_api_server_that_is_away_holds_up_no_end(machine: Machine) -> None:
    machine.start_agent()
    machine.ready()
    until(lambda: mark(machine))
    machine.api.stop()
    began = time.monotonic()
    assert machine.stop_agent(signal.SIGTERM) == 0  # the agent process itself may take ten seconds
    print(f"{time.monotonic() - began:.1f} s")


def test_a_mark_that_somebody_removes_is_written_again(machine: Machine) -> None:
    machine.start_agent()
    until(lambda: mark(machine))
    said = mark(machine)
    machine.mark(names.AGENT, None)
    until(lambda: mark(machine) == said)


def test_the_last_word_stays(machine: Machine) -> None:
    """The publisher may be about to write a mark that is out of date."""
    presence = Presence(machine.client, NODE)
    assert not presence.leave("nobody came")
    presence.serve()
    presence.keep({})
    assert not mark(machine), "it has ended before it served"
    presence = Presence(machine.client, NODE)
    woken: list[int] = []
    presence.changed = lambda: woken.append(1)
    presence.lose()
    presence.serve()
    presence.serve()
    assert woken == [1]
    presence.lose()
    presence.lose()
    presence.keep({})
    assert agentmark.read(mark(machine)).away
    presence.serve()
    assert woken == [1, 1, 1]
    presence.keep({})
    before = mark(machine)
    assert presence.leave("enough")
    presence.keep({names.AGENT: before})
    presence.serve()
    presence.lose()
    presence.keep({})
    assert mark(machine) == "leaving: enough"
    machine.api.stop()
    with pytest.raises(ApiError):
        presence.keep({})
    assert not presence.leave("nobody hears it")
