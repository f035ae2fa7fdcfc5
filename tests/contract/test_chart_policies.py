"""The expressions that the API server evaluates, run by the CEL project's own runtime."""

from typing import Any

import pytest
from tools import helm
from tools.policies import evaluate, spec_of, verdict

from scheduler.admission import effects, strangers
from vgpu import names

SCHEDULER = "system:serviceaccount:kube-system:vgpu-scheduler"
AGENT = "system:serviceaccount:kube-system:vgpu-device-plugin"
SECOND = "system:serviceaccount:second:gpu-b-scheduler"
NODE = "authentication.kubernetes.io/node-name"
RECORD = {names.ALLOCATION: '{"v":1,"containers":{}}'}
MANAGED = {names.LABEL_MANAGED: "true"}


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return helm.objects({"otherReleases": [{"namespace": "second", "fullname": "gpu-b"}]})


def request(operation: str, user: str = "alice", *, node: str = "", name: str = "p") -> dict[str, Any]:
    info: dict[str, Any] = {"username": user}
    if node:
        info["extra"] = {NODE: [node]}
    return {"operation": operation, "name": name, "userInfo": info}


def pod(annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None, node: str = "") -> Any:
    metadata: dict[str, Any] = {"name": "p"}
    if annotations:
        metadata["annotations"] = annotations
    if labels:
        metadata["labels"] = labels
    return {"metadata": metadata, "spec": {"containers": [{"name": "c"}], **({"nodeName": node} if node else {})}}


BOUND = pod(RECORD, MANAGED, "n1")
MOVED = pod({names.ALLOCATION: "other"}, MANAGED, "n1")
FORGED, CHANGED, LABEL, FOREIGN = (
    "is written by the scheduler only",
    "recreate the pod to ask for another size",
    "marks a pod that holds slices",
    "pods of its own node only",
)


