"""What the token of one node's agent can write: only that node and its pods, and only the agent's fields of them."""

from functools import partial
from typing import Final

from tests.cluster.checks.chart import NAMESPACE
from tests.cluster.checks.refusals import refused, somebody
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Kubectl, Object, Refused, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.kube import writes
from vgpu.kube.client import MERGE_PATCH, ApiError, KubeClient

ACCOUNT: Final = "vgpu-device-plugin"
OTHER: Final = "node-2"
MARK: Final = "vgpu.io/check"
RECORD: Final = f'{names.ALLOCATION}={{"v":1,"containers":{{}}}}'
CAPACITY: Final = {"status": {"capacity": {names.RESOURCE_TOTAL_MEMORY: "1"}}}
OWN_NODE: Final = "its own node only"
#: fields of its own node and its pods
FIELDS: Final = (
    (("label", "node", NODE, "node-restriction.kubernetes.io/check=1"), "metadata.labels of a node"),
    (("annotate", "node", NODE, "check=1"), "metadata.annotations of a node"),
    (("patch", "node", NODE, "-p", '{"spec": {"unschedulable": true}}'), "spec of a node"),
    (("label", "pod", "near", "check=1"), "metadata.labels of a pod"),
    (("annotate", "pod", "near", "check=1"), "metadata.annotations of a pod"),
    (("patch", "pod", "near", "-p", '{"spec": {"activeDeadlineSeconds": 1}}'), "spec of a pod"),
)


def stolen_token(node: Node) -> str:
    """A token of an agent writes the node for which it was made, and that node's pods, and no others."""
    kubectl = node.kubectl
    kubectl.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": OTHER}})
    try:
        kubectl.create(_pod("far", OTHER), _pod("near", NODE))
        (agent,) = (one for one in kubectl.items("pods", "-n", NAMESPACE) if _is_agent(one))
        bound = ("--bound-object-kind=Pod", f"--bound-object-name={agent['metadata']['name']}")
        token = ("create", "token", ACCOUNT, "-n", NAMESPACE)
        own = somebody(node, kubectl.run(*token, *bound).strip())
        own.run("annotate", "node", NODE, f"{MARK}=1")
        own.run("annotate", "node", NODE, f"{MARK}-")
        own.run("annotate", "pod", "near", RECORD)
        unbound = somebody(node, kubectl.run(*token).strip())
        mark = f"{MARK}=1"
        for thief in (own, unbound):
            refused(partial(thief.run, "annotate", "node", OTHER, mark), OWN_NODE)
            refused(partial(_set_capacity, thief), OWN_NODE)
            refused(partial(thief.run, "annotate", "pod", "far", RECORD), OWN_NODE)
            refused(partial(thief.run, "delete", "pod", "far", "--wait=false"), OWN_NODE)
            refused(partial(_evict, thief, "far"), OWN_NODE)
        refused(partial(unbound.run, "annotate", "node", NODE, mark), OWN_NODE)
        for change, told in FIELDS:
            refused(partial(own.run, *change), told)
        near = kubectl.get("pod", "near")["metadata"]
        writes.evict(KubeClient.connect(own.kubeconfig), near["namespace"], near["name"], near["uid"])
    finally:
        kubectl.run("delete", "pod", "near", "far", "--force", "--grace-period=0", "--ignore-not-found")
        kubectl.delete("node", OTHER)
    return f"nodes, their status and pods of {OTHER}, which it cannot end either"


def _is_agent(found: Object) -> bool:
    spec = found["spec"]
    return bool(spec.get("serviceAccountName") == ACCOUNT and spec.get("nodeName") == NODE)


def _pod(name: str, on: str) -> Object:
    return pod(name, CLIENT, ["sleep", "3600"], nodeName=on)


def _evict(who: Kubectl, name: str) -> None:
    """Evicts at once, without the dry run."""
    path = writes.pod_path("default", name)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    try:
        KubeClient.connect(who.kubeconfig).request("POST", f"{path}/eviction", body=body)
    except ApiError as error:
        raise Refused(str(error)) from None


def _set_capacity(who: Kubectl) -> None:
    """Writes as agents do; kubectl would first read the status, which agents may not read."""
    client = KubeClient.connect(who.kubeconfig)
    try:
        client.request("PATCH", f"/api/v1/nodes/{OTHER}/status", body=CAPACITY, content_type=MERGE_PATCH)
    except ApiError as error:
        raise Refused(str(error)) from None
