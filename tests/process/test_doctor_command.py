"""`vgpu doctor` against real parts: the agent and the scheduler as processes, API server and kubelet stand-ins."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vgpu import names
from vgpu.kube.client import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from vgpu.standin.cluster import NODE, WEBHOOK, LocalCluster

HOOK = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{WEBHOOK}"
SECONDS = 60.0
AREAS = ("webhook", "certificate", "agents", "plugin", "runtime", "settings", "conflict", "driver", "library")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(prefix="vgpu-d-", dir="/tmp"))  # sockets need a short path
    try:
        with LocalCluster(folder) as running:
            for component in ("scheduler", "device-plugin"):
                part(running, component)
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def part(cluster: LocalCluster, component: str, *, ready: bool = True) -> None:
    """The pod of a part in a cluster; here the part is a process."""
    labels = {
        "app.kubernetes.io/part-of": "vgpu",
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/version": "0.1.0",
    }
    main = {"name": "main", "image": "vgpu/vgpu:0.1.0", "args": ["--tls-secret=kube-system/vgpu-webhook-tls"]}
    body = {
        "metadata": {"name": f"vgpu-{component}", "labels": labels},
        "spec": {"schedulerName": "nobody", "containers": [main]},
    }
    path = "/api/v1/namespaces/kube-system/pods"
    cluster.client.request("POST", path, body=body)
    status = {"status": {"conditions": [{"type": "Ready", "status": str(ready)}]}}
    cluster.client.request("PATCH", f"{path}/vgpu-{component}/status", body=status, content_type=MERGE_PATCH)


def doctor(cluster: LocalCluster, *more: str, kubeconfig: Path | None = None) -> tuple[int, list[dict[str, Any]]]:
    """(exit code, findings) on the machine that is the cluster's node."""
    environ = {**os.environ, names.ENV_CONFIG: str(cluster.directory / "config.yaml")}
    environ |= {names.ENV_STATE_DIR: str(cluster.directory / "state")}
    command = [sys.executable, "-m", "vgpu", "doctor", "--json", "--kubeconfig", str(kubeconfig or cluster.kubeconfig)]
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=environ, timeout=SECONDS, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def wrong(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["area"], each["sentence"]) for each in found if each["verdict"] == "wrong"]


def test_a_cluster_that_works(cluster: LocalCluster) -> None:
    before = cluster.pods()
    code, found = doctor(cluster)
    assert (code, wrong(found)) == (0, []), found
    told = {(each["area"], each["verdict"]) for each in found}
    assert {(area, "ok") for area in AREAS} <= told
    assert any("the kubelet has nvidia.com/gpu registered" in each["sentence"] for each in found), "seen from the node"
    assert any("registered on 1 nodes; 2 cards" in each["sentence"] for each in found), "seen from the cluster"
    assert [pod["metadata"]["name"] for pod in cluster.pods()] == [pod["metadata"]["name"] for pod in before]


def test_a_namespace_that_opts_out_is_told(cluster: LocalCluster) -> None:
    labels = {names.WEBHOOK_LABELS[0]: names.WEBHOOK_IGNORE}
    cluster.client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": "out", "labels": labels}})
    terms = [{"key": names.WEBHOOK_LABELS[0], "operator": "NotIn", "values": [names.WEBHOOK_IGNORE]}]
    patch = [{"op": "add", "path": "/webhooks/0/namespaceSelector", "value": {"matchExpressions": terms}}]
    cluster.client.request("PATCH", HOOK, body=patch, content_type=JSON_PATCH)
    code, found = doctor(cluster, "-n", "out")
    assert code == 1
    assert wrong(found) == [("webhook", "a GPU pod in namespace out bypasses the webhook")]


def test_a_condition_of_the_node_is_told(cluster: LocalCluster) -> None:
    def set_condition(status: str) -> None:
        told = {"conditions": [{"type": names.CONDITION_UNENFORCED, "status": status, "message": "set it"}]}
        path = f"/api/v1/nodes/{NODE}/status"
        cluster.client.request("PATCH", path, body={"status": told}, content_type=STRATEGIC_PATCH)

    set_condition("True")
    try:
        code, found = doctor(cluster)
    finally:
        set_condition("False")
    assert code == 1
    assert wrong(found) == [("settings", f"node {NODE}: set it")]


def test_an_api_server_that_does_not_answer(cluster: LocalCluster, tmp_path: Path) -> None:
    text = cluster.kubeconfig.read_text()
    (tmp_path / "kubeconfig").write_text(text.replace(cluster.api.url, "http://127.0.0.1:9"))
    code, found = doctor(cluster, kubeconfig=tmp_path / "kubeconfig")
    assert code == 1
    assert [area for area, _ in wrong(found)] == ["cluster"]


def test_a_webhook_that_cannot_be_reached(cluster: LocalCluster) -> None:
    def point_to(port: int) -> None:
        change = {"op": "replace", "path": "/webhooks/0/clientConfig/url", "value": f"https://127.0.0.1:{port}/webhook"}
        cluster.client.request("PATCH", HOOK, body=[change], content_type=JSON_PATCH)

    point_to(9)
    try:
        code, found = doctor(cluster)
    finally:
        point_to(cluster.webhook_port)
    assert code == 1
    ((area, sentence),) = wrong(found)
    assert area == "webhook"
    assert "the API server cannot call the webhook" in sentence
