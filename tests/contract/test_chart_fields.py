"""Which fields of nodes and pods the chart's accounts may change: only the fields that the parts write."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools import helm
from tools.policies import spec_of, verdict

from device_plugin import cleanup, conditions
from device_plugin.publish import contested, marks
from vgpu import names
from vgpu.devices import Gpu, Inventory
from vgpu.kube import writes
from vgpu.kube.client import KubeClient
from vgpu.kube.objects import Node
from vgpu.standin.apiserver import ApiServer

AGENT, SCHEDULER, CLEAN_UP = (
    f"system:serviceaccount:kube-system:vgpu-{part}" for part in ("device-plugin", "scheduler", "clean-up")
)
RESOURCES = (names.RESOURCE_GPU, names.RESOURCE_MEMORY, names.RESOURCE_TOTAL_MEMORY)
GPUS = tuple(Gpu(uuid=f"GPU-{n}", index=n, model="Tesla T4", memory=15360, physical=15360) for n in range(2))
NODE: dict[str, Any] = {
    "metadata": {
        "name": "n1",
        "labels": {"kubernetes.io/os": "linux", "node-restriction.kubernetes.io/tier": "secret"},
        "annotations": {"note": "x", names.CORDON: "GPU-1", "node.alpha.kubernetes.io/ttl": "0"},
        "finalizers": ["example.com/keep"],
    },
    "spec": {"providerID": "cloud://1", "taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]},
    "status": {
        "capacity": {"cpu": "4", "memory": "16Gi", names.RESOURCE_GPU: "10"},
        "allocatable": {"cpu": "4", "memory": "15Gi", names.RESOURCE_GPU: "10"},
        "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "KubeletReady"},
            {"type": "MemoryPressure", "status": "False"},
        ],
    },
}
POD: dict[str, Any] = {
    "metadata": {
        "name": "p",
        "labels": {"app": "web", names.LABEL_MANAGED: "true"},
        "annotations": {names.ALLOCATION: '{"v":1,"containers":{}}', "note": "x"},
        "ownerReferences": [{"kind": "ReplicaSet", "name": "r", "uid": "u", "controller": True}],
    },
    "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "a"}], "tolerations": []},
}
LABELS, NOTES, OWNERS, SPEC, STATUS, RESOURCE, CONDITION = (
    "metadata.labels",
    "metadata.annotations",
    "metadata.finalizers and metadata.ownerReferences",
    "spec of a",
    "status of a node",
    "status.capacity and status.allocatable",
    "status.conditions",
)


@pytest.fixture(scope="module")
def policies() -> dict[str, dict[str, Any]]:
    """Kind of object → its policy."""
    objects = helm.objects()
    return {kind: spec_of(objects, "ValidatingAdmissionPolicy", f"vgpu-{kind}-fields") for kind in ("node", "pod")}


def told(policies: dict[str, dict[str, Any]], old: Any, new: Any, user: str = AGENT) -> list[str]:
    kind = "node" if "status" in (old or new) or "providerID" in (old or new).get("spec", {}) else "pod"
    operation = "CREATE" if old is None else "UPDATE"
    request = {"operation": operation, "name": new["metadata"]["name"], "userInfo": {"username": user}}
    return verdict(policies[kind], request, new, old)


def changed(old: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of `old` with another value at a path of keys; None: without it."""
    new = copy.deepcopy(old)
    *way, last = path.split("|")
    at = new
    for key in way:
        at = at.setdefault(key, {})
    if value is None:
        at.pop(last)
    else:
        at[last] = value
    return new


