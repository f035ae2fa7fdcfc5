"""The chart on clusters of many kinds: virtual nodes, control planes, networks, values of an older chart."""

import contextlib
import json
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from test_chart_release import answers, serve
from tools import helm

from scheduler import __main__ as scheduler_main
from vgpu import chart, names

KUBE_VERSION = ("--kube-version", "v1.34.2")
CONTROL = "node-role.kubernetes.io/control-plane"
PARTS = (("DaemonSet", "vgpu-device-plugin"), ("Deployment", "vgpu-scheduler"), ("Job", "vgpu-clean-up"))


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    return found


def spec(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    found = one(objects, kind, name)["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


def wanted(pod: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a pod may run on a node with these labels, by its required node affinity (terms: one of them)."""
    affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    def meets(rule: dict[str, Any]) -> bool:
        there = labels.get(rule["key"])
        return {
            "NotIn": there not in rule.get("values", ()),
            "DoesNotExist": there is None,
            "Exists": there is not None,
        }[rule["operator"]]

    return any(all(map(meets, term["matchExpressions"])) for term in affinity["nodeSelectorTerms"])


@pytest.fixture(scope="module")
def default() -> list[dict[str, Any]]:
    return helm.objects({}, *KUBE_VERSION)


@pytest.mark.parametrize(
    "labels",
    [
        {"type": "virtual-kubelet", "kubernetes.io/role": "agent"},
        {"eks.amazonaws.com/compute-type": "fargate"},
        {"node.kubernetes.io/instance-type": "eklet"},
        {"liqo.io/type": "virtual-node"},
        {"node-role.kubernetes.io/virtual-node": ""},
        {"type": "kwok"},
    ],
)
def test_nothing_runs_on_virtual_nodes(default: list[dict[str, Any]], labels: dict[str, str]) -> None:
    """Agents there would stay Pending for ever, and no rollout would end."""
    real = {"eks.amazonaws.com/compute-type": "ec2", "node.kubernetes.io/instance-type": "p4d.24xlarge", "type": "gpu"}
    for kind, name in PARTS:
        pod = spec(default, kind, name)
        assert not wanted(pod, labels), kind
        assert wanted(pod, real), kind
        assert wanted(pod, {}), kind


@pytest.mark.parametrize("key", [CONTROL, "node-role.kubernetes.io/master", "node.kubernetes.io/microk8s-controlplane"])
def test_control_planes_are_left_alone_unless_a_value_says_otherwise(key: str, default: list[dict[str, Any]]) -> None:
    both = helm.objects({"global": {"controlPlanes": True}})
    for kind, name in PARTS[:2]:
        assert not wanted(spec(default, kind, name), {key: ""})
        assert wanted(spec(both, kind, name), {key: ""})
        assert not wanted(spec(both, kind, name), {key: "", "type": "virtual-kubelet"})


def test_affinity_of_the_user_replaces_only_its_own_kind() -> None:
    own: dict[str, Any] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    apart: dict[str, Any] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
    objects = helm.objects({"devicePlugin": {"affinity": own}, "scheduler": {"affinity": apart}})
    assert spec(objects, *PARTS[0])["affinity"] == own
    scheduler = spec(objects, *PARTS[1])["affinity"]
    assert scheduler["podAntiAffinity"] == apart["podAntiAffinity"]
    assert not wanted({"affinity": scheduler}, {CONTROL: ""})


def test_two_schedulers_keep_apart_where_they_can(default: list[dict[str, Any]]) -> None:
    deployment = one(default, "Deployment", "vgpu-scheduler")["spec"]
    assert deployment["replicas"] == 2
    rules = deployment["template"]["spec"]["affinity"]["podAntiAffinity"]
    assert list(rules) == ["preferredDuringSchedulingIgnoredDuringExecution"], "one node is enough for both"
    (terms,) = rules.values()
    assert {term["podAffinityTerm"]["topologyKey"] for term in terms} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    assert all(term["podAffinityTerm"]["labelSelector"] == deployment["selector"] for term in terms)
    assert one(default, "PodDisruptionBudget", "vgpu-scheduler")["spec"]["maxUnavailable"] == 1


def test_on_the_network_of_the_node_with_other_ports() -> None:
    ports = {"webhook": 10250, "metrics": 11001, "health": 11002, "extender": 11003, "kubeScheduler": 11004}
    objects = helm.objects({"scheduler": {"hostNetwork": True, "ports": ports}})
    pod = spec(objects, "Deployment", "vgpu-scheduler")
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    beside, kube_scheduler = pod["containers"]
    found = scheduler_main.arguments(beside["args"])
    assert found.webhook_port == ports["webhook"]
    assert found.metrics_port == ports["metrics"]
    assert found.health_port == ports["health"]
    assert found.extender_port == ports["extender"]
    assert found.kube_scheduler_port == ports["kubeScheduler"]
    assert f"--secure-port={ports['kubeScheduler']}" in kube_scheduler["args"]
    open_ports = [one["containerPort"] for container in pod["containers"] for one in container["ports"]]
    assert sorted(open_ports) == sorted(set(ports.values()) - {ports["extender"]})
    text = one(objects, "ConfigMap", "vgpu-scheduler")["data"]["kube-scheduler.yaml"]
    assert f"http://127.0.0.1:{ports['extender']}" in text
    asked = [
        container[probe]["httpGet"]["port"]
        for container in pod["containers"]
        for probe in container
        if "Probe" in probe
    ]
    named = {one["name"] for container in pod["containers"] for one in container["ports"]}
    assert {port for port in asked if isinstance(port, int)} <= set(ports.values())
    assert {port for port in asked if isinstance(port, str)} <= named
    # The node's ports are taken as long as the old pod runs.
    strategy = one(objects, "Deployment", "vgpu-scheduler")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    webhook = one(objects, "MutatingWebhookConfiguration", "vgpu-scheduler")["webhooks"][0]
    assert webhook["clientConfig"]["service"]["port"] == 443, "the Service's port, behind which any port may be"


def test_an_outage_may_let_pods_be_created_but_no_debug_container_see_cards() -> None:
    hooks = one(
        helm.objects({"scheduler": {"failurePolicy": "Ignore"}}), "MutatingWebhookConfiguration", "vgpu-scheduler"
    )
    assert {hook["name"]: hook["failurePolicy"] for hook in hooks["webhooks"]} == {
        "pods.vgpu.io": "Ignore",
        "debug.vgpu.io": "Fail",
    }


@pytest.mark.parametrize(
    ("values", "value"),
    [
        ({"image": {"registry": ""}}, "image.registry"),
        ({"image": {"registry": "", "digest": f"sha256:{'0' * 64}"}}, "image.registry"),
        ({"scheduler": {"kubeScheduler": {"image": {"registry": ""}}}}, "scheduler.kubeScheduler.image.registry"),
    ],
)
def test_an_image_without_a_registry_is_refused(values: dict[str, Any], value: str) -> None:
    with pytest.raises(helm.Refused) as error:
        helm.render(values)
    assert f"{value} is empty: name the registry" in str(error.value)
    assert "anybody may own that name" in str(error.value)
    assert helm.render({**values, "global": {"imageRegistry": "registry.example.com"}})


def test_no_name_of_an_image_is_claimed_anywhere() -> None:
    root = helm.CHART.parents[1]
    files = [*helm.CHART.rglob("*"), *(root / "docs").glob("*.md"), root / "README.md"]
    assert [str(file) for file in files if file.is_file() and "vgpu/vgpu:" in file.read_text()] == []


SECTIONS = [".".join(path) for path, *_ in chart.sections(chart.Values(), ()) if path]


def without(path: str) -> dict[str, Any]:
    """Values without a section, as in a chart that did not have it yet: null removes it."""
    values: Any = None
    for key in reversed(path.split(".")):
        values = {key: values}
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize("path", [path for path in SECTIONS if path != "image"])
def test_values_of_an_older_chart_get_the_defaults_of_a_section(path: str, default: list[dict[str, Any]]) -> None:
    """`helm upgrade --reuse-values`: only the values of the old release exist."""
    assert helm.objects(without(path), *KUBE_VERSION) == default


def test_values_of_an_older_chart_get_the_default_of_every_single_value(default: list[dict[str, Any]]) -> None:
    values: dict[str, Any] = {}
    for path, single, _ in chart.sections(chart.Values(), ()):
        at = values
        for key in path:
            at = at.setdefault(key, {})
        at.update(dict.fromkeys(single))
    values["image"]["registry"] = helm.REGISTRY
    assert helm.objects(values, *KUBE_VERSION) == default


def test_an_upgrade_that_reuses_the_values_of_a_real_older_chart(tmp_path: Path, default: list[dict[str, Any]]) -> None:
    """Helm then uses the old release's values, including its chart's defaults, in place of the new chart's values."""
    shutil.copytree(helm.CHART, tmp_path / "vgpu")
    before = helm.CHART.parents[1] / "tests" / "data" / "chart" / "values-before-ports.yaml"
    shutil.copyfile(before, tmp_path / "vgpu" / "values.yaml")
    command = ("template", "vgpu", str(tmp_path / "vgpu"), "-n", "kube-system", *KUBE_VERSION)
    with pytest.raises(helm.Refused, match=r"image\.registry is empty: name the registry"):
        helm.run(*command)
    text = helm.run(*command, "--set", f"image.registry={helm.REGISTRY}")
    found = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(text) if item}
    deployment = found["Deployment", "vgpu-scheduler"]["spec"]
    assert deployment["replicas"] == 1, "what the old chart said stays"
    assert deployment["template"]["spec"]["containers"][0]["image"] == f"{helm.REGISTRY}/vgpu/vgpu:0.1.0"
    # Values that the old chart did not have are the defaults.
    now = {(item["kind"], item["metadata"]["name"]): item for item in default}
    for key in (("MutatingWebhookConfiguration", "vgpu-scheduler"), ("ConfigMap", "vgpu-scheduler")):
        assert found[key] == now[key]
    assert set(now) - set(found) == {("PodDisruptionBudget", "vgpu-scheduler")}, "with one replica"


def test_null_still_takes_away_what_it_always_did() -> None:
    objects = helm.objects({"devicePlugin": {"resources": None, "service": {"httpPort": None}, "tolerations": None}})
    pod = spec(objects, "DaemonSet", "vgpu-device-plugin")
    assert "resources" not in pod["containers"][0]
    assert "tolerations" not in pod
    assert "nodePort" not in one(objects, "Service", "vgpu-device-plugin-metrics")["spec"]["ports"][0]


def test_false_and_zero_of_an_older_chart_stay() -> None:
    """They must not count as missing."""
    objects = helm.objects(
        {"networkPolicy": {"enabled": False}, "devicePlugin": {"recoverySeconds": 0, "cleanUp": False}}
    )
    kinds = {item["kind"] for item in objects}
    assert not {"NetworkPolicy", "Job"} & kinds
    assert "recoverySeconds: 0" in one(objects, "ConfigMap", "vgpu")["data"]["config.yaml"]


def test_every_template_completes_its_values_first() -> None:
    """Helm renders templates in any order."""
    templates = [path for path in (helm.CHART / "templates").rglob("*") if path.is_file()]
    assert len(templates) > 15
    for path in templates:
        if not path.name.startswith("_"):
            before, _, _ = path.read_text().partition(".Values")
            assert '{{- include "vgpu.complete" . ' in before, path.name


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    """`render(nodes, values)`: the chart as Helm renders it for an API server with these nodes."""

    def render(nodes: dict[str, dict[str, str]], values: dict[str, Any]) -> str:
        items = [
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
            for name, labels in nodes.items()
        ]
        objects = [*helm.objects(), {"apiVersion": "v1", "kind": "Node"}]
        known = answers(objects, [])
        known["/api/v1/nodes"] = {"apiVersion": "v1", "kind": "NodeList", "metadata": {}, "items": items}
        with serve(known, tmp_path) as kubeconfig:
            where = ("--kubeconfig", str(kubeconfig), "--dry-run=server", "--disable-openapi-validation", "-f", "-")
            return helm.run("template", "vgpu", str(helm.CHART), *where, stdin=json.dumps(helm.pulled(values)))

    return render


def service(name: str, port: int, namespace: str = "hami-system") -> dict[str, Any]:
    spec = {"type": "NodePort", "ports": [{"port": 1, "nodePort": port}, {"port": 2}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


@pytest.mark.parametrize(
    ("there", "values", "setting"),
    [
        (service("hami-device-plugin-monitor", 31992), {}, "devicePlugin.service.httpPort"),
        (service("hami-scheduler", 31993), {}, "scheduler.service.monitorPort"),
        (service("vgpu-scheduler-metrics", 31993, "elsewhere"), {}, "scheduler.service.monitorPort"),
        (service("x", 32000), {"devicePlugin": {"service": {"httpPort": 32000}}}, "devicePlugin.service.httpPort"),
        (service("vgpu-device-plugin-metrics", 31992, "default"), {}, ""),
        (service("x", 31992), {"devicePlugin": {"service": {"httpPort": None}}}, ""),
        (service("x", 31993), {"scheduler": {"service": {"type": "ClusterIP"}}}, ""),
        (service("x", 31994), {}, ""),
    ],
)
def test_node_ports_that_another_service_has_are_told(
    tmp_path: Path, there: dict[str, Any], values: dict[str, Any], setting: str
) -> None:
    """4paradigm's and HAMi's charts have the same defaults, and may be left behind or still run."""
    known = answers(helm.objects(), [])
    known["/api/v1/services"] = {"apiVersion": "v1", "kind": "ServiceList", "metadata": {}, "items": [there]}
    with serve(known, tmp_path) as kubeconfig:
        where = ("--kubeconfig", str(kubeconfig), "--dry-run=server", "--disable-openapi-validation", "-f", "-")
        command = ("template", "vgpu", str(helm.CHART), *where)
        if not setting:
            assert "kind: DaemonSet" in helm.run(*command, stdin=json.dumps(helm.pulled(values)))
            return
        with pytest.raises(helm.Refused) as error:
            helm.run(*command, stdin=json.dumps(helm.pulled(values)))
    name = f"{there['metadata']['namespace']}/{there['metadata']['name']}"
    assert f"is that of Service {name} already" in str(error.value)
    assert f"set {setting} to another one, or to null" in str(error.value)


def test_notes_name_other_device_plugins_of_the_cluster(tmp_path: Path) -> None:
    objects = helm.objects()
    known = answers(objects, [])
    sets = [
        ("gpu-operator", "nvidia-device-plugin-daemonset"),
        ("kube-system", "kube-proxy"),
        ("default", "vgpu-device-plugin"),
    ]
    known["/apis/apps/v1/daemonsets"] = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSetList",
        "metadata": {},
        "items": [
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"namespace": namespace, "name": name}}
            for namespace, name in sets
        ],
    }
    with serve(known, tmp_path) as kubeconfig:
        where = ("--kubeconfig", str(kubeconfig), "--dry-run=server", "--disable-openapi-validation", "-f", "-")
        command = ("install", "vgpu", str(helm.CHART), *where)
        output = helm.run(*command, stdin=json.dumps(helm.pulled()))
    notes = output[output.index("NOTES:") :]
    assert "Other device plugins are in this cluster: gpu-operator/nvidia-device-plugin-daemonset." in notes
    assert "global.controlPlanes" in notes


PLANE, WORKER = {CONTROL: ""}, {"kubernetes.io/os": "linux"}


@pytest.mark.parametrize(
    ("nodes", "values", "sentence"),
    [
        ({"a": PLANE}, {}, "every node of this cluster is a control plane (a), and the chart leaves these alone"),
        ({"a": PLANE, "b": {"node.kubernetes.io/microk8s-controlplane": "x"}}, {}, "is a control plane (a, b)"),
        ({"a": {**PLANE, names.LABEL_PRESENT: "true"}, "b": WORKER}, {}, "the cards of a are shared"),
        ({"a": PLANE}, {"global": {"controlPlanes": True}}, ""),
        ({"a": PLANE}, {"devicePlugin": {"affinity": {"nodeAffinity": {}}}}, ""),
        ({"a": PLANE, "b": WORKER}, {}, ""),
        ({"b": {}}, {}, ""),
    ],
)
def test_control_planes_that_are_needed_are_not_left_out_silently(
    cluster: Any, nodes: dict[str, dict[str, str]], values: dict[str, Any], sentence: str
) -> None:
    if not sentence:
        assert "kind: DaemonSet" in cluster(nodes, values)
        return
    with pytest.raises(helm.Refused) as error:
        cluster(nodes, values)
    assert sentence in str(error.value)
    assert "set global.controlPlanes=true" in str(error.value)


def test_defaults_are_the_types(default: list[dict[str, Any]]) -> None:
    assert default
    found = {".".join(path): single | rest for path, single, rest in chart.sections(chart.Values(), ())}
    assert found["scheduler.ports"] == msgspec.to_builtins(chart.SchedulerPorts())


OPENSHIFT = ("--api-versions", "security.openshift.io/v1")


def test_openshift_lets_every_account_use_the_constraints_that_its_pods_need() -> None:
    objects = helm.objects({}, "-n", "gpu", *OPENSHIFT)
    bound = {
        item["subjects"][0]["name"]: item["roleRef"]["name"].removeprefix("system:openshift:scc:")
        for item in objects
        if item["kind"] == "RoleBinding" and item["roleRef"]["name"].startswith("system:openshift:scc:")
    }
    accounts = {item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"}
    assert set(bound) == accounts
    for kind, name in PARTS:
        pod = spec(objects, kind, name)
        containers = [*pod["containers"], *pod.get("initContainers", ())]
        privileged = any(container["securityContext"].get("privileged") for container in containers)
        assert bound[pod["serviceAccountName"]] == ("privileged" if privileged else "nonroot-v2")
        # What nonroot-v2 wants: no root, all capabilities dropped, seccomp of the runtime.
        assert privileged or pod["securityContext"]["runAsNonRoot"]
    hook = one(objects, "RoleBinding", "vgpu-clean-up-scc")["metadata"]["annotations"]
    assert hook["helm.sh/hook"] == "pre-delete"
    assert int(hook["helm.sh/hook-weight"]) < 0, "before the Job"


def test_elsewhere_there_is_nothing_of_openshift(default: list[dict[str, Any]]) -> None:
    assert "openshift" not in json.dumps(default)


def test_critical_pods_outside_kube_system_have_the_quota_that_gke_asks_for(default: list[dict[str, Any]]) -> None:
    assert not [item for item in default if item["kind"] == "ResourceQuota"], "kube-system has one of its own"
    objects = helm.objects({}, "-n", "gpu", "--kube-version", "v1.33.5-gke.1308000")
    quota = one(objects, "ResourceQuota", "vgpu-critical")
    (rule,) = quota["spec"]["scopeSelector"]["matchExpressions"]
    used = {spec(objects, kind, name)["priorityClassName"] for kind, name in PARTS[:2]}
    assert (rule["scopeName"], rule["operator"], set(rule["values"])) == ("PriorityClass", "In", used)
    assert quota["metadata"]["namespace"] == "gpu"
    plain = {"scheduler": {"priorityClassName": ""}, "devicePlugin": {"priorityClassName": "mine"}}
    assert not [item for item in helm.objects(plain, "-n", "gpu") if item["kind"] == "ResourceQuota"]


def test_nothing_is_bound_to_one_family_of_addresses(default: list[dict[str, Any]]) -> None:
    """On an IPv6-only cluster, Services have its family, listeners accept both families, and only the loopback has an
    address.
    """
    for item in default:
        if item["kind"] == "Service":
            assert not {"ipFamilies", "ipFamilyPolicy", "clusterIP"} & set(item["spec"])
        text = json.dumps(item)
        assert set(re.findall(r"\d+\.\d+\.\d+\.\d+", text)) <= {"127.0.0.1"}
    for kind, name in PARTS[:2]:
        for container in spec(default, kind, name)["containers"]:
            assert not [flag for flag in container.get("args", ()) if "address" in flag]
            for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
                assert "host" not in container.get(probe, {}).get("httpGet", {})


def test_listeners_take_connections_of_both_families() -> None:
    """Listeners listen on this address by default, and the chart sets no other."""
    address = scheduler_main.arguments(["--config=x"]).webhook_address
    family = socket.AF_INET6 if address == "::" else socket.AF_INET
    assert (address == "::") is socket.has_dualstack_ipv6()
    server = (
        socket.create_server((address, 0), family=family, dualstack_ipv6=True)
        if family == socket.AF_INET6
        else socket.create_server((address, 0))
    )
    with server:
        hosts = ["127.0.0.1"]
        with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
            hosts.append("::1")  # this machine has an address of that family
        for host in hosts if family == socket.AF_INET6 else hosts[:1]:
            socket.create_connection((host, server.getsockname()[1]), timeout=5).close()


@pytest.mark.parametrize("page", ["platforms.md", "migration.md", "install.md", "troubleshooting.md"])
def test_values_that_a_page_names_exist(page: str) -> None:
    text = (helm.CHART.parents[1] / "docs" / page).read_text()
    theirs = {"devicePlugin.enabled"}  # of the GPU operator's ClusterPolicy
    known = {".".join(path) for path, *_ in chart.sections(chart.Values(), ())}
    known |= {
        ".".join((*path, name)) for path, single, rest in chart.sections(chart.Values(), ()) for name in single | rest
    }
    named = set(
        re.findall(r"\b((?:global|scheduler|devicePlugin|image|monitoring|networkPolicy)(?:\.[a-z]\w+)+)", text)
    )
    assert named
    for name in named - theirs:
        if name.startswith("image.") and name.endswith((".so", ".tar")):
            continue
        assert any(name == one or name.startswith(f"{one}.") for one in known if "." in one or one == name), name


def test_the_first_step_of_a_migration_leaves_every_node_alone_that_has_no_label(default: list[dict[str, Any]]) -> None:
    objects = helm.objects({}, "--set", "devicePlugin.nodeSelector.vgpu=on")
    assert spec(objects, *PARTS[0])["nodeSelector"] == {"kubernetes.io/os": "linux", "vgpu": "on"}
    last = helm.objects({"devicePlugin": {"nodeSelector": {"vgpu": "on"}}}, "--set", "devicePlugin.nodeSelector=null")
    assert spec(last, *PARTS[0])["nodeSelector"] == spec(default, *PARTS[0])["nodeSelector"]


def test_null_in_place_of_any_list_or_map_is_none_of_it() -> None:
    values: dict[str, Any] = {}
    for path, single, rest in chart.sections(chart.Values(), ()):
        at = values
        for key in path:
            at = at.setdefault(key, {})
        at.update(dict.fromkeys(rest))
        assert single or rest
    values["image"]["registry"] = helm.REGISTRY
    values["monitoring"] |= {"podMonitor": True, "prometheusRule": True}
    values["scheduler"]["certManager"]["enabled"] = True
    assert spec(helm.objects(values), *PARTS[0])["nodeSelector"] == {"kubernetes.io/os": "linux"}
