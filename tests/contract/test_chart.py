"""The chart as Helm renders it: valid for every supported Kubernetes, and every value reaches its place."""

from configparser import ConfigParser
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from tools import helm

from device_plugin import __main__ as agent_main
from scheduler import __main__ as scheduler_main
from vgpu import chart, config, names

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
KUBE_VERSION = ("--kube-version", "v1.34.2")
OTHER_NAMES = {
    "resourceName": "example.com/gpu",
    "resourceMem": "example.com/gpumem",
    "resourceMemPercentage": "example.com/gpumem-percentage",
    "resourceCores": "example.com/gpucores",
    "resourcePriority": "example.com/priority",
    "schedulerName": "second-scheduler",
}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "other names": OTHER_NAMES,
    "simulated": {"simulate": "T4x2"},
    "air-gapped": {
        "global": {"imageRegistry": "registry.example.com/mirror/", "gpuHookPath": "/opt"},
        "imagePullSecrets": [{"name": "mirror"}],
    },
    "assigned node ports": {
        "devicePlugin": {"service": {"httpPort": None}},
        "scheduler": {"service": {"monitorPort": None}},
    },
    "inside the cluster only": {
        "devicePlugin": {"service": {"type": "ClusterIP"}},
        "scheduler": {"service": {"type": "ClusterIP"}},
    },
    "placed": {
        "devicePlugin": {
            "runtimeClassName": "nvidia",
            "kubeletRoot": "/var/lib/k0s/kubelet",
            "nodeSelector": {"gpu": "true"},
            "affinity": {"nodeAffinity": {}},
            "tolerations": [],
            "priorityClassName": "",
            "podAnnotations": {"note": "agent"},
            "resources": {},
        },
        "scheduler": {
            "replicas": 3,
            "nodeSelector": {"role": "control"},
            "affinity": {"podAntiAffinity": {}},
            "tolerations": [{"key": "control", "operator": "Exists"}],
            "priorityClassName": "",
            "podAnnotations": {"note": "scheduler"},
            "resources": {},
            "kubeScheduler": {"resources": {}},
        },
    },
    "operators": {
        "scheduler": {"certManager": {"enabled": True}},
        "monitoring": {"podMonitor": True, "prometheusRule": True, "labels": {"release": "prometheus"}},
    },
    "bare": {
        "networkPolicy": {"enabled": False},
        "devicePlugin": {"cleanUp": False, "updateStrategy": {}},
        "scheduler": {"updateStrategy": {}, "certManager": {"enabled": True, "issuerRef": {"name": "ours"}}},
    },
    "beside another release": {
        "fullnameOverride": "gpu-b",
        "otherReleases": [{"namespace": "kube-system", "fullname": "vgpu"}],
    },
}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
#: types of other projects' operators, which have no schema here
FOREIGN = ("cert-manager.io/v1", "monitoring.coreos.com/v1")
#: for every value of the chart: a value other than the default
CHANGED: dict[str, Any] = {
    **OTHER_NAMES,
    "corePolicy": "none",
    "simulate": "T4x2",
    "global.gpuHookPath": "/opt",
    "global.imageRegistry": "other.example.com",
    "global.controlPlanes": True,
    "scheduler.defaultMem": 16_777_216,
    "scheduler.defaultCores": 30,
    "scheduler.nodePolicy": "binpack",
    "scheduler.gpuPolicy": "binpack",
    "scheduler.privileged": "allow",
    "scheduler.visibleDevices": "override",
    "scheduler.foreignScheduler": "allow",
    "scheduler.reconcileSeconds": 5,
    "scheduler.replicas": 3,
    "scheduler.failurePolicy": "Ignore",
    "scheduler.hostNetwork": True,
    "scheduler.ports.webhook": 10_250,
    "scheduler.ports.metrics": 10_001,
    "scheduler.ports.health": 10_002,
    "scheduler.ports.extender": 10_003,
    "scheduler.ports.kubeScheduler": 10_359,
    "scheduler.kubeScheduler.image.registry": "registry.example.com",
    "scheduler.kubeScheduler.image.repository": "other-scheduler",
    "scheduler.kubeScheduler.image.tag": "v1.33.0",
    "scheduler.kubeScheduler.image.pullPolicy": "Always",
    "scheduler.kubeScheduler.image.digest": DIGEST,
    "scheduler.kubeScheduler.resources": {"limits": {"cpu": "2"}},
    "scheduler.service.type": "ClusterIP",
    "scheduler.service.monitorPort": 32_000,
    "scheduler.resources": {"limits": {"cpu": "2"}},
    "scheduler.nodeSelector": {"role": "control"},
    "scheduler.affinity": {"podAntiAffinity": {}},
    "scheduler.tolerations": [{"operator": "Exists"}],
    "scheduler.priorityClassName": "mine",
    "scheduler.podAnnotations": {"note": "x"},
    "scheduler.updateStrategy": {"type": "Recreate", "rollingUpdate": None},
    "scheduler.certManager.enabled": True,
    "scheduler.certManager.issuerRef": {"name": "ours", "kind": "ClusterIssuer"},
    "devicePlugin.deviceSplitCount": 4,
    "devicePlugin.deviceMemoryScaling": 1.5,
    "devicePlugin.deviceMemoryScalingByModel": {"T4": 2},
    "devicePlugin.hostMemory": "64Gi",
    "devicePlugin.memoryMode": "movable",
    "devicePlugin.fillsOn": "engine",
    "devicePlugin.copiesOn": "sms",
    "devicePlugin.nodeOverrides": {"big-*": {"hostMemory": 100_000}},
    "devicePlugin.deviceCoreScaling": 2,
    "devicePlugin.disablecorelimit": True,
    "devicePlugin.deviceListStrategy": "envvar",
    "devicePlugin.driverRoot": "/run/nvidia/driver",
    "devicePlugin.kubeletRoot": "/var/lib/k0s/kubelet",
    "devicePlugin.runtimeSocket": "/run/other/cri.sock",
    "devicePlugin.ignoredXids": [13],
    "devicePlugin.recoverySeconds": 60,
    "devicePlugin.backstop": "evict",
    "devicePlugin.bypass": "evict",
    "devicePlugin.allowDisableControl": True,
    "devicePlugin.runtimeClassName": "nvidia",
    "devicePlugin.service.type": "ClusterIP",
    "devicePlugin.service.httpPort": 32_001,
    "devicePlugin.resources": {"limits": {"cpu": "2"}},
    "devicePlugin.nodeSelector": {"gpu": "true"},
    "devicePlugin.affinity": {"nodeAffinity": {}},
    "devicePlugin.tolerations": [{"key": "gpu", "operator": "Exists"}],
    "devicePlugin.priorityClassName": "mine",
    "devicePlugin.podAnnotations": {"note": "x"},
    "devicePlugin.updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
    "devicePlugin.cleanUp": False,
    "networkPolicy.enabled": False,
    "monitoring.podMonitor": True,
    "monitoring.prometheusRule": True,
    "monitoring.interval": "1m",
    "monitoring.labels": {"release": "prometheus"},
    "nameOverride": "gpus",
    "fullnameOverride": "gpus",
    "image.registry": "other.example.com",
    "image.repository": "other/vgpu",
    "image.tag": "9.9.9",
    "image.pullPolicy": "Always",
    "image.digest": DIGEST,
    "imagePullSecrets": [{"name": "mirror"}],
    "otherReleases": [{"namespace": "b", "fullname": "vgpu-b"}],
}
#: values that only have an effect together with another value
NEEDS: dict[str, dict[str, Any]] = {
    "scheduler.certManager.issuerRef": {"scheduler": {"certManager": {"enabled": True}}},
    "monitoring.interval": {"monitoring": {"podMonitor": True}},
    "monitoring.labels": {"monitoring": {"podMonitor": True}},
}
#: values with only one allowed setting so far, so that nothing can change
SINGLE = {"devicePlugin.migStrategy"}


def merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    result = dict(left)
    for key, value in right.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def leaves(struct: msgspec.Struct, prefix: str = "") -> list[str]:
    paths = []
    for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
        value = getattr(struct, name)
        path = prefix + encoded
        paths += leaves(value, path + ".") if isinstance(value, msgspec.Struct) else [path]
    return paths


def one(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    found = [item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name]
    assert len(found) == 1, [(item["kind"], item["metadata"]["name"]) for item in objects]
    return found[0]


def rendered_config(objects: list[dict[str, Any]]) -> config.Config:
    return config.decode(one(objects, "ConfigMap", "vgpu")["data"]["config.yaml"])


def container(objects: list[dict[str, Any]], kind: str, owner: str, name: str) -> dict[str, Any]:
    found = one(objects, kind, owner)["spec"]["template"]["spec"]["containers"]
    return next(item for item in found if item["name"] == name)


@pytest.fixture(scope="module")
def default() -> list[dict[str, Any]]:
    return helm.objects({}, *KUBE_VERSION)


def test_lint_finds_nothing() -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", str(helm.CHART))


@pytest.mark.parametrize("case", MATRIX)
def test_objects_are_valid_in_every_supported_kubernetes(case: str) -> None:
    objects = helm.objects(MATRIX[case])
    assert len(objects) > 15
    # Values change contents of objects, not which fields exist: one set is enough for all versions.
    versions = VERSIONS if case == "placed" else (VERSIONS[0], VERSIONS[-1])
    for item in objects:
        for version in versions if item["apiVersion"] not in FOREIGN else ():
            kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("case", MATRIX)
def test_names_are_unique_and_namespaced_where_they_must_be(case: str) -> None:
    keys = []
    for item in helm.objects(MATRIX[case]):
        cluster_wide = item["kind"].startswith(("Cluster", "Validating", "Mutating"))
        assert ("namespace" in item["metadata"]) is not cluster_wide, item["metadata"]
        assert len(item["metadata"]["name"]) <= 63
        keys.append((item["kind"], item["metadata"]["name"]))
    assert len(keys) == len(set(keys))


def test_committed_values_and_schema_are_what_the_types_say() -> None:
    again = "run `python -m vgpu.chart`"
    assert (helm.CHART / "values.yaml").read_text() == chart.encode_values(), again
    assert (helm.CHART / "values.schema.json").read_text() == chart.encode_schema(), again
    assert (helm.CHART / "templates" / "_defaults.tpl").read_text() == chart.encode_defaults(), again


def test_values_file_is_the_defaults() -> None:
    assert msgspec.convert(yaml.safe_load(chart.encode_values()), chart.Values) == chart.Values()


def test_every_value_has_a_description() -> None:
    for struct in chart.structs(chart.Values):
        for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
            default = getattr(struct(), name, None) if struct is not chart.Release else None
            assert isinstance(default, msgspec.Struct) or encoded in chart.describe(struct), f"{struct.__name__}.{name}"


def test_every_value_is_tried() -> None:
    assert set(leaves(chart.Values())) == set(CHANGED) | SINGLE


@pytest.mark.parametrize("path", CHANGED)
def test_every_value_changes_what_is_rendered(path: str, default: list[dict[str, Any]]) -> None:
    values = nested(path, CHANGED[path])
    objects = helm.objects(merged(values, NEEDS.get(path, {})), *KUBE_VERSION)
    assert objects != (helm.objects(NEEDS[path], *KUBE_VERSION) if path in NEEDS else default)
    if path in leaves(config.Config()):
        assert rendered_config(objects) == msgspec.convert(values, config.Config) != config.Config()


def test_configuration_without_values_is_the_default(default: list[dict[str, Any]]) -> None:
    text = one(default, "ConfigMap", "vgpu")["data"]["config.yaml"]
    assert config.decode(text) == config.Config()
    assert yaml.safe_load(text) == msgspec.json.decode(msgspec.json.encode(config.Config()))


@pytest.mark.parametrize(
    ("values", "restarted"),
    [
        ({"scheduler": {"defaultMem": 1000}}, [True, True]),
        ({"corePolicy": "none"}, [True, True]),
        ({"devicePlugin": {"deviceSplitCount": 3}}, [True, False]),
        ({"scheduler": {"gpuPolicy": "binpack"}}, [False, True]),
        ({"monitoring": {"podMonitor": True}, "otherReleases": [{"namespace": "b", "fullname": "b"}]}, [False, False]),
    ],
)
def test_a_changed_configuration_restarts_the_parts_that_read_it(
    values: dict[str, Any], restarted: list[bool], default: list[dict[str, Any]]
) -> None:
    def templates(objects: list[dict[str, Any]]) -> list[Any]:
        pods = [one(objects, "DaemonSet", "vgpu-device-plugin"), one(objects, "Deployment", "vgpu-scheduler")]
        return [pod["spec"]["template"] for pod in pods]

    before, after = templates(default), templates(helm.objects(values, *KUBE_VERSION))
    assert [old != new for old, new in zip(before, after, strict=True)] == restarted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"resourceNam": "x/y"}, ["resourceNam"]),
        ({"devicePlugin": {"deviceSplitcount": 3}}, ["deviceSplitcount"]),
        ({"devicePlugin": {"deviceSplitCount": "many"}}, ["deviceSplitCount"]),
        ({"devicePlugin": {"deviceSplitCount": 0}}, ["deviceSplitCount", "1"]),
        ({"devicePlugin": {"deviceMemoryScaling": 0}}, ["deviceMemoryScaling", "0"]),
        ({"devicePlugin": {"deviceMemoryScaling": 65}}, ["deviceMemoryScaling", "64"]),
        ({"devicePlugin": {"hostMemory": "1Ki"}}, ["hostMemory"]),
        ({"devicePlugin": {"hostMemory": 100_000_000}}, ["hostMemory"]),
        ({"devicePlugin": {"service": {"httpPort": 70000}}}, ["httpPort", "65"]),
        ({"devicePlugin": {"tolerations": {}}}, ["tolerations", "array"]),
        ({"scheduler": {"defaultCores": 101}}, ["defaultCores", "100"]),
        ({"scheduler": {"gpuPolicy": "scatter"}}, ["gpuPolicy", "spread"]),
        ({"scheduler": {"replicas": 0}}, ["replicas"]),
        ({"scheduler": {"failurePolicy": "ignore"}}, ["failurePolicy", "Ignore"]),
        ({"scheduler": {"ports": {"webhook": 443}}}, ["webhook", "1", "024"]),
        ({"resourceName": "gpu"}, ["resourceName"]),
        ({"corePolicy": "soft"}, ["corePolicy", "fixed"]),
        ({"image": {"pullPolicy": "Sometimes"}}, ["pullPolicy", "IfNotPresent"]),
        ({"fullnameOverride": "Upper"}, ["fullnameOverride"]),
        ({"otherReleases": [{"namespace": "b"}]}, ["otherReleases", "fullname"]),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(helm.Refused) as error:
        helm.render(values)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_two_resources_of_one_name_are_refused() -> None:
    with pytest.raises(helm.Refused, match="each must have a name of its own"):
        helm.render({"resourceMem": "nvidia.com/gpu"})


