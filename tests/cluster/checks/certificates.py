"""The webhook's certificate from the scheduler's own authority."""

import base64
import json
import ssl
import time
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from scheduler import pki
from tests.cluster.checks.chart import NAMESPACE
from tests.cluster.checks.first_pod import slice_pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.kube.client import KubeClient
from vgpu.kube.objects import Pod

SECRET: Final = "vgpu-scheduler-tls"
PODS: Final = "/api/v1/namespaces/default/pods"
MORE: Final = 20  #: pods that are tried once another certificate is served
PAUSE_SECONDS: Final = 0.2
SECONDS: Final = 120


def renewed(node: Node) -> str:
    """An authority near its end is replaced with its certificate: no GPU pod is refused meanwhile."""
    client = KubeClient.connect(node.kubectl.kubeconfig)
    before, begin, tried, left = _served(node), time.monotonic(), 0, MORE
    _age(node)
    took = None
    while left:
        answer = client.request("POST", PODS, body=slice_pod("tried", "true"), params={"dryRun": "All"})
        assert msgspec.json.decode(answer, type=Pod).metadata.labels[names.LABEL_MANAGED] == "true"
        tried += 1
        if took is None:
            took = time.monotonic() - begin if _served(node) != before else None
            assert time.monotonic() < begin + SECONDS, "the same certificate is served"
        else:
            left -= 1
        time.sleep(PAUSE_SECONDS)
    return f"after {took:.1f} s; {tried} pods admitted meanwhile"


def _served(node: Node) -> str:
    """The certificate that a caller of the Service gets, in PEM."""
    address = node.kubectl.get("service", "vgpu-scheduler", NAMESPACE)["spec"]["clusterIP"]
    return ssl.get_server_certificate((address, 443), timeout=10)


def _age(node: Node) -> None:
    """Replaces the authority by one near its end."""
    then = datetime.now(UTC) - pki.AUTHORITY_LIFE + pki.AUTHORITY_MARGIN - timedelta(days=1)
    authority, key = pki._authority(then)
    have = base64.b64decode(node.kubectl.get("secret", SECRET, NAMESPACE)["data"]["ca.crt"]).decode()
    parts = {"ca.crt": authority + have, "ca.key": key}
    data = {file: base64.b64encode(text.encode()).decode() for file, text in parts.items()}
    node.kubectl.run("patch", "secret", SECRET, "-n", NAMESPACE, "--type=merge", "-p", json.dumps({"data": data}))
