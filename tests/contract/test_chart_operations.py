"""The operational side of the chart: images, confinement, clean-up, operators of other projects."""

from typing import Any

import pytest
import yaml
from tools import helm

from device_plugin import cleanup, serving
from scheduler import __main__ as scheduler_main
from scheduler import kube_scheduler_liveness
from vgpu import names

KUBE_VERSION = ("--kube-version", "v1.34.2")
DIGEST = f"sha256:{'0123456789abcdef' * 4}"


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def pod_specs(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kind → spec of every pod that the chart makes."""
    kinds = ("DaemonSet", "Deployment", "Job", "Pod")
    found = {item["kind"]: item["spec"].get("template", item) for item in objects if item["kind"] in kinds}
    assert set(found) == set(kinds)
    return {kind: template["spec"] for kind, template in found.items()}


@pytest.fixture(scope="module")
def default() -> list[dict[str, Any]]:
    return helm.objects({}, *KUBE_VERSION)


def test_every_container_is_confined(default: list[dict[str, Any]]) -> None:
    for kind, spec in pod_specs(default).items():
        for item in spec["containers"]:
            context = item["securityContext"]
            assert context["readOnlyRootFilesystem"], kind
            if kind == "DaemonSet":  # privileged: seccomp and capabilities do not apply
                assert context["privileged"]
                continue
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert spec["securityContext"]["runAsNonRoot"]
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_pull_secrets_reach_every_pod() -> None:
    secrets = [{"name": "mirror"}]
    for kind, spec in pod_specs(helm.objects({"imagePullSecrets": secrets})).items():
        assert spec["imagePullSecrets"] == secrets, kind


def test_no_list_names_a_variable_twice(default: list[dict[str, Any]]) -> None:
    """Server-side apply refuses a container with two variables of one name."""
    for spec in pod_specs(default).values():
        for item in spec["containers"]:
            named = [variable["name"] for variable in item.get("env", ())]
            assert len(named) == len(set(named))


def test_only_webhook_and_metrics_can_be_reached(default: list[dict[str, Any]]) -> None:
    open_ports = {}
    for item in default:
        if item["kind"] == "NetworkPolicy":
            component = item["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            rule = item["spec"]["ingress"][0]
            assert "from" not in rule
            open_ports[component] = [port["port"] for port in rule["ports"]]
    assert open_ports == {"scheduler": ["webhook", "metrics"], "device-plugin": ["metrics"]}


@pytest.mark.parametrize("host_network", [False, True])
def test_schedulers_reach_the_port_on_which_agents_say_whether_they_serve(host_network: bool) -> None:
    """On the node's own network, a scheduler has its node's address, which no selector of pods finds."""
    objects = helm.objects({"scheduler": {"hostNetwork": host_network}})
    policy = one(objects, "NetworkPolicy", "vgpu-device-plugin")
    container = one(objects, "DaemonSet", "vgpu-device-plugin")["spec"]["template"]["spec"]["containers"][0]
    rule = policy["spec"]["ingress"][1]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    found = scheduler_main.arguments(pod_specs(objects)["Deployment"]["containers"][0]["args"])
    assert [ports[port["port"]] for port in rule["ports"]] == [found.agent_port]
    schedulers = one(objects, "Deployment", "vgpu-scheduler")["spec"]["selector"]
    assert rule.get("from") == (None if host_network else [{"podSelector": schedulers}])
    assert len(one(objects, "NetworkPolicy", "vgpu-scheduler")["spec"]["ingress"]) == 1


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_drain_takes_one_scheduler_at_a_time_and_never_waits_for_the_only_one(replicas: int) -> None:
    objects = helm.objects({"scheduler": {"replicas": replicas}})
    budgets = [item["spec"] for item in objects if item["kind"] == "PodDisruptionBudget"]
    assert [budget["maxUnavailable"] for budget in budgets] == ([1] if replicas > 1 else [])
    labels = one(objects, "Deployment", "vgpu-scheduler")["spec"]["selector"]
    assert all(budget["selector"] == labels for budget in budgets)


def test_helm_test_is_a_pod_with_a_slice(default: list[dict[str, Any]]) -> None:
    found = one(default, "Pod", "vgpu-test")
    assert found["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (probe,) = found["spec"]["containers"]
    limits = probe["resources"]["limits"]
    assert limits[names.RESOURCE_GPU] == 1
    assert f"--expect-memory={limits[names.RESOURCE_MEMORY]}" in probe["command"]


def test_clean_up_is_told_what_the_chart_made() -> None:
    objects = helm.objects({"devicePlugin": {"nodeSelector": {"gpu": "true"}}})
    (container,) = pod_specs(objects)["Job"]["containers"]
    assert container["command"] == ["python3", "-m", cleanup.__name__]
    found = cleanup.arguments(container["args"])
    agents = one(objects, "DaemonSet", found.daemonset)
    assert (found.namespace, str(found.config)) == (agents["metadata"]["namespace"], names.CONFIG_PATH)
    labels = dict(part.split("=") for part in found.selector.split(","))
    assert labels == agents["spec"]["selector"]["matchLabels"]
    nodes = dict(part.split("=") for part in found.node_selector.split(","))
    assert nodes == agents["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux", "gpu": "true"}
    hooks = [item for item in objects if item["metadata"]["name"] == "vgpu-clean-up"]
    weights = {item["kind"]: int(item["metadata"]["annotations"]["helm.sh/hook-weight"]) for item in hooks}
    assert max(weights, key=lambda kind: weights[kind]) == "Job"
    assert {item["metadata"]["annotations"]["helm.sh/hook"] for item in hooks} == {"pre-delete"}
    roles = [rule for item in hooks for rule in item.get("rules", ())]
    assert {(verb, resource) for rule in roles for verb in rule["verbs"] for resource in rule["resources"]} == {
        ("list", "nodes"),
        ("patch", "nodes"),
        ("patch", "nodes/status"),
        ("list", "pods"),
        ("delete", "daemonsets"),
    }


def as_admitted(tolerations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds what the API server's DefaultTolerationSeconds adds where a pod says nothing about taints of nodes that are
    down.
    """
    found = list(tolerations)
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if not any(t.get("key") in (None, key) and t.get("effect") in (None, "NoExecute") for t in tolerations):
            found.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})
    return found


