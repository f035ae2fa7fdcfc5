"""Knows which nodes' agents can start pods now.

The facts are the agents' marks on the nodes, and the kubelet's status of the agents' pods. A killed agent writes
nothing any more. The kubelet reports within a second or two that the agent's container has ended; a connection to the
agent (`contact`) shows it at once.
"""

import threading
from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec

from scheduler.contact import Contact
from vgpu.kube.agentmark import AgentMark

ABSENT: Final = "no agent of vgpu runs on the node"
DELETED: Final = "the node's agent is being deleted"
ENDED: Final = "the node's agent has ended and has not restarted yet"
STARTING: Final = "the node's agent has started and does not serve yet"


class Running(msgspec.Struct, frozen=True):
    startedAt: datetime | None = None


class State(msgspec.Struct, frozen=True):
    running: Running | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    ready: bool = False
    state: State = State()


class Meta(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resourceVersion: str = ""
    deletionTimestamp: str | None = None


class Spec(msgspec.Struct, frozen=True):
    nodeName: str = ""


class Status(msgspec.Struct, frozen=True):
    phase: str = "Pending"
    podIP: str = ""
    containerStatuses: list[ContainerStatus] = []


class AgentPod(msgspec.Struct, frozen=True):
    """The fields of an agent's pod that matter here, by their names in Kubernetes."""

    metadata: Meta = Meta()
    spec: Spec = Spec()
    status: Status = Status()


def obstacle(pod: AgentPod, since: datetime | None) -> str:
    """Why this pod's agent can start no pods; empty: it can. `since`: when the agent of the node began to serve.

    A mark from before the start of the agent's container was written by the previous agent. Both times are of the
    node's own clock. Where that clock was set back, the kubelet's report that the container is ready decides.
    """
    if pod.metadata.deletionTimestamp is not None:
        return DELETED
    status = next(iter(pod.status.containerStatuses), ContainerStatus())
    running = status.state.running
    if running is None:
        return ENDED
    if status.ready or (since is not None and running.startedAt is not None and since >= running.startedAt):
        return ""
    return STARTING


class Agents:
    """Keeps `tell(node, reason why the node accepts no pods)` up to date. Thread-safe."""

    def __init__(self, tell: Callable[[str, str], None], *, followed: bool, port: int) -> None:
        """`followed`: pods of agents are reported here; else only the agents' own marks count.

        `port`: of the agents.
        """
        self._lock = threading.Lock()
        self._tell = tell
        self._followed = followed
        self._marks: dict[str, AgentMark] = {}  # of nodes with cards
        self._pods: dict[str, dict[str, AgentPod]] = {}  # node → uid → the agent's pod
        self._nodes: dict[str, str] = {}  # uid → node, for agents with a connection
        self._contact = Contact(port, self._contact_changed)

    def start(self) -> None:
        """Connects to the agents of nodes with cards."""
        self._contact.start()

    def stop(self) -> None:
        self._contact.stop()

    def mark(self, node: str, mark: AgentMark | None) -> None:
        """Takes over the mark of a node's agent; None: the node has no cards, or is gone."""
        with self._lock:
            if mark == self._marks.get(node):
                return
            if mark is None:
                del self._marks[node]
            else:
                self._marks[node] = mark
            for pod in self._pods.get(node, {}).values():
                self._connect(node, pod)
            self._judge(node)

    def put(self, pod: AgentPod) -> None:
        if pod.spec.nodeName:
            with self._lock:
                self._pods.setdefault(pod.spec.nodeName, {})[pod.metadata.uid] = pod
                self._connect(pod.spec.nodeName, pod)
                self._judge(pod.spec.nodeName)

    def gone(self, pod: AgentPod) -> None:
        with self._lock:
            pods = self._pods.get(pod.spec.nodeName, {})
            pods.pop(pod.metadata.uid, None)
            self._disconnect(pod.metadata.uid)
            if not pods:
                self._pods.pop(pod.spec.nodeName, None)
            self._judge(pod.spec.nodeName)

    def _connect(self, node: str, pod: AgentPod) -> None:
        uid, address = pod.metadata.uid, pod.status.podIP
        if node not in self._marks or pod.metadata.deletionTimestamp is not None or not address:
            self._disconnect(uid)
        else:
            self._nodes[uid] = node
            self._contact.follow(uid, address)

    def _disconnect(self, uid: str) -> None:
        if self._nodes.pop(uid, None) is not None:
            self._contact.forget(uid)

    def _contact_changed(self, uid: str) -> None:
        with self._lock:
            node = self._nodes.get(uid)
            if node is not None:
                self._judge(node)

    def _judge(self, node: str) -> None:
        mark = self._marks.get(node)
        if mark is None:
            self._tell(node, "")
        elif mark.away or not self._followed:
            self._tell(node, mark.away)
        else:
            pods = self._pods.get(node, {})
            reasons = [obstacle(pod, mark.since) or self._contact.obstacle(uid) for uid, pod in pods.items()]
            self._tell(node, "" if "" in reasons else min(reasons, key=_order, default=ABSENT))


def _order(why: str) -> int:
    """Order of reasons: of several agent pods, the pod nearest to serving gives the reason."""
    order = (STARTING, ENDED, DELETED)
    return order.index(why) + 1 if why in order else 0