READY = NODE["status"]["conditions"][0]
PRESSURE = NODE["status"]["conditions"][1]
OURS = {"type": names.CONDITION_UNHEALTHY, "status": "True", "message": "card 0"}


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        # fields that agents write
        (f"metadata|labels|{names.LABEL_PRESENT}", "true", ""),
        (f"metadata|annotations|{names.DEVICES}", "{}", ""),
        (f"metadata|annotations|{names.MODE}", "cdi", ""),
        (f"status|capacity|{names.RESOURCE_TOTAL_MEMORY}", "1", ""),
        (f"status|capacity|{names.RESOURCE_CORES}", "1", ""),
        (f"status|allocatable|{names.RESOURCE_GPU}", None, ""),
        ("status|conditions", [READY, PRESSURE, OURS], ""),
        ("metadata|resourceVersion", "8", ""),
        ("metadata|managedFields", [{"manager": "vgpu"}], ""),
        # labels
        ("metadata|labels|node-restriction.kubernetes.io/tier", "open", LABELS),
        ("metadata|labels|node-restriction.kubernetes.io/other", "x", LABELS),
        ("metadata|labels|kubernetes.io/os", None, LABELS),
        ("metadata|labels|node-role.kubernetes.io/control-plane", "", LABELS),
        ("metadata|labels|vgpu.io/presents", "true", LABELS),
        ("metadata|labels", None, LABELS),
        # annotations
        ("metadata|annotations|note", "y", NOTES),
        ("metadata|annotations|new", "", NOTES),
        ("metadata|annotations|node.alpha.kubernetes.io/ttl", None, NOTES),
        (f"metadata|annotations|{names.CORDON}", None, NOTES),
        (f"metadata|annotations|{names.CORDON}", "", NOTES),
        ("metadata|annotations", None, NOTES),
        # the rest of metadata and spec
        ("metadata|finalizers", None, OWNERS),
        ("metadata|finalizers", ["example.com/keep", "b/c"], OWNERS),
        ("metadata|ownerReferences", [{"kind": "Node", "name": "n2", "uid": "u"}], OWNERS),
        ("spec|taints", None, SPEC),
        ("spec|taints", [], SPEC),
        ("spec|unschedulable", True, SPEC),
        ("spec", None, SPEC),
        # status
        ("status|addresses", [{"type": "InternalIP", "address": "10.0.0.2"}], STATUS),
        ("status|images", [], STATUS),
        ("status|addresses", None, STATUS),
        ("status|capacity|cpu", "400", RESOURCE),
        ("status|capacity|memory", None, RESOURCE),
        ("status|allocatable|example.com/fpga", "1", RESOURCE),
        ("status|allocatable", None, RESOURCE),
        ("status|conditions", [PRESSURE, OURS], CONDITION),
        ("status|conditions", [{**READY, "status": "False"}, PRESSURE], CONDITION),
        ("status|conditions", [READY, PRESSURE, {"type": "DiskPressure", "status": "True"}], CONDITION),
        ("status|conditions", None, CONDITION),
    ],
)
def test_fields_of_nodes(policies: dict[str, dict[str, Any]], path: str, value: Any, refusal: str) -> None:
    for user in (AGENT, CLEAN_UP):
        messages = told(policies, NODE, changed(NODE, path, value), user)
        assert [message.startswith(refusal) for message in messages] == ([True] if refusal else [])
    for user in ("alice", "system:node:n1", AGENT + "x", AGENT.replace("kube-system", "other")):
        assert told(policies, NODE, changed(NODE, path, value), user) == []


@pytest.mark.parametrize(
    ("path", "value", "refusal"),
    [
        (f"metadata|annotations|{names.ALLOCATION}", "other", ""),
        (f"metadata|annotations|{names.ALLOCATION}", None, ""),
        ("metadata|resourceVersion", "8", ""),
        ("metadata|labels|app", "bank", LABELS),
        ("metadata|labels|app", None, LABELS),
        ("metadata|labels|role", "admin", LABELS),
        (f"metadata|labels|{names.LABEL_MANAGED}", None, LABELS),
        ("metadata|labels", None, LABELS),
        ("metadata|annotations|note", "y", NOTES),
        (f"metadata|annotations|{names.CORE_POLICY}", "none", NOTES),
        ("metadata|annotations|container.apparmor.security.beta.kubernetes.io/c", "unconfined", NOTES),
        ("metadata|finalizers", ["a/b"], OWNERS),
        ("metadata|ownerReferences", None, OWNERS),
        ("metadata|ownerReferences", [{"kind": "ReplicaSet", "name": "other", "uid": "v"}], OWNERS),
        ("spec|containers", [{"name": "c", "image": "evil"}], SPEC),
        ("spec|tolerations", [{"operator": "Exists"}], SPEC),
        ("spec|activeDeadlineSeconds", 1, SPEC),
    ],
)
def test_fields_of_pods(policies: dict[str, dict[str, Any]], path: str, value: Any, refusal: str) -> None:
    for user in (AGENT, SCHEDULER):
        messages = told(policies, POD, changed(POD, path, value), user)
        assert [message.startswith(refusal) for message in messages] == ([True] if refusal else [])
    assert told(policies, POD, changed(POD, path, value), "alice") == []