def tolerated(tolerations: list[dict[str, Any]], key: str, effect: str) -> bool:
    """Whether a pod's `tolerations` tolerate a taint without a value."""
    return any(
        t.get("key") in (None, key)
        and t.get("effect") in (None, effect)
        and (t.get("operator") == "Exists" or t.get("value", "") == "")
        for t in tolerations
    )


@pytest.mark.parametrize(("kind", "part"), [("Job", "scheduler"), ("Pod", "devicePlugin")])
def test_hooks_run_on_no_node_that_is_down(default: list[dict[str, Any]], kind: str, part: str) -> None:
    found = as_admitted(pod_specs(default)[kind]["tolerations"])
    assert tolerated(found, "nvidia.com/gpu", "NoSchedule")
    assert tolerated(found, "node.kubernetes.io/unreachable", "NoSchedule")
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "ours"):
        assert not tolerated(found, key, "NoExecute")
    own = [{"operator": "Exists"}, {"key": "ours", "operator": "Exists", "effect": "NoExecute"}]
    found = as_admitted(pod_specs(helm.objects({part: {"tolerations": own}}))[kind]["tolerations"])
    assert tolerated(found, "ours", "NoExecute")
    assert not tolerated(found, "node.kubernetes.io/unreachable", "NoExecute")


@pytest.mark.parametrize("issuer", [{}, {"name": "ours", "kind": "ClusterIssuer"}])
def test_cert_manager_in_place_of_an_own_authority(issuer: dict[str, str]) -> None:
    objects = helm.objects({"scheduler": {"certManager": {"enabled": True, "issuerRef": issuer}}})
    certificate = one(objects, "Certificate", "vgpu-scheduler")["spec"]
    assert "vgpu-scheduler.kube-system.svc" in certificate["dnsNames"]
    assert certificate["issuerRef"] == (issuer or {"name": "vgpu-scheduler", "kind": "Issuer"})
    own = [item["metadata"]["name"] for item in objects if item["kind"] == "Issuer"]
    assert own == ([] if issuer else ["vgpu-scheduler-root", "vgpu-scheduler"])
    webhook = one(objects, "MutatingWebhookConfiguration", "vgpu-scheduler")
    assert webhook["metadata"]["annotations"]["cert-manager.io/inject-ca-from"] == "kube-system/vgpu-scheduler"
    scheduler = next(c for c in pod_specs(objects)["Deployment"]["containers"] if c["name"] == "vgpu-scheduler")
    found = scheduler_main.arguments(scheduler["args"])
    assert found.foreign_certificate
    assert found.tls_secret == ("kube-system", certificate["secretName"])
    rights = [
        (rule["resources"][0], rule["verbs"])
        for item in objects
        if item["kind"] in ("Role", "ClusterRole") and item["metadata"]["name"] == "vgpu-scheduler"
        for rule in item["rules"]
    ]
    assert [verbs for resource, verbs in rights if resource == "secrets"] == [["get"]]
    assert "mutatingwebhookconfigurations" not in dict(rights)