def test_old_kubernetes_is_refused() -> None:
    with pytest.raises(helm.Refused, match=r"kubeVersion: >=1\.30"):
        helm.render({}, "--kube-version", "v1.29.9")


def test_kube_scheduler_configuration(default: list[dict[str, Any]]) -> None:
    found = yaml.safe_load(one(default, "ConfigMap", "vgpu-scheduler")["data"]["kube-scheduler.yaml"])
    assert found["apiVersion"] == "kubescheduler.config.k8s.io/v1"
    assert found["percentageOfNodesToScore"] == 100
    assert [profile["schedulerName"] for profile in found["profiles"]] == [names.SCHEDULER_NAME]
    (extender,) = found["extenders"]
    assert extender["urlPrefix"] == f"http://127.0.0.1:{names.PORT_EXTENDER}"
    assert extender["nodeCacheCapable"]
    assert not extender["ignorable"]
    ignored = {item["name"]: item["ignoredByScheduler"] for item in extender["managedResources"]}
    assert ignored == {
        names.RESOURCE_GPU: False,
        names.RESOURCE_MEMORY: True,
        names.RESOURCE_MEMORY_PERCENTAGE: True,
        names.RESOURCE_CORES: True,
        names.RESOURCE_PRIORITY: True,
    }
    assert found["leaderElection"]["resourceName"] == "vgpu-scheduler"