def test_the_status_of_a_pod_is_the_kube_schedulers(policies: dict[str, dict[str, Any]]) -> None:
    new = changed(POD, "status", {"conditions": [{"type": "PodScheduled", "status": "False"}]})
    assert told(policies, POD, new, SCHEDULER) == []


def test_nothing_is_created(policies: dict[str, dict[str, Any]]) -> None:
    assert "vgpu creates no nodes" in told(policies, None, NODE)
    assert "vgpu creates no pods" in told(policies, None, POD)


def test_bare_objects_are_judged_too(policies: dict[str, dict[str, Any]]) -> None:
    node: dict[str, Any] = {"metadata": {"name": "n1"}, "status": {}}
    assert told(policies, node, changed(node, f"metadata|labels|{names.LABEL_PRESENT}", "true")) == []
    assert told(policies, node, changed(node, "metadata|labels|a", "b")) != []
    assert told(policies, node, changed(node, "status|capacity|cpu", "1")) != []
    assert told(policies, node, changed(node, "spec|unschedulable", True)) != []


def test_renamed_resources_are_those_that_may_be_published() -> None:
    objects = helm.objects({"resourceMem": "example.com/gpumem"})
    policy = {"node": spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-node-fields")}
    assert told(policy, NODE, changed(NODE, "status|capacity|example.com/gpumem", "1")) == []
    assert told(policy, NODE, changed(NODE, f"status|capacity|{names.RESOURCE_MEMORY}", "1")) != []


def test_agents_of_another_release_are_left_to_its_own_policies() -> None:
    objects = helm.objects({"otherReleases": [{"namespace": "second", "fullname": "gpu-b"}]})
    policy = {"node": spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-node-fields")}
    other = "system:serviceaccount:second:gpu-b-device-plugin"
    assert told(policy, NODE, changed(NODE, "status|capacity|example.com/gpumem", "1"), other) == []


def test_every_field_policy_covers_status_too(policies: dict[str, dict[str, Any]]) -> None:
    for kind, policy in policies.items():
        (rule,) = policy["matchConstraints"]["resourceRules"]
        assert rule["resources"] == [f"{kind}s", f"{kind}s/status"]
        assert rule["operations"] == ["CREATE", "UPDATE"]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[KubeClient]:
    server = ApiServer()
    server.start()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    yield KubeClient.connect(tmp_path / "kubeconfig")
    server.stop()


def test_what_agents_and_the_clean_up_really_write_is_allowed(
    policies: dict[str, dict[str, Any]], client: KubeClient
) -> None:
    """Checks the real writing code with an API server: its object before and after each request."""
    path = "/api/v1/nodes/n1"
    client.request("POST", "/api/v1/nodes", body=NODE)
    client.request("PATCH", f"{path}/status", body={"status": NODE["status"]}, content_type=writes.MERGE_PATCH)
    seen = 0

    def allowed(user: str, write: Any) -> None:
        nonlocal seen
        old = msgspec.json.decode(client.get(path))
        write()
        new = msgspec.json.decode(client.get(path))
        assert new != old
        assert told(policies, old, new, user) == []
        seen += 1

    def node() -> Node:
        return msgspec.json.decode(client.get(path), type=Node)

    annotations, labels = marks(Inventory(devices=GPUS))
    allowed(AGENT, lambda: writes.patch_node(client, "n1", annotations=annotations, labels=labels))
    allowed(AGENT, lambda: writes.patch_node(client, "n1", annotations={names.MODE: "cdi: why"}))
    totals = dict.fromkeys((names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_TOTAL_CORES, names.RESOURCE_MEMORY), "1")
    allowed(AGENT, lambda: writes.patch_node_capacity(client, "n1", totals))
    allowed(AGENT, lambda: conditions.put(client, "n1", node().status.conditions, contested("another plugin")))
    allowed(AGENT, lambda: conditions.put(client, "n1", node().status.conditions, contested("")))
    allowed(CLEAN_UP, lambda: cleanup.clean_node(client, node(), RESOURCES))
    assert seen == 6
