"""`vgpu doctor` as an administrator runs it on the node, and as the agent's pod does."""

import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from scheduler import pki
from tests.cluster.checks.chart import NAMESPACE, PROFILE
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.doctor.findings import Finding
from vgpu.kube.client import JSON_PATCH, KubeClient

ROOT: Final = Path(__file__).parents[3]
SERVICE: Final = "vgpu-scheduler"
HOOKS: Final = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{SERVICE}"
AGENTS: Final = "daemonset/vgpu-device-plugin"
OUTSIDE: Final = "outside"  #: a namespace without admission
AREAS: Final = {
    "kubernetes",
    "scheduler",
    "webhook",
    "certificate",
    "agents",
    "plugin",
    "conflict",
    "runtime",
    "settings",
    "versions",
    "library",
}
UNREACHABLE: Final = ("Service gone", "authority unknown")  #: faults with which the webhook cannot be called
BREAK_SECONDS: Final = 0.5  #: the scheduler repairs caBundle every ten seconds
SECONDS: Final = 120


def all_well(node: Node) -> str:
    """Nothing is wrong and no check was left out, and the exit status says so; the agent's pod agrees."""
    status, found = _doctor(node)
    bad = [str(one) for one in found if one.verdict != "ok"]
    assert (status, bad) == (0, []), "\n".join(bad)
    missing = AREAS - {one.area for one in found}
    assert not missing, f"nothing is said of {missing}: {found}"
    inside = node.kubectl.run("exec", "-n", NAMESPACE, AGENTS, "--", "vgpu", "doctor", "--json")
    seen = msgspec.json.decode(inside, type=list[Finding])
    assert not [one for one in seen if one.verdict == "wrong"]
    return f"{len(found)} lines, {len([one for one in seen if one.verdict == 'ok'])} in the agent's pod"


def finds_faults(node: Node) -> str:
    """Each fault, made for real, is the only finding, with the right remedy; after the repair, all is well again."""
    faults: Mapping[str, tuple[AbstractContextManager[None], Mapping[str, str]]] = {
        "Service gone": (_without_service(node), {"webhook": f"Service {NAMESPACE}/{SERVICE} is missing"}),
        "agent gone": (_without_agent(node), {"agents": "nodeSelector", "plugin": "agent there is ready"}),
        "another plugin": (_with_another_plugin(node), {"conflict": "remove it"}),
        "authority unknown": (_without_trust(node), {"webhook": "caBundle", "certificate": "the scheduler's log"}),
        "no admission": (_without_admission(node), {"webhook": f"label {names.WEBHOOK_LABELS[0]}"}),
    }
    for name, (fault, todo) in faults.items():
        with fault:
            _until(node, name, todo, *(("-n", OUTSIDE) if name == "no admission" else ()))
            if name in UNREACHABLE:
                _plain_pod(node)
        _until(node, f"mended: {name}", {})
    return f"{', '.join(faults)}; pods without GPU are created while the webhook cannot be called"


def wrong(node: Node, *arguments: str) -> list[Finding]:
    """The doctor's findings that are wrong."""
    status, found = _doctor(node, *arguments)
    bad = [one for one in found if one.verdict == "wrong"]
    assert status == bool(bad), f"status {status}: {bad}"
    return bad


def _doctor(node: Node, *arguments: str) -> tuple[int, list[Finding]]:
    """Its status and findings, on a node with the simulated cards of the chart."""
    command = [sys.executable, "-m", "vgpu", "doctor", "--json", f"--kubeconfig={node.kubectl.kubeconfig}", *arguments]
    environ = {**os.environ, **node.env, names.ENV_SIMULATE: PROFILE}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout, done.stderr
    return done.returncode, msgspec.json.decode(done.stdout, type=list[Finding])


def _until(node: Node, what: str, todo: Mapping[str, str], *arguments: str) -> None:
    """Waits until exactly these areas are wrong, each with a remedy of these words."""
    until = time.monotonic() + SECONDS
    while True:
        found = wrong(node, *arguments)
        right = all(todo.get(one.area, "\0") in one.todo for one in found)
        if right and {one.area for one in found} == set(todo):
            return
        assert time.monotonic() < until, f"{what}: not {dict(todo)} but\n" + "\n".join(map(str, found))
        time.sleep(0.5)


@contextmanager
def _without_service(node: Node) -> Iterator[None]:
    body = node.kubectl.get("service", SERVICE, NAMESPACE)
    body["metadata"] = {key: body["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
    body.pop("status")
    node.kubectl.delete("service", SERVICE, namespace=NAMESPACE)
    try:
        yield
    finally:
        node.kubectl.run("apply", "--server-side", "--field-manager=helm", "-f", "-", stdin=json.dumps(body))


@contextmanager
def _without_trust(node: Node) -> Iterator[None]:
    """The API server trusts an authority that has signed nothing, even though the scheduler writes the right one again
    and again.
    """
    client = KubeClient.connect(node.kubectl.kubeconfig)
    before = msgspec.json.decode(client.get(HOOKS))["webhooks"][0]["clientConfig"]["caBundle"]
    other = base64.b64encode(pki._authority(datetime.now(UTC))[0].encode()).decode()
    ending = threading.Event()

    def trust(bundle: str) -> None:
        body = [{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle}]
        client.request("PATCH", HOOKS, body=body, content_type=JSON_PATCH)

    def repeat() -> None:
        while not ending.wait(BREAK_SECONDS):
            trust(other)

    trust(other)
    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        trust(before)


def _plain_pod(node: Node) -> None:
    """Only pods with a GPU wait for the webhook."""
    node.kubectl.create(pod("plain", CLIENT, ["sleep", "3600"]))
    node.kubectl.until("running", lambda found: phase(found) == "Running", "pod", "plain", seconds=SECONDS)
    node.kubectl.delete("pod", "plain")


@contextmanager
def _without_agent(node: Node) -> Iterator[None]:
    """As when a selector selects no node."""
    _select(node, "nowhere")
    try:
        yield
    finally:
        _select(node, None)
        node.kubectl.run("rollout", "status", AGENTS, "-n", NAMESPACE, f"--timeout={SECONDS}s", timeout=SECONDS + 10)


def _select(node: Node, value: str | None) -> None:
    change = {"spec": {"template": {"spec": {"nodeSelector": {"vgpu.io/check": value}}}}}
    node.kubectl.run("patch", AGENTS, "-n", NAMESPACE, "-p", json.dumps(change))


@contextmanager
def _with_another_plugin(node: Node) -> Iterator[None]:
    name = "nvidia-device-plugin-daemonset-x"
    node.kubectl.create(pod(name, "nvcr.io/nvidia/k8s-device-plugin:v0.17.0", [], nodeName=NODE))
    try:
        yield
    finally:
        node.kubectl.delete("pod", name)


@contextmanager
def _without_admission(node: Node) -> Iterator[None]:
    space: Object = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": OUTSIDE, "labels": {names.WEBHOOK_LABELS[0]: names.WEBHOOK_IGNORE}},
    }
    node.kubectl.create(space)
    try:
        yield
    finally:
        node.kubectl.run("delete", "namespace", OUTSIDE, timeout=SECONDS)