def test_one_point_of_the_extender_outweighs_all_stock_plugins(default: list[dict[str, Any]]) -> None:
    """Stock weights: TaintToleration 3, NodeAffinity, PodTopologySpread and InterPodAffinity 2, Fit, Balanced and
    ImageLocality 1; each scores up to 100. Source: pkg/scheduler/apis/config/v1/default_plugins.go."""
    found = yaml.safe_load(one(default, "ConfigMap", "vgpu-scheduler")["data"]["kube-scheduler.yaml"])
    assert found["extenders"][0]["weight"] * 100 / 10 > (3 + 2 + 2 + 2 + 1 + 1 + 1) * 100


def test_every_release_has_a_lease_of_its_own() -> None:
    text = one(helm.objects({"fullnameOverride": "b"}), "ConfigMap", "b-scheduler")["data"]["kube-scheduler.yaml"]
    assert yaml.safe_load(text)["leaderElection"]["resourceName"] == "b-scheduler"


def test_ports_are_those_of_the_vocabulary(default: list[dict[str, Any]]) -> None:
    webhook = one(default, "Service", "vgpu-scheduler")["spec"]
    assert (webhook.get("type", "ClusterIP"), webhook["ports"][0]["port"]) == ("ClusterIP", 443)
    metrics = one(default, "Service", "vgpu-scheduler-metrics")["spec"]
    assert metrics["ports"][0]["nodePort"] == names.NODE_PORT_SCHEDULER_METRICS
    node = one(default, "Service", "vgpu-device-plugin-metrics")["spec"]
    assert node["ports"][0]["nodePort"] == names.NODE_PORT_NODE_METRICS
    assert node["externalTrafficPolicy"] == "Local"
    scheduler = container(default, "Deployment", "vgpu-scheduler", "vgpu-scheduler")
    ports = {port["name"]: port["containerPort"] for port in scheduler["ports"]}
    assert ports == {
        "webhook": names.PORT_WEBHOOK,
        "metrics": names.PORT_SCHEDULER_METRICS,
        "health": names.PORT_SCHEDULER_HEALTH,
    }
    agent = container(default, "DaemonSet", "vgpu-device-plugin", "device-plugin")
    ports = {port["name"]: port["containerPort"] for port in agent["ports"]}
    assert ports == {"metrics": names.PORT_NODE_METRICS, "health": names.PORT_NODE_HEALTH}


