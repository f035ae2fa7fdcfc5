"""What a user cannot do: place GPU pods without the scheduler, or write the records of slices."""

import hashlib
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from tests.cluster.checks.chart import NAMESPACE
from tests.cluster.checks.faults import held_by_node
from tests.cluster.checks.first_pod import slice_pod
from tests.cluster.checks.records import together
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Kubectl, Refused, phase, pod
from tests.cluster.node import Node
from vgpu.kube.objects import Pod
from vgpu.names import SCHEDULER_NAME

OUTSIDE: Final = "passes-by"  #: a namespace that opts out of admission
USER: Final = "somebody"  #: a service account with Kubernetes' role `edit` in the namespace `default`
RECORD: Final = "vgpu.io/allocation"
SECONDS = 120


def refused(body: Callable[[], object], *words: str) -> str:
    """The reason with which `body` is refused; AssertionError when it is not, or for another reason."""
    try:
        body()
    except Refused as error:
        reason = str(error)
    else:
        raise AssertionError("not refused")
    missing = [word for word in words if word not in reason]
    assert not missing, f"refused without a word of {missing}: {reason}"
    return reason


def somebody(node: Node, token: str) -> Kubectl:
    """The cluster for a user with this token."""
    config = json.loads(node.kubectl.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    file = node.kubectl.kubeconfig.with_name(f"{hashlib.sha256(token.encode()).hexdigest()[:16]}.conf")
    file.write_text(json.dumps(config))
    return Kubectl(file, node.env)


def node_name(node: Node) -> str:
    """A GPU pod that names its node bypasses the scheduler."""
    body = slice_pod("elsewhere", "true")
    body["spec"]["nodeName"] = NODE
    return refused(lambda: node.kubectl.create(body), "spec.nodeName").splitlines()[0]


def forged_record(node: Node) -> str:
    """A user with `edit` cannot write an allocation in any way, and cannot remove a pod's mark to free its slice.

    The same holds for a user with rights on pods, their status and bindings.
    """
    kubectl = node.kubectl
    kubectl.run("create", "serviceaccount", USER)
    who = f"--serviceaccount=default:{USER}"
    kubectl.run("create", "rolebinding", USER, "--clusterrole=edit", who)
    user = somebody(node, kubectl.run("create", "token", USER).strip())
    forged = slice_pod("forged", "true")
    forged["metadata"]["annotations"] = {RECORD: "{}"}
    plain = pod("forged", CLIENT, ["true"], metadata={"annotations": {RECORD: "{}"}})
    refused(lambda: user.create(forged), RECORD)
    refused(lambda: user.create(plain), RECORD)
    user.create(slice_pod("honest", "sleep", "3600"), pod("waits", CLIENT, ["true"], schedulerName="nobody"))
    kubectl.until("running", lambda found: phase(found) == "Running", "pod", "honest", seconds=SECONDS)
    held = _held(node)
    record = f'{{"metadata":{{"annotations":{{"{RECORD}":"{{}}"}}}}}}'
    binding: dict[str, Any] = {"apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": NODE}}
    binding["metadata"] = {"name": "waits", "annotations": {RECORD: "{}"}}
    body, pods = json.dumps(binding), "/api/v1/namespaces/default/pods"
    labelled = json.dumps(binding | {"metadata": {"name": "waits", "labels": {"vgpu.io/managed": "no"}}})
    ways: dict[str, Callable[[], object]] = {
        "update": lambda: user.run("annotate", "pod", "honest", f"{RECORD}={{}}", "--overwrite"),
        "removal": lambda: user.run("annotate", "pod", "honest", f"{RECORD}-"),
        "label": lambda: user.run("label", "pod", "honest", "vgpu.io/managed-"),
        "status": lambda: user.run("patch", "pod", "honest", "--subresource=status", "--type=merge", "-p", record),
        "binding": lambda: user.run("create", "--raw", f"{pods}/waits/binding", "-f", "-", stdin=body),
        "old binding": lambda: user.run(
            "create", "--raw", "/api/v1/namespaces/default/bindings", "-f", "-", stdin=body
        ),
        "label by binding": lambda: user.run("create", "--raw", f"{pods}/waits/binding", "-f", "-", stdin=labelled),
    }
    for way in ways.values():
        refused(way)
    kubectl.run("create", "role", USER, "--verb=*", "--resource=pods,pods/status,pods/binding,bindings")
    kubectl.run("create", "rolebinding", f"{USER}-all", f"--role={USER}", who)
    reason = {"binding": "scheduler only", "old binding": "scheduler only", "label by binding": "leaves it as it is"}
    for name, way in ways.items():
        refused(way, "ValidatingAdmissionPolicy", reason.get(name, "by vgpu only"))
    refused(lambda: kubectl.run("label", "pod", "honest", "vgpu.io/managed-"), "by vgpu only")
    assert kubectl.get("pod", "honest")["metadata"]["labels"]["vgpu.io/managed"] == "true"
    assert _held(node) == held
    kubectl.delete("pod", "honest", "waits")
    return f"creation with and without a GPU, {', '.join(ways)}"


