"""Helm 3 and Helm 4 render the chart alike, and Helm 4's server-side apply accepts the result."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import helm

KUBE_VERSION = ("--kube-version", "v1.36.3")
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "simulated": {"simulate": "T4x2", "imagePullSecrets": [{"name": "mirror"}]},
    "one replica on the network of its node": {
        "scheduler": {"replicas": 1, "hostNetwork": True, "failurePolicy": "Ignore", "podAnnotations": {"note": "x"}},
        "global": {"controlPlanes": True},
    },
    "of an older chart": {"scheduler": {"ports": None, "failurePolicy": None}, "global": None},
    "operators": {
        "scheduler": {"certManager": {"enabled": True}},
        "monitoring": {"podMonitor": True, "prometheusRule": True},
    },
    "more memory than cards have": {
        "devicePlugin": {
            "deviceMemoryScaling": 2,
            "hostMemory": "64Gi",
            "nodeOverrides": {"big-*": {"hostMemory": 2**20}},
        }
    },
    "beside another release": {
        "fullnameOverride": "gpu-b",
        "otherReleases": [{"namespace": "kube-system", "fullname": "vgpu"}],
        "devicePlugin": {"service": {"httpPort": None}, "cleanUp": False},
    },
}
#: Keys by which server-side apply tells elements of a list apart (Kubernetes' OpenAPI, x-kubernetes-list-map-keys)
KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "webhooks": ("name",),
    "matchConditions": ("name",),
    "variables": ("name",),
}


@pytest.fixture(scope="module")
def helm3() -> Path:
    found = helm.third()
    if found is None:
        pytest.skip("there is no Helm 3 here: `python tests/tools/helm.py 3` builds it")
    return found


def test_one_is_helm_3_and_the_other_helm_4(helm3: Path) -> None:
    assert helm.run("version", "--short", binary=helm3).startswith("v3.")
    assert helm.run("version", "--short").startswith("v4.")


def rendered(case: str, *, binary: Path | None) -> list[dict[str, Any]]:
    """The objects; each Helm chooses its own order for kinds that Kubernetes itself does not have."""
    found = helm.objects(VALUES[case], *KUBE_VERSION, binary=binary)
    return sorted(found, key=lambda item: (item["kind"], item["metadata"]["name"]))


@pytest.mark.parametrize("case", VALUES)
def test_helm_3_renders_what_helm_4_renders(case: str, helm3: Path) -> None:
    three, four = (rendered(case, binary=binary) for binary in (helm3, None))
    assert three == four


@pytest.mark.parametrize("values", [{"resourceNam": "x/y"}, {"scheduler": {"defaultCores": 101}}])
def test_helm_3_refuses_what_the_schema_refuses(values: dict[str, Any], helm3: Path) -> None:
    with pytest.raises(helm.Refused, match=next(iter(values))):
        helm.render(values, binary=helm3)


def lists(node: Any, path: str = "") -> Iterator[tuple[str, str, list[Any]]]:
    """(path, key, list) of every list of maps below a node."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield path, str(key), value
        yield from lists(value, f"{path}/{key}")


@pytest.mark.parametrize("case", VALUES)
def test_no_list_has_an_element_twice(case: str) -> None:
    """Server-side apply refuses duplicates, client-side apply accepted them."""
    seen = Counter[str]()
    for item in helm.objects(VALUES[case], *KUBE_VERSION):
        name = f"{item['kind']} {item['metadata']['name']}"
        for path, key, value in lists(item):
            keys = KEYS.get(key, ())
            if key == "ports":
                keys = (
                    ("port", "protocol")
                    if item["kind"] in ("Service", "NetworkPolicy")
                    else ("containerPort", "protocol")
                )
            if not keys or "podMetricsEndpoints" in path:
                continue
            seen[key] += 1
            found = Counter(tuple(str(one.get(part, "TCP")) for part in keys) for one in value)
            assert max(found.values()) == 1, f"{name}: {path}/{key}: {found}"
    assert {"containers", "env", "ports", "volumes", "volumeMounts", "webhooks"} <= set(seen)


@pytest.mark.parametrize("case", VALUES)
def test_nothing_is_rendered_that_a_part_writes_itself(case: str) -> None:
    """With two writers of one field, server-side apply would report a conflict at every upgrade."""
    for item in helm.objects(VALUES[case], *KUBE_VERSION):
        for hook in item.get("webhooks", ()):
            assert "caBundle" not in hook["clientConfig"], "written by the scheduler, or by cert-manager"
        assert item["kind"] != "Secret", "the certificate's Secret is the scheduler's"
        assert item["kind"] != "Lease", "kube-scheduler's"
        assert "status" not in item
        assert not {"resourceVersion", "uid", "managedFields"} & set(item["metadata"])