@pytest.mark.parametrize(
    "service",
    [{"type": "ClusterIP"}, {"httpPort": None}],
)
def test_no_node_port_is_asked(service: dict[str, Any]) -> None:
    objects = helm.objects({"devicePlugin": {"service": service}})
    assert "nodePort" not in one(objects, "Service", "vgpu-device-plugin-metrics")["spec"]["ports"][0]


def test_parts_understand_their_command_lines(default: list[dict[str, Any]]) -> None:
    scheduler = container(default, "Deployment", "vgpu-scheduler", "vgpu-scheduler")
    found = scheduler_main.arguments(scheduler["args"])
    assert (found.extender_port, found.webhook_port) == (names.PORT_EXTENDER, names.PORT_WEBHOOK)
    assert found.tls_secret == ("kube-system", "vgpu-scheduler-tls")
    agent = container(default, "DaemonSet", "vgpu-device-plugin", "device-plugin")
    node = agent_main.arguments(agent["args"])
    assert (str(node.run_dir), str(node.cdi_dir)) == (names.REGION_DIR, names.CDI_DIR)
    assert str(node.host_root) == "/host"
    assert node.metrics_port == names.PORT_NODE_METRICS
    assert str(found.config) == str(node.config) == names.CONFIG_PATH


def test_commands_are_installed_with_the_package(default: list[dict[str, Any]]) -> None:
    setup = ConfigParser()
    setup.read(helm.CHART.parents[1] / "setup.cfg")
    programs = [line.partition(" =")[0] for line in setup["options.entry_points"]["console_scripts"].split("\n")]
    scheduler = container(default, "Deployment", "vgpu-scheduler", "vgpu-scheduler")
    agent = container(default, "DaemonSet", "vgpu-device-plugin", "device-plugin")
    assert {scheduler["command"][0], agent["command"][0]} <= set(programs)


def test_places_on_the_host(default: list[dict[str, Any]]) -> None:
    volumes = one(default, "DaemonSet", "vgpu-device-plugin")["spec"]["template"]["spec"]["volumes"]
    hosts = {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume}
    kubelet = {f"{names.KUBELET_ROOT}/device-plugins", f"{names.KUBELET_ROOT}/pod-resources"}
    same = kubelet | {names.REGION_DIR, names.CDI_DIR, "/usr/local/vgpu"}
    assert hosts == same | {"/", "/usr/local"}
    mounts = container(default, "DaemonSet", "vgpu-device-plugin", "device-plugin")["volumeMounts"]
    assert {mount["mountPath"] for mount in mounts} == same | {"/etc/vgpu", "/host"}, "same path on both sides"
    made = {
        volume["hostPath"]["path"]
        for volume in volumes
        if volume.get("hostPath", {}).get("type", "").endswith("Create")
    }
    assert not [path for path in made if path.startswith(("/etc", "/usr", "/opt"))], "may be read-only"


def test_agent_runs_on_every_linux_node(default: list[dict[str, Any]]) -> None:
    spec = one(default, "DaemonSet", "vgpu-device-plugin")["spec"]["template"]["spec"]
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert spec["hostPID"]


def test_scheduler_is_unprivileged(default: list[dict[str, Any]]) -> None:
    spec = one(default, "Deployment", "vgpu-scheduler")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert "hostNetwork" not in spec
    for item in spec["containers"]:
        assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert item["securityContext"]["readOnlyRootFilesystem"]


def test_both_parts_are_told_the_objects_that_the_chart_makes(default: list[dict[str, Any]]) -> None:
    arguments = container(default, "Deployment", "vgpu-scheduler", "vgpu-scheduler")["args"]
    webhook = next(item for item in default if item["kind"] == "MutatingWebhookConfiguration")
    assert f"--webhook-config={webhook['metadata']['name']}" in arguments
    assert "--tls-secret=kube-system/vgpu-scheduler-tls" in arguments
    client = webhook["webhooks"][0]["clientConfig"]
    assert client["service"] == {"name": "vgpu-scheduler", "namespace": "kube-system", "path": "/webhook", "port": 443}
    assert "caBundle" not in client
    assert webhook["webhooks"][0]["failurePolicy"] == "Fail"
