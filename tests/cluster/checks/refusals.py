"""What a user cannot do: placing GPU pods past the scheduler, or writing the records of who holds what."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Final

from tests.cluster.checks.chart import NAMESPACE
from tests.cluster.checks.first_pod import slice_pod
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Refused, phase, pod
from tests.cluster.node import Node

USER: Final = "somebody"  #: holds Kubernetes' role `edit` in the namespace `default`
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


def node_name(node: Node) -> str:
    """A GPU pod that names its node has gone past the scheduler."""
    body = slice_pod("elsewhere", "true")
    body["spec"]["nodeName"] = NODE
    return refused(lambda: node.kubectl.create(body), "spec.nodeName").splitlines()[0]


def forged_record(node: Node) -> str:
    """A user with `edit` writes no allocation, neither at creation nor later, and does not remove the mark of a pod."""
    kubectl = node.kubectl
    kubectl.run("create", "rolebinding", USER, "--clusterrole=edit", f"--user={USER}")
    user = kubectl.acting_as(USER)
    forged = slice_pod("forged", "true")
    forged["metadata"]["annotations"] = {RECORD: "{}"}
    plain = pod("forged", CLIENT, ["true"], metadata={"annotations": {RECORD: "{}"}})
    refused(lambda: user.create(forged), RECORD)
    refused(lambda: user.create(plain), RECORD)
    user.create(slice_pod("honest", "sleep", "3600"))
    kubectl.until("running", lambda found: phase(found) == "Running", "pod", "honest", seconds=SECONDS)
    ways: dict[str, Callable[[], object]] = {
        "update": lambda: user.run("annotate", "pod", "honest", f"{RECORD}={{}}", "--overwrite"),
        "removal": lambda: user.run("annotate", "pod", "honest", f"{RECORD}-"),
        "label": lambda: user.run("label", "pod", "honest", "vgpu.io/managed-"),
    }
    for way in ways.values():
        refused(way)
    assert kubectl.get("pod", "honest")["metadata"]["labels"]["vgpu.io/managed"] == "true"
    kubectl.delete("pod", "honest")
    return f"creation with and without a GPU, {', '.join(ways)}"


def extender_is_not_served(node: Node) -> str:
    """The Service of the webhook knows nothing of /bind."""
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
    """A pod that opts out of admission is created and never starts; its events say why."""
    body = slice_pod("ignored", "true")
    body["metadata"]["labels"] = {"vgpu.io/webhook": "ignore"}
    node.kubectl.create(body)

    def told(_: object) -> bool:
        return any(event.startswith("VgpuMismatch") for event in node.kubectl.events("ignored"))

    found = node.kubectl.until("told why", told, "pod", "ignored", seconds=SECONDS)
    assert phase(found) in {"Pending", "Failed"}, found["status"]
    events = [event for event in node.kubectl.events("ignored") if event.startswith("VgpuMismatch")]
    node.kubectl.delete("pod", "ignored")
    return events[0]
