"""The scheduler as the chart runs it: its command line, configuration file, Service and webhook, over real TLS."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools import helm

from vgpu import names
from vgpu.kube.client import ApiError, KubeClient
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import Service, free_port, wait_for

HOOK = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
NAMESPACE = "gpu-system"
VALUES = {"resourceMem": "example.com/gpumem", "schedulerName": "example-scheduler", "scheduler": {"defaultMem": 5000}}
SECONDS = 30.0


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(item for item in objects if item["kind"] == kind and item["metadata"]["name"] == name)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeClient]:
    """An API server in which the chart is installed, and its scheduler running."""
    folder = tmp_path_factory.mktemp("chart")
    objects = helm.objects(VALUES, "-n", NAMESPACE)
    ports = {name: free_port() for name in ("extender", "webhook", "metrics", "health")}
    api = ApiServer(services={(NAMESPACE, "vgpu-scheduler"): ("127.0.0.1", ports["webhook"])})
    api.start()
    api.write_kubeconfig(folder / "kubeconfig")
    found = KubeClient.connect(folder / "kubeconfig")
    for namespace in (NAMESPACE, "d"):
        found.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    found.request("POST", HOOK, body=find(objects, "MutatingWebhookConfiguration", "vgpu-scheduler"))
    settings = folder / "config.yaml"
    settings.write_text(find(objects, "ConfigMap", "vgpu")["data"]["config.yaml"])
    pod = find(objects, "Deployment", "vgpu-scheduler")["spec"]["template"]["spec"]
    given = next(item["args"] for item in pod["containers"] if item["name"] == "vgpu-scheduler")
    flags = dict(flag.split("=", 1) for flag in given)
    flags |= {f"--{name}-port": str(port) for name, port in ports.items()}
    flags |= {"--config": str(settings), "--kubeconfig": str(folder / "kubeconfig"), "--webhook-address": "127.0.0.1"}
    command = [sys.executable, "-m", "scheduler", *(f"{name}={value}" for name, value in flags.items())]
    root = str(Path(__file__).parents[2])
    service = Service("scheduler", command, folder / "log", {**os.environ, "PYTHONPATH": root})
    service.start()
    try:
        wait_for("the webhook certificate", lambda: bundle(found), SECONDS)
        wait_for("the webhook", lambda: create(found, "first") is not None, SECONDS)
        yield found
    finally:
        service.stop()
        found.close()
        api.stop()


def bundle(client: KubeClient) -> str:
    hook = msgspec.json.decode(client.get(f"{HOOK}/vgpu-scheduler"))["webhooks"][0]
    return str(hook["clientConfig"].get("caBundle", ""))


def create(client: KubeClient, name: str, labels: dict[str, str] | None = None) -> dict[str, Any] | None:
    """The pod as the API server stores it; None while the webhook cannot be called."""
    container = {"name": "main", "image": "x", "resources": {"limits": {names.RESOURCE_GPU: "1"}}}
    body = {"metadata": {"name": name, "labels": labels or {}}, "spec": {"containers": [container]}}
    try:
        found: dict[str, Any] = msgspec.json.decode(client.request("POST", "/api/v1/namespaces/d/pods", body=body))
    except ApiError as error:
        if "failed calling webhook" not in error.message:
            raise
        return None
    return found


def test_pods_are_admitted_by_the_charts_settings(client: KubeClient) -> None:
    found = create(client, "asks")
    assert found is not None
    assert found["metadata"]["labels"][names.LABEL_MANAGED] == "true"
    assert found["spec"]["schedulerName"] == "example-scheduler"
    limits = found["spec"]["containers"][0]["resources"]["limits"]
    assert limits["example.com/gpumem"] in ("5000", "5k")


def test_opting_out_by_label(client: KubeClient) -> None:
    found = create(client, "opts-out", {names.WEBHOOK_LABELS[0]: names.WEBHOOK_IGNORE})
    assert found is not None
    assert names.LABEL_MANAGED not in found["metadata"]["labels"]


def test_the_certificate_is_kept_in_the_secret_that_the_role_names(client: KubeClient) -> None:
    secret = msgspec.json.decode(client.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/vgpu-scheduler-tls"))
    assert {"tls.crt", "tls.key"} <= set(secret["data"])
