"""The scheduler's connections to agents: a kill shows at once, and only certain facts hold pods back."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kube_world import World
from scheduler_world import SECONDS, Scheduler, add_node, gpu_pod

from scheduler import contact
from scheduler.contact import KILLED
from vgpu import names
from vgpu.kube import agentmark, writes
from vgpu.kube.client import MERGE_PATCH
from vgpu.standin.services import free_port, wait_for

AGENTS = ("kube-system", "app=agent")
#: address, port, path that it serves, file with its answer, seconds after which it closes an idle connection
PROGRAM = """
import sys, time
from pathlib import Path
from vgpu import health, listener
address, port, path, said, idle = sys.argv[1:]
listener.IDLE_SECONDS = float(idle)
listener.Listener("health", health.app({path: Path(said).read_text}), address, int(port), threads=2)
print("here", flush=True)
time.sleep(3600)  # the test kills it
"""


class Agent:
    """A process that answers as an agent does, on an address of its own."""

    def __init__(self, folder: Path, address: str, port: int) -> None:
        self.address, self.port = address, port
        self._said = folder / f"said-{address}"
        self.path, self.idle = agentmark.PATH, 120.0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, said: str = "") -> "Agent":
        self.say(said)
        line = [sys.executable, "-c", PROGRAM, self.address, str(self.port), self.path, str(self._said), str(self.idle)]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"here\n"
        return self

    def say(self, said: str) -> None:
        """Sets why the agent cannot serve; empty: it serves."""
        aside = self._said.with_suffix(".new")
        aside.write_text(said)
        aside.replace(self._said)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


class Cluster:
    """Nodes a, b, … with an agent each that the kubelet calls ready and that always says that it serves."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.port = world, folder, free_port()
        self.agents: list[Agent] = []
        self.scheduler = Scheduler(world, folder, agents=AGENTS, agent_port=self.port)

    def agent(self, node: str, *, pod: str | None = None) -> Agent:
        """Makes an agent with its node and its pod; the test starts the agent."""
        add_node(self.world, node)
        self.agents.append(Agent(self.folder, f"127.0.1.{len(self.agents) + 1}", self.port))
        self.run_pod(node, pod or f"agent-{node}", self.agents[-1].address)
        return self.agents[-1]

    def run_pod(self, node: str, name: str, address: str) -> None:
        meta = {"name": name, "namespace": AGENTS[0], "labels": {"app": "agent"}}
        container = {"name": "device-plugin", "image": "none"}
        self.world.create({"metadata": meta, "spec": {"nodeName": node, "containers": [container]}})
        running = {"running": {"startedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}}
        status = {"podIP": address, "containerStatuses": [{"name": "device-plugin", "ready": True, "state": running}]}
        path = f"/api/v1/namespaces/{AGENTS[0]}/pods/{name}/status"
        self.world.send("PATCH", path, {"status": status}, content_type=MERGE_PATCH)

    def away(self, node: str) -> str:
        return self.scheduler.state.away(node)

    def reached(self, *agents: Agent) -> None:
        """Waits until the scheduler is connected to these agents and has their answers."""
        lines = self.scheduler.feed._agents._contact._lines
        wanted = {agent.address for agent in agents}
        wait_for(
            f"connected to {sorted(wanted)}",
            lambda: wanted <= {line.address for line in lines.copy().values() if line._reached},
            SECONDS,
        )

    def wait_away(self, node: str, part: str) -> None:
        """Waits until the reason why the node accepts no pods contains `part`; empty: until it accepts pods."""
        wait_for(f"{node} away: {part!r}", lambda: part in (self.away(node) if part else [self.away(node)]), SECONDS)

    def binds(self, name: str, node: str) -> str:
        return self.scheduler.bind(self.world.create(gpu_pod(name, 100)), node)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    world = World(tmp_path)
    made = Cluster(world, tmp_path)
    yield made
    made.scheduler.close()
    world.close()
    for agent in made.agents:
        if agent.process is not None:
            agent.kill()


def test_a_kill_shows_at_once_and_the_next_agent_says_when_it_serves(cluster: Cluster) -> None:
    """The kubelet calls the container ready all the time: it has not noticed the kill yet."""
    one, two = cluster.agent("node-a").start(), cluster.agent("node-b").start()
    cluster.scheduler.start()
    cluster.reached(one, two)
    for turn in range(3):
        assert cluster.binds(f"before-{turn}", "node-a") == ""
        one.kill()
        cluster.wait_away("node-a", KILLED)
        assert cluster.binds(f"lost-{turn}", "node-a") == f"node node-a takes no pods now: {KILLED}"
        item = cluster.world.create(gpu_pod(f"other-{turn}", 100))
        answer = cluster.scheduler.filter(item, "node-a", "node-b")
        assert answer["NodeNames"] == ["node-b"]
        assert answer["FailedAndUnresolvableNodes"] == {"node-a": KILLED}
        one.start("the kubelet has not accepted its ids yet")
        cluster.wait_away("node-a", "the node's agent does not serve: the kubelet has not accepted its ids yet")
        one.say("")
        cluster.wait_away("node-a", "")
    assert cluster.scheduler.state.slices() == 3


def test_one_that_was_never_reached_is_taken_for_served(cluster: Cluster) -> None:
    """Rules of a network refuse connections, too: nothing is known about a port that never answered."""
    cluster.agent("node-a")
    cluster.scheduler.start()
    wait_for("tried", lambda: cluster.scheduler.feed._agents._contact._lines, SECONDS)
    assert cluster.away("node-a") == ""
    assert cluster.binds("p", "node-a") == ""


def test_who_refuses_for_long_is_believed_no_more(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet still calls the container ready: something on the way refuses the connection."""
    monkeypatch.setattr(contact, "CERTAIN_SECONDS", 0.5)
    agent = cluster.agent("node-a").start()
    cluster.scheduler.start()
    cluster.reached(agent)
    agent.kill()
    cluster.wait_away("node-a", KILLED)
    cluster.wait_away("node-a", "")
    assert cluster.binds("p", "node-a") == ""
    agent.start()
    cluster.reached(agent)
    agent.kill()
    cluster.wait_away("node-a", KILLED)


def test_a_slow_agent_is_no_dead_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent stands still when it is asked; its last answer counts for a while, then it does not count any more."""
    monkeypatch.setattr(contact, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(contact, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(contact, "CERTAIN_SECONDS", 1.0)
    quiet, starting = cluster.agent("node-a").start(), cluster.agent("node-b").start("not yet")
    cluster.scheduler.start()
    cluster.reached(quiet, starting)
    cluster.wait_away("node-b", "not yet")
    given_up: list[str] = []
    give_up = contact._Line._give_up

    def noted(line: contact._Line) -> None:
        given_up.append(line.address)
        give_up(line)

    monkeypatch.setattr(contact._Line, "_give_up", noted)
    for agent in (quiet, starting):
        agent.signal(signal.SIGSTOP)
    for agent in (quiet, starting):
        wait_for("no answer", lambda agent=agent: agent.address in given_up, SECONDS)
        assert cluster.away("node-a") == ""
    cluster.wait_away("node-b", "")
    for agent in (quiet, starting):
        agent.signal(signal.SIGCONT)
    cluster.wait_away("node-b", "not yet")
    starting.say("")
    cluster.wait_away("node-b", "")
    assert cluster.away("node-a") == ""


def test_an_agent_that_closes_connections_is_not_away(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = cluster.agent("node-a")
    agent.idle = 0.01
    agent.start()
    reasons: list[str] = []
    monkeypatch.setattr(cluster.scheduler.state, "set_away", lambda _, why: reasons.append(why))
    lost: list[bool] = []
    losing = contact._Line.lost

    def noted(line: contact._Line, *, answered: bool) -> None:
        lost.append(answered)
        losing(line, answered=answered)

    monkeypatch.setattr(contact._Line, "lost", noted)
    cluster.scheduler.start()
    wait_for("closed and connected again", lambda: len(lost) >= 4, SECONDS)
    assert all(lost)
    assert KILLED not in reasons


def test_an_agent_that_does_not_know_the_question_serves_until_it_is_killed(cluster: Cluster) -> None:
    agent = cluster.agent("node-a")
    agent.path = "/readyz"
    agent.start()
    cluster.scheduler.start()
    cluster.reached(agent)
    assert cluster.away("node-a") == ""
    agent.kill()
    cluster.wait_away("node-a", KILLED)


def test_agents_come_and_go_and_only_those_of_cards_are_connected(cluster: Cluster) -> None:
    lines = cluster.scheduler.feed._agents._contact._lines
    world = cluster.world
    world.send("POST", "/api/v1/nodes", {"metadata": {"name": "plain"}})
    cluster.run_pod("plain", "agent-plain", "127.0.2.1")
    agent = cluster.agent("node-a").start()
    cluster.scheduler.start()
    cluster.reached(agent)
    assert {line.address for line in lines.values()} == {agent.address}
    agent.kill()
    cluster.wait_away("node-a", KILLED)
    path = f"/api/v1/namespaces/{AGENTS[0]}/pods/agent-node-a"
    world.client.request("DELETE", path, body={"gracePeriodSeconds": 0})
    next_one = Agent(cluster.folder, "127.0.1.9", cluster.port).start("not yet")
    cluster.agents.append(next_one)
    cluster.run_pod("node-a", "next", next_one.address)
    cluster.wait_away("node-a", "not yet")
    wait_for("only the next", lambda: {line.address for line in lines.copy().values()} == {"127.0.1.9"}, SECONDS)
    notes = {"metadata": {"annotations": {"vgpu.io/devices": None}}}
    world.send("PATCH", "/api/v1/nodes/node-a", notes, content_type=MERGE_PATCH)
    wait_for("a node without cards is left", lambda: not lines, SECONDS)
    wait_for("and the node is not away", lambda: cluster.away("node-a") == "", SECONDS)


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 503 no\r\nContent-Length: 99999\r\n\r\nnot yet"]
)
def test_something_else_at_that_port_says_nothing(cluster: Cluster, answer: bytes) -> None:
    """A proxy that accepts every connection and closes it, another service, an answer that ends too early."""
    agent = cluster.agent("node-a")
    taken: list[int] = []
    with socket.create_server((agent.address, agent.port)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    if answer:
                        client.recv(1000)
                        client.sendall(answer)
                    taken.append(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        cluster.scheduler.start()
        wait_for("several tries", lambda: len(taken) >= 3, SECONDS)
        assert cluster.away("node-a") == ""
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    wait_for("a port that refuses, where no agent answered", lambda: cluster.away("node-a") == "", SECONDS)
    assert cluster.binds("p", "node-a") == ""


def test_an_agent_that_says_that_it_serves_is_asked_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """kube-scheduler reads the answer at that moment, and tries waiting pods again: once."""
    monkeypatch.setattr(contact, "SOON_SECONDS", 3600.0)
    monkeypatch.setattr(contact, "CERTAIN_SECONDS", 3600.0)
    agent = cluster.agent("node-a").start("not yet")
    cluster.scheduler.start()
    cluster.wait_away("node-a", "not yet")
    agent.say("")
    writes.patch_node(cluster.world.client, "node-a", annotations={names.AGENT: agentmark.serving(datetime.now(UTC))})
    cluster.wait_away("node-a", "")
    agent.kill()
    cluster.wait_away("node-a", KILLED)
    agent.start()
    later = agentmark.serving(datetime.now(UTC) + timedelta(seconds=5))
    writes.patch_node(cluster.world.client, "node-a", annotations={names.AGENT: later})
    cluster.wait_away("node-a", "")