@pytest.mark.parametrize(
    ("who", "new", "old", "refusal"),
    [
        (request("CREATE"), pod(), None, ""),
        (request("CREATE"), pod({"note": "x"}, {"app": "x"}), None, ""),
        (request("CREATE"), pod(labels=MANAGED), None, ""),
        (request("CREATE"), pod(RECORD), None, FORGED),
        (request("CREATE", SCHEDULER), pod(RECORD), None, FORGED),
        (request("UPDATE"), pod({"note": "y", **RECORD}, MANAGED, "n1"), BOUND, ""),
        (request("UPDATE"), pod(RECORD, node="n1"), pod(node="n1"), CHANGED),
        (request("UPDATE"), MOVED, BOUND, CHANGED),
        (request("UPDATE"), pod({}, MANAGED, "n1"), BOUND, CHANGED),
        (request("UPDATE"), pod(RECORD, {}, "n1"), BOUND, LABEL),
        (request("UPDATE"), pod(RECORD, {names.LABEL_MANAGED: "no"}, "n1"), BOUND, LABEL),
        (request("UPDATE", SCHEDULER), MOVED, BOUND, ""),
        (request("UPDATE", SECOND), MOVED, BOUND, ""),
        (request("UPDATE", SECOND + "x"), MOVED, BOUND, CHANGED),
        (request("UPDATE", AGENT, node="n1"), MOVED, BOUND, ""),
        (request("UPDATE", AGENT, node="n2"), MOVED, BOUND, FOREIGN),
        (request("UPDATE", AGENT), MOVED, BOUND, FOREIGN),
        (request("UPDATE", AGENT, node="n2"), pod({"note": "y"}, node="n1"), pod(node="n1"), FOREIGN),
        (request("UPDATE", AGENT, node="n1"), pod({"note": "y"}), pod(), FOREIGN),
        (request("UPDATE", "eve", node="n1"), MOVED, BOUND, CHANGED),
    ],
)
def test_records_of_pods(objects: list[dict[str, Any]], who: Any, new: Any, old: Any, refusal: str) -> None:
    messages = verdict(spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-records"), who, new, old)
    assert bool(messages) is bool(refusal), messages
    assert any(refusal in message for message in messages) or not refusal


OUT = {names.WEBHOOK_LABELS[0]: names.WEBHOOK_IGNORE}
OURS, DEFAULT = ({"schedulerName": name} for name in (names.SCHEDULER_NAME, "default-scheduler"))
WITH_GPU, WITHOUT = ({"containers": [{"name": "c", "resources": {"limits": {key: "1"}}}]} for key in (
    names.RESOURCE_GPU, "cpu"
))  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "space", "spec", "refused"),
    [
        *(({label: names.WEBHOOK_IGNORE}, {}, OURS | WITH_GPU, True) for label in names.WEBHOOK_LABELS),
        *(({}, {label: names.WEBHOOK_IGNORE}, OURS | WITH_GPU, True) for label in names.WEBHOOK_LABELS),
        ({**OUT, **MANAGED}, {}, OURS | WITH_GPU, True),
        (OUT, {}, OURS | WITHOUT | {"initContainers": WITH_GPU["containers"]}, True),
        (OUT, {}, OURS | WITH_GPU | {"nodeName": "n1"}, True),
        (MANAGED, {}, OURS | WITH_GPU, False),
        ({names.WEBHOOK_LABELS[0]: "yes"}, {names.WEBHOOK_LABELS[0]: "yes"}, OURS | WITH_GPU, False),
        (OUT, OUT, OURS | WITHOUT, False),
        (OUT, OUT, DEFAULT | WITH_GPU, False),
        (OUT, OUT, DEFAULT | WITH_GPU | {"nodeName": "n1"}, False),
        (OUT, OUT, WITH_GPU, False),
    ],
)
def test_who_passes_admission_by_is_not_placed_by_our_scheduler(
    objects: list[dict[str, Any]], labels: dict[str, str], space: dict[str, str], spec: Any, refused: bool
) -> None:
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-records")
    new = {"metadata": {"name": "p", **({"labels": labels} if labels else {})}, "spec": spec}
    messages = verdict(policy, request("CREATE"), new, space=space)
    assert bool(messages) is refused
    assert all("opts out of admission" in message for message in messages)
    # Labels can be added afterwards; the checks at the creation stay valid.
    assert verdict(policy, request("UPDATE"), new, new, space) == []


def test_another_release_has_a_scheduler_of_another_name() -> None:
    objects = helm.objects({"schedulerName": "other", "resourceName": "example.com/gpu"})
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-records")
    for scheduler, resource, refused in (
        ("other", "example.com/gpu", True),
        ("other", "nvidia.com/gpu", False),
        (names.SCHEDULER_NAME, "example.com/gpu", False),
    ):
        spec = {"schedulerName": scheduler, "containers": [gpu(resource)]}
        messages = verdict(policy, request("CREATE"), {"metadata": {"name": "p", "labels": OUT}, "spec": spec})
        assert bool(messages) is refused


def test_records_policy_covers_every_way_to_change_a_pod(objects: list[dict[str, Any]]) -> None:
    def covered(name: str) -> dict[str, list[str]]:
        rules = spec_of(objects, "ValidatingAdmissionPolicy", name)["matchConstraints"]["resourceRules"]
        return {resource: rule["operations"] for rule in rules for resource in rule["resources"]}

    assert covered("vgpu-records") == {"pods": ["CREATE", "UPDATE"], "pods/status": ["CREATE", "UPDATE"]}
    assert covered("vgpu-bindings") == {"pods/binding": ["CREATE"], "bindings": ["CREATE"]}