def _held(node: Node) -> dict[str, int]:
    """Card → MiB, once the agent counts the pods' records; it looks once a second."""
    until = time.monotonic() + SECONDS
    while True:
        pods = [msgspec.convert(one, Pod) for one in node.kubectl.items("pods", "-A")]
        seen = held_by_node(), {uuid: now.mem for uuid, now in together(pods).items() if now.mem}
        if seen[0] == seen[1]:
            return seen[0]
        assert time.monotonic() < until, f"MiB that the node and the records hold: {seen}"
        time.sleep(0.3)


def extender_is_not_served(node: Node) -> str:
    """The Service of the webhook does not serve /bind."""
    address = node.kubectl.get("service", "vgpu-scheduler", NAMESPACE)["spec"]["clusterIP"]
    anyone = ssl.create_default_context()
    anyone.check_hostname = False
    anyone.verify_mode = ssl.CERT_NONE
    codes = {}
    for path in ("bind", "filter", "prioritize"):
        request = urllib.request.Request(f"https://{address}/{path}", data=b"{}", method="POST")
        try:
            with urllib.request.urlopen(request, context=anyone, timeout=10) as answer:
                codes[path] = answer.status
        except urllib.error.HTTPError as error:
            codes[path] = error.code
    assert set(codes.values()) == {404}, codes
    return ", ".join(f"/{path} {code}" for path, code in codes.items())


def past_the_webhook(node: Node) -> str:
    """A pod that opts out of admission does not start; its events say why, also where it names its node.

    A pod that names our scheduler is not even created, nor is a pod in a namespace that opts out.
    """
    out = {"vgpu.io/webhook": "ignore"}
    ignored, placed, ours, inside = (slice_pod(name, "true") for name in ("ignored", "placed", "ours", "inside"))
    for body in (ignored, placed, ours):
        body["metadata"]["labels"] = out
    placed["spec"]["nodeName"] = NODE
    for body in (ours, inside):
        body["spec"]["schedulerName"] = SCHEDULER_NAME
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OUTSIDE, "labels": out}}
    inside["metadata"]["namespace"] = OUTSIDE
    node.kubectl.create(space, ignored, placed)
    # before that, no pod can be created
    node.kubectl.until("made", bool, "serviceaccount", "default", namespace=OUTSIDE)
    for body in (ours, inside):
        refused(partial(node.kubectl.create, body), "ValidatingAdmissionPolicy", "opts out of admission")
    node.kubectl.delete("namespace", OUTSIDE, now=False)
    told = [_mismatch(node, name) for name in ("ignored", "placed")]
    node.kubectl.delete("pod", "ignored", "placed")
    return told[0]


def _mismatch(node: Node, name: str) -> str:
    """The event that says why a pod does not start."""

    def told(_: object) -> bool:
        return any(event.startswith("VgpuMismatch") for event in node.kubectl.events(name))

    found = node.kubectl.until("told why", told, "pod", name, seconds=SECONDS)
    assert phase(found) in {"Pending", "Failed"}, found["status"]
    assert not [one for one in found["status"].get("containerStatuses", ()) if "running" in one["state"]]
    return next(event for event in node.kubectl.events(name) if event.startswith("VgpuMismatch"))


def of_a_controller(node: Node) -> str:
    """Where a controller owns such a pod, the pod is ended, and the next one is placed again: nothing hangs."""
    body = slice_pod("", "true")
    labels = {"app": "ignored", "vgpu.io/webhook": "ignore"}
    spec = body["spec"] | {"restartPolicy": "Always"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    replicas = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "ignored"}, "spec": replicas}
    node.kubectl.create(owner)
    begin, seen = time.monotonic(), set[str]()
    while len(seen) < 2:
        about = node.kubectl.run("describe", "pods", "-l", "app=ignored")
        assert time.monotonic() < begin + SECONDS, about
        found = node.kubectl.items("pods", "-l", "app=ignored")
        assert not [one for one in found if phase(one) == "Running"]
        seen |= {one["metadata"]["uid"] for one in found}
        time.sleep(0.3)
    node.kubectl.run("delete", "replicaset", "ignored", "--cascade=foreground", timeout=SECONDS)
    return f"another one after {time.monotonic() - begin:.1f} s"
