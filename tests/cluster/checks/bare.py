"""Pods without a controller while the node's agent is replaced and killed: a refused pod is lost for good."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final

import msgspec

from tests.cluster.checks.chart import NAMESPACE, SECONDS, upgrade, values
from tests.cluster.checks.faults import kill
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.kube import agentmark
from vgpu.kube.client import ApiError, KubeClient

KILLS: Final = int(os.environ.get("VGPU_BARE_KILLS", "2"))  #: with every change; ten before a release
UPGRADES: Final = 1
#: Pods that one kill may cost: a pod that was bound before the kill and that the kubelet admits after it. The scheduler
#: learns of a kill at once, by its connection to the agent.
LOST: Final = 1
PERIOD_SECONDS: Final = 0.5  #: between two new pods
WAITING: Final = 20  #: pods that have not started: a busy machine gets no more
CALM_SECONDS: Final = 3  #: with pods, before and after each fault
MIB: Final = 200
LABEL: Final = "bare"
AGENTS: Final = ("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=device-plugin")
Span = tuple[float, float]


def pods_survive(node: Node) -> str:
    """Two bare pods a second: upgrades and replacements refuse none, a kill -9 only those that come before it is
    noticed.
    """
    kubectl = node.kubectl
    kills: list[Span] = []
    with _stream(KubeClient.connect(kubectl.kubeconfig)) as made:
        changed = values(node)
        for turn in range(UPGRADES):
            changed["devicePlugin"]["podAnnotations"] = {"vgpu.io/check": str(turn)}
            said = _mark(node)
            upgrade(node, changed)
            _serving_again(node, said)
        for _ in range(KILLS):
            time.sleep(CALM_SECONDS)
            said, began = _mark(node), time.time()
            kill("vgpu-device-plugin", "--node-name=")
            _serving_again(node, said)
            kills.append((began, time.time()))
            time.sleep(CALM_SECONDS)
            # A container that is killed again soon restarts later and later: another pod starts at once.
            said = _mark(node)
            kubectl.run("delete", "pod", *(one["metadata"]["name"] for one in kubectl.items(*AGENTS)), "-n", NAMESPACE)
            _serving_again(node, said)
    found = _done(node, len(made))
    refused = [one for one in found if phase(one) == "Failed"]
    during = [[one for one in refused if _in(one, span)] for span in kills]
    others = [one for one in refused if not any(_in(one, span) for span in kills)]
    kubectl.run("delete", "pods", "-l", LABEL, "--grace-period=0", "--force", timeout=SECONDS)
    upgrade(node, values(node))
    assert not others, f"{len(others)} pods refused beside kills; {_why(others)}"
    assert max(map(len, during)) <= LOST, f"pods refused by each kill: {[len(one) for one in during]}; {_why(refused)}"
    lost = [len(one) for one in during]
    return f"{len(found)} pods, {UPGRADES} upgrades, {KILLS} replacements, {KILLS} kills, which refused {lost}"


@contextmanager
def _stream(client: KubeClient) -> Iterator[list[str]]:
    """Makes pods until the block ends; yields their names."""
    made: list[str] = []
    ending = threading.Event()
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
    path = "/api/v1/namespaces/default/pods"

    def run() -> None:
        while not ending.wait(PERIOD_SECONDS):
            with suppress(ApiError):
                found = client.get(path, labelSelector=LABEL, fieldSelector="status.phase=Pending")
                if len(msgspec.json.decode(found)["items"]) >= WAITING:
                    continue
            body = pod(f"bare-{len(made)}", CLIENT, ["true"], container={"resources": {"limits": limits}})
            body["metadata"].setdefault("labels", {})[LABEL] = ""
            with suppress(ApiError):  # the webhook is being replaced: no pod was made
                client.request("POST", path, body=body)
                made.append(body["metadata"]["name"])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        ending.set()
        thread.join()


def _mark(node: Node) -> str:
    return str(node.kubectl.get("node", NODE)["metadata"]["annotations"].get(names.AGENT, ""))


def _serving_again(node: Node, before: str) -> None:
    def serves(found: Object) -> bool:
        now = found["metadata"]["annotations"].get(names.AGENT, "")
        return now != before and agentmark.read(now).since is not None

    node.kubectl.until("serving again", serves, "node", NODE, seconds=SECONDS)


def _done(node: Node, count: int) -> list[Object]:
    """All pods of the stream, once each has run or was refused."""
    until = time.monotonic() + SECONDS
    while True:
        found = node.kubectl.items("pods", "-l", LABEL)
        left = [one["metadata"]["name"] for one in found if phase(one) not in ("Succeeded", "Failed")]
        if len(found) >= count and not left:
            return found
        assert time.monotonic() < until, f"{len(found)} of {count} pods, not done: {left[:5]}"
        time.sleep(0.5)


def _in(one: Object, span: Span) -> bool:
    """Whether the kubelet refused it in this time; the kubelet writes whole seconds."""
    when = datetime.fromisoformat(one["status"].get("startTime", one["metadata"]["creationTimestamp"])).timestamp()
    return span[0] - 1 <= when <= span[1] + 1


def _why(pods: Sequence[Object]) -> str:
    return "; ".join(f"{one['metadata']['name']}: {one['status'].get('message')}" for one in pods[:3])