@pytest.mark.parametrize(
    ("user", "annotations", "labels", "allowed"),
    [
        (SCHEDULER, RECORD, {}, True),
        (SECOND, RECORD, {}, True),
        ("system:kube-scheduler", {}, {}, True),
        ("system:kube-scheduler", {"note": "x"}, {"topology.kubernetes.io/zone": "z"}, True),
        ("system:kube-scheduler", RECORD, {}, False),
        (AGENT, RECORD, {}, False),
        ("alice", RECORD, {}, False),
        ("alice", {}, {names.LABEL_MANAGED: "no"}, False),
        (SCHEDULER, RECORD, MANAGED, False),
    ],
)
def test_bindings(
    objects: list[dict[str, Any]], user: str, annotations: dict[str, str], labels: dict[str, str], allowed: bool
) -> None:
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-bindings")
    given = {"annotations": annotations, "labels": labels}
    binding = {"metadata": {"name": "p", **{key: value for key, value in given.items() if value}}}
    assert (verdict(policy, request("CREATE", user), binding) == []) is allowed


@pytest.mark.parametrize(
    ("user", "token", "node", "allowed"),
    [
        (AGENT, "n1", "n1", True),
        (AGENT, "n2", "n1", False),
        (AGENT, "", "n1", False),
        ("system:node:n1", "", "n1", True),
        ("alice", "", "n1", True),
    ],
)
def test_agents_write_their_own_node(
    objects: list[dict[str, Any]], user: str, token: str, node: str, allowed: bool
) -> None:
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-nodes")
    changed = {"metadata": {"name": node}}
    messages = verdict(policy, request("UPDATE", user, node=token, name=node), changed, changed)
    assert (messages == []) is allowed


@pytest.mark.parametrize(
    ("user", "token", "operation", "dry", "allowed"),
    [
        (AGENT, "n1", "CREATE", True, True),
        (AGENT, "n1", "CREATE", False, False),
        (AGENT, "n1", "CREATE", None, False),
        (AGENT, "n1", "DELETE", False, True),
        (AGENT, "n2", "DELETE", False, False),
        (AGENT, "", "DELETE", False, False),
        (AGENT, "", "DELETE", True, False),
        ("alice", "", "CREATE", False, True),
        ("alice", "", "DELETE", False, True),
        ("system:node:n2", "", "DELETE", False, True),
    ],
)
def test_agents_end_pods_of_their_own_node(
    objects: list[dict[str, Any]], user: str, token: str, operation: str, dry: bool | None, allowed: bool
) -> None:
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-evictions")
    who = request(operation, user, node=token) | ({} if dry is None else {"dryRun": dry})
    eviction = {"metadata": {"name": "p"}, "deleteOptions": {}}
    new, old = (eviction, None) if operation == "CREATE" else (None, pod(node="n1"))
    assert (verdict(policy, who, new, old) == []) is allowed
    if operation == "DELETE" and user == AGENT:
        assert verdict(policy, who, None, pod()) != []  # bound to no node yet


def test_agents_of_every_release_are_narrowed(objects: list[dict[str, Any]]) -> None:
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-evictions")
    rules = policy["matchConstraints"]["resourceRules"]
    assert {tuple(rule["resources"]): rule["operations"] for rule in rules} == {
        ("pods/eviction",): ["CREATE"],
        ("pods",): ["DELETE"],
    }
    other = SECOND.replace("scheduler", "device-plugin")
    assert verdict(policy, request("DELETE", other, node="n2"), None, pod(node="n1")) != []