def test_cert_manager_renews_the_certificate_and_keeps_the_authority() -> None:
    """The authority is injected into the webhook: a self-signed certificate would change with each renewal."""
    objects = helm.objects({"scheduler": {"certManager": {"enabled": True}}})
    serving, authority = (one(objects, "Certificate", f"vgpu-scheduler{end}")["spec"] for end in ("", "-authority"))
    signer = one(objects, "Issuer", serving["issuerRef"]["name"])["spec"]
    assert signer == {"ca": {"secretName": authority["secretName"]}}
    assert authority["secretName"] != serving["secretName"]
    assert authority["isCA"]
    assert "isCA" not in serving
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    assert one(objects, "Issuer", authority["issuerRef"]["name"])["spec"] == {"selfSigned": {}}
    spare = int(authority["renewBefore"].removesuffix("h"))
    assert spare > 90 * 24, "more than what it signs is valid, which is cert-manager's default of 90 days"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_kube_scheduler_makes_room_for_one_whose_extender_answers(replicas: int) -> None:
    """Only where there is another replica; a single kube-scheduler would only be restarted with longer and longer
    pauses.
    """
    beside, kube_scheduler = pod_specs(helm.objects({"scheduler": {"replicas": replicas}}))["Deployment"]["containers"]
    assert beside["name"] == "vgpu-scheduler", "first: kube-scheduler is not started, and probed, while its image comes"
    port = next(one["containerPort"] for one in kube_scheduler["ports"] if one["name"] == "https")
    assert scheduler_main.arguments(beside["args"]).kube_scheduler_port == port
    own = {"path": "/healthz", "port": "https", "scheme": "HTTPS"}
    asked = {"path": kube_scheduler_liveness.PATH, "port": names.PORT_SCHEDULER_HEALTH}
    assert kube_scheduler["startupProbe"]["httpGet"] == own
    assert kube_scheduler["livenessProbe"]["httpGet"] == (own if replicas == 1 else asked)
    waits = kube_scheduler["livenessProbe"].get("timeoutSeconds", 1)
    assert replicas == 1 or waits > 2 * kube_scheduler_liveness.ANSWER_SECONDS


def test_alerts_ask_for_metrics_that_exist() -> None:
    rule = one(helm.objects({"monitoring": {"prometheusRule": True}}), "PrometheusRule", "vgpu")
    reference = (helm.CHART.parents[1] / "docs" / "reference.md").read_text()
    for alert in rule["spec"]["groups"][0]["rules"]:
        (metric,) = [word for word in alert["expr"].replace("(", " ").replace("{", " ").split() if "vgpu_" in word]
        assert f"`{metric}`" in reference, alert


def test_an_agent_is_asked_whether_it_is_ready() -> None:
    (agent,) = pod_specs(helm.objects())["DaemonSet"]["containers"]
    assert agent["readinessProbe"]["httpGet"] == {"path": serving.READY, "port": "health"}


@pytest.mark.parametrize(
    ("cluster", "tag"),
    [
        ("v1.34.2", "v1.34.2"),
        ("v1.32.3-eks-7f9249a", "v1.32.3"),
        ("v1.31.5+k3s1", "v1.31.5"),
        ("v1.30.5-gke.1014001", "v1.30.5"),
    ],
)
def test_kube_scheduler_has_the_version_of_the_cluster(cluster: str, tag: str) -> None:
    objects = helm.objects({}, "--kube-version", cluster)
    assert f"registry.k8s.io/kube-scheduler:{tag}" in images(objects)


def images(objects: list[dict[str, Any]]) -> set[str]:
    return {item["image"] for spec in pod_specs(objects).values() for item in spec["containers"]}


def test_registry_override_holds_for_every_image() -> None:
    objects = helm.objects({"global": {"imageRegistry": "registry.example.com/mirror/"}}, *KUBE_VERSION)
    assert sorted(images(objects)) == [
        "registry.example.com/mirror/kube-scheduler:v1.34.2",
        "registry.example.com/mirror/vgpu:0.1.0",
    ]


def test_a_digest_stands_in_place_of_the_tag() -> None:
    named = {"digest": DIGEST, "tag": "9"}
    objects = helm.objects({"image": named, "scheduler": {"kubeScheduler": {"image": named}}})
    assert images(objects) == {f"registry.example.com/vgpu@{DIGEST}", f"registry.k8s.io/kube-scheduler@{DIGEST}"}


def test_artifact_hub_is_told_no_image_since_there_is_none_of_ours() -> None:
    notes = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())["annotations"]
    assert "artifacthub.io/images" not in notes
    assert notes["artifacthub.io/license"] == "Apache-2.0"
