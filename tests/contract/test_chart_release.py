"""A second release in one cluster: refused with a sentence unless it has names of its own."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import helm

GROUP = "admissionregistration.k8s.io"
INSTALLED = {
    "apiVersion": f"{GROUP}/v1",
    "kind": "MutatingWebhookConfiguration",
    "metadata": {
        "name": "vgpu-scheduler",
        "annotations": {
            "meta.helm.sh/release-name": "vgpu",
            "meta.helm.sh/release-namespace": "kube-system",
        },
    },
}
OTHER = {"apiVersion": f"{GROUP}/v1", "kind": "MutatingWebhookConfiguration", "metadata": {"name": "istio"}}


def answers(objects: list[dict[str, Any]], webhooks: list[dict[str, Any]]) -> dict[str, Any]:
    """What Helm asks an API server that knows the kinds of `objects` and has `webhooks`."""
    kinds: dict[str, set[str]] = {"v1": {"ResourceQuota"}}  # which the chart has outside kube-system
    for item in objects:
        kinds.setdefault(item["apiVersion"], set()).add(item["kind"])
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.2"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        f"/apis/{GROUP}/v1/mutatingwebhookconfigurations": {
            "apiVersion": f"{GROUP}/v1",
            "kind": "MutatingWebhookConfigurationList",
            "metadata": {"resourceVersion": "1"},
            "items": webhooks,
        },
    }
    groups = []
    for version, members in kinds.items():
        group, _, number = version.rpartition("/")
        resources = [
            {
                "name": kind.lower() + "s",
                "singularName": kind.lower(),
                "namespaced": not kind.startswith(("Cluster", "Validating", "Mutating")),
                "kind": kind,
                "verbs": ["get", "list"],
            }
            for kind in sorted(members)
        ]
        path = f"/apis/{version}" if group else f"/api/{version}"
        found[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if group:
            named = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [named], "preferredVersion": named})
    found["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    return found


@contextmanager
def serve(known: dict[str, Any], folder: Path) -> Iterator[Path]:
    """A kubeconfig of an API server that answers these paths."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = known.get(self.path.partition("?")[0])
            body = json.dumps(found or {"kind": "Status", "status": "Failure", "code": 404}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "users": [{"name": "u", "user": {}}],
                "contexts": [context],
                "current-context": "c",
            }
        )
    )
    try:
        yield path
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    """A cluster in which release vgpu of namespace kube-system is installed."""
    objects = helm.objects()
    first = next(item for item in objects if item["kind"] == "MutatingWebhookConfiguration")
    installed = json.loads(json.dumps(INSTALLED))
    installed["metadata"]["annotations"].update(first["metadata"]["annotations"])
    with serve(answers(objects, [OTHER, installed]), tmp_path) as path:
        yield path


def install(kubeconfig: Path, release: str, namespace: str, values: dict[str, Any]) -> str:
    where = (
        "--kubeconfig",
        str(kubeconfig),
        "-n",
        namespace,
        "--dry-run=server",
        "--disable-openapi-validation",
        "-f",
        "-",
    )
    return helm.run("template", release, str(helm.CHART), *where, stdin=yaml.safe_dump(helm.pulled(values)))


SECOND = {
    "resourceName": "example.com/gpu",
    "resourceMem": "example.com/gpumem",
    "resourceMemPercentage": "example.com/gpumem-percentage",
    "resourceCores": "example.com/gpucores",
    "resourcePriority": "example.com/priority",
    "schedulerName": "second-scheduler",
}


def test_the_release_itself_is_rendered_again(kubeconfig: Path) -> None:
    assert "kind: DaemonSet" in install(kubeconfig, "vgpu", "kube-system", {})


@pytest.mark.parametrize(("release", "namespace"), [("b", "kube-system"), ("vgpu", "b")])
def test_a_second_release_with_the_same_names_is_refused(kubeconfig: Path, release: str, namespace: str) -> None:
    with pytest.raises(helm.Refused) as error:
        install(kubeconfig, release, namespace, {})
    assert 'release "vgpu" in namespace "kube-system" already serves "nvidia.com/gpu"' in str(error.value)
    assert "a second release needs other values of resourceName" in str(error.value)


@pytest.mark.parametrize("shared", SECOND)
def test_one_shared_name_is_enough_to_refuse(kubeconfig: Path, shared: str) -> None:
    values = {key: value for key, value in SECOND.items() if key != shared}
    with pytest.raises(helm.Refused, match="already serves"):
        install(kubeconfig, "b", "b", values)


def test_a_second_release_with_other_names_is_rendered(kubeconfig: Path) -> None:
    assert "second-scheduler" in install(kubeconfig, "b", "b", SECOND)


def notes_of(kubeconfig: Path, values: dict[str, Any]) -> str:
    where = (
        "--kubeconfig",
        str(kubeconfig),
        "-n",
        "gpu",
        "--dry-run=client",
        "--disable-openapi-validation",
        "-f",
        "-",
    )
    output = helm.run(
        "install", "vgpu", str(helm.CHART), *where, stdin=yaml.safe_dump(helm.pulled({**SECOND, **values}))
    )
    return output[output.index("NOTES:") :]


@pytest.mark.parametrize(
    ("plugin", "told"),
    [
        ({}, False),
        ({"deviceMemoryScaling": 0.5}, False),
        ({"deviceMemoryScaling": 1.5}, True),
        ({"deviceMemoryScaling": 1.5, "hostMemory": "0Gi"}, True),
        ({"deviceMemoryScalingByModel": {"T4": 2}}, True),
        ({"deviceMemoryScalingByModel": {"T4": 0.5}}, False),
        ({"deviceMemoryScalingByModel": {"T4": 2}, "hostMemory": "1Gi"}, False),
        ({"deviceMemoryScaling": 2, "hostMemory": 65536}, False),
        ({"deviceMemoryScaling": 2, "hostMemory": "64Gi"}, False),
        ({"deviceMemoryScaling": 2, "nodeOverrides": {"a": {"hostMemory": 4096}}}, False),
    ],
)
def test_notes_say_that_nothing_is_behind_scaled_memory(kubeconfig: Path, plugin: dict[str, Any], told: bool) -> None:
    notes = notes_of(kubeconfig, {"devicePlugin": {**SECOND.get("devicePlugin", {}), **plugin}})
    assert ("which has no effect: devicePlugin.hostMemory" in notes) == told


def test_notes_say_what_to_do(kubeconfig: Path) -> None:
    notes = notes_of(kubeconfig, {"simulate": "T4x2"})
    assert "SIMULATED (T4x2)" in notes
    assert "example.com/gpumem: 3000" in notes
    assert "curl http://NODE:31992/metrics" in notes
    assert "kubectl -n gpu rollout status" in notes