def test_every_policy_is_bound_and_denies(objects: list[dict[str, Any]]) -> None:
    policies = {item["metadata"]["name"] for item in objects if item["kind"] == "ValidatingAdmissionPolicy"}
    bindings = [item["spec"] for item in objects if item["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert {binding["policyName"] for binding in bindings} == policies
    for binding in bindings:
        actions = ["Warn"] if binding["policyName"] == "vgpu-hints" else ["Deny"]
        assert binding["validationActions"] == actions, binding["policyName"]
    for item in objects:
        if item["kind"] == "ValidatingAdmissionPolicy":
            failure = "Ignore" if item["metadata"]["name"] == "vgpu-hints" else "Fail"
            assert item["spec"]["failurePolicy"] == failure


def gpu(resource: str, where: str = "limits") -> dict[str, Any]:
    return {"name": "c", "resources": {where: {resource: "1"}}}


def hook_of(objects: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (configuration,) = [item for item in objects if item["kind"] == "MutatingWebhookConfiguration"]
    (found,) = [hook for hook in configuration["webhooks"] if hook["name"] == name]
    assert isinstance(found, dict)
    return found


PLAIN = {"name": "plain", "resources": {"limits": {"cpu": "1"}}}


@pytest.mark.parametrize(
    ("spec", "sent"),
    [
        ({"containers": [{"name": "bare"}]}, False),
        ({"containers": [PLAIN]}, False),
        ({"containers": [{"name": "empty", "resources": {}}], "initContainers": [PLAIN]}, False),
        ({"containers": [gpu("amd.com/gpu")]}, False),
        *(({"containers": [PLAIN, gpu(resource)]}, True) for resource in (
            names.RESOURCE_GPU,
            names.RESOURCE_MEMORY,
            names.RESOURCE_MEMORY_PERCENTAGE,
            names.RESOURCE_CORES,
            names.RESOURCE_PRIORITY,
            names.RESOURCE_TOTAL_MEMORY,
            names.RESOURCE_TOTAL_CORES,
        )),
        ({"containers": [gpu(names.RESOURCE_GPU, "requests")]}, True),
        ({"containers": [PLAIN], "initContainers": [gpu(names.RESOURCE_GPU)]}, True),
    ],
)  # fmt: skip
def test_only_gpu_pods_are_sent_to_the_webhook(objects: list[dict[str, Any]], spec: Any, sent: bool) -> None:
    webhook = hook_of(objects, "pods.vgpu.io")
    (condition,) = webhook["matchConditions"]
    data = {"request": request("CREATE"), "object": {"metadata": {}, "spec": spec}}
    assert evaluate(condition["expression"], data) is sent


@pytest.mark.parametrize(
    ("labels", "sent"),
    [
        (MANAGED, True),
        ({**MANAGED, names.WEBHOOK_LABELS[0]: names.WEBHOOK_IGNORE}, True),
        ({"app": "x"}, False),
        (None, False),
    ],
)
def test_debug_containers_of_managed_pods_are_sent_to_the_webhook(
    objects: list[dict[str, Any]], labels: dict[str, str] | None, sent: bool
) -> None:
    """A label that opts out would keep cards visible to a debug container: it can be added to a running pod."""
    webhook = hook_of(objects, "debug.vgpu.io")
    (rule,) = webhook["rules"]
    assert (rule["operations"], rule["resources"]) == (["UPDATE"], ["pods/ephemeralcontainers"])
    assert not {"objectSelector", "namespaceSelector"} & set(webhook)
    (condition,) = webhook["matchConditions"]
    for new in (labels, None):  # the request of a client may leave out labels, the pod keeps them
        data = {"request": request("UPDATE"), "object": pod(labels=new), "oldObject": pod(labels=labels)}
        assert evaluate(condition["expression"], data) is sent


def test_both_webhooks_are_called_alike(objects: list[dict[str, Any]]) -> None:
    pods, debug = (hook_of(objects, name) for name in ("pods.vgpu.io", "debug.vgpu.io"))
    own = {"name", "rules", "matchConditions", "objectSelector", "namespaceSelector", "failurePolicy"}
    assert {key: pods[key] for key in set(pods) - own} == {key: debug[key] for key in set(debug) - own}
    (rule,) = pods["rules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE"], ["pods"])
    assert pods["failurePolicy"] == "Fail"


def test_renamed_resources_are_sent_instead() -> None:
    objects = helm.objects({"resourceName": "example.com/gpu"})
    webhook = hook_of(objects, "pods.vgpu.io")
    expression = webhook["matchConditions"][0]["expression"]
    for resource, sent in (("example.com/gpu", True), ("nvidia.com/gpu", False)):
        created = {"metadata": {}, "spec": {"containers": [gpu(resource)]}}
        assert evaluate(expression, {"request": request("CREATE"), "object": created}) is sent


def test_opting_out_by_label(objects: list[dict[str, Any]]) -> None:
    webhook = hook_of(objects, "pods.vgpu.io")
    for selector in ("objectSelector", "namespaceSelector"):
        terms = webhook[selector]["matchExpressions"]
        assert [term["key"] for term in terms] == list(names.WEBHOOK_LABELS)
        assert all((term["operator"], term["values"]) == ("NotIn", [names.WEBHOOK_IGNORE]) for term in terms)


NO_PLACE = "have no effect as annotations or labels"
NO_GPU = "no container of the pod asks for nvidia.com/gpu"
NO_NAME = "looks like one of vgpu and is none"


@pytest.mark.parametrize(
    ("metadata", "resource", "said"),
    [
        ({}, "cpu", []),
        ({"annotations": {"a": "b"}, "labels": {"c": "d"}}, "nvidia.com/mig-1g.5gb", []),
        ({}, "nvidia.com/gpu.shared", []),
        ({"annotations": {names.RESOURCE_CORES: "30"}}, "cpu", [NO_PLACE]),
        ({"labels": {names.RESOURCE_MEMORY: "3000"}}, "cpu", [NO_PLACE]),
        ({"annotations": {"nvidia.com/gpu-cores": "30"}}, "cpu", [NO_PLACE]),
        ({"labels": {"vgpu.io/gpumem": "3000"}}, "cpu", [NO_PLACE]),
        ({"labels": {"nvidia.com/gpu.memory": "3000", "nvidia.com/gpu.product": "Tesla-T4"}}, "cpu", []),
        ({"annotations": {names.USE_GPU_TYPE: "T4"}}, "cpu", [NO_GPU]),
        ({"annotations": {names.GPU_POLICY: "spread"}}, "cpu", [NO_GPU]),
        ({}, "nvidia.com/gpu-memory", [NO_NAME]),
        ({}, "nvidia.com/gpus", [NO_NAME]),
        ({}, "nvidia.com/vgpu-cores", [NO_NAME]),
        ({}, "vgpu.io/gpumem", [NO_NAME]),
        ({"annotations": {names.RESOURCE_CORES: "30", names.GPU_POLICY: "spread"}}, "nvidia.com/gpucore",
         [NO_PLACE, NO_GPU, NO_NAME]),
        # these requests reach the webhook, which has a better message
        ({"annotations": {names.RESOURCE_CORES: "30"}}, names.RESOURCE_GPU, []),
    ],
)  # fmt: skip
def test_pods_that_seem_to_mean_a_gpu_are_warned_of(
    objects: list[dict[str, Any]], metadata: dict[str, Any], resource: str, said: list[str]
) -> None:
    policy = spec_of(objects, "ValidatingAdmissionPolicy", "vgpu-hints")
    binding = spec_of(objects, "ValidatingAdmissionPolicyBinding", "vgpu-hints")
    assert (policy["failurePolicy"], binding["validationActions"]) == ("Ignore", ["Warn"])  # it never delays a pod
    text = " ".join(rule["expression"] for rule in policy["validations"])
    assert all(f'"{key}"' in text for key in set(strangers.ANNOTATIONS) - set(effects.RESERVED))
    for group in ("containers", "initContainers"):
        spec = {"containers": [PLAIN], group: [gpu(resource)]}
        messages = verdict(policy, request("CREATE"), {"metadata": metadata, "spec": spec})
        assert [part in message for part, message in zip(said, messages, strict=True)] == [True] * len(said)


def test_no_sentence_sends_a_user_to_a_name_without_effect() -> None:
    """Reserved names have no effect: a user who follows such advice waits without effect."""
    reserved = (names.RESIZE, names.POD_GROUP, names.POD_GROUP_MIN)
    chart = [path for path in helm.CHART.rglob("*") if path.is_file()]
    assert [(path.name, name) for path in chart for name in reserved if name in path.read_text()] == []
