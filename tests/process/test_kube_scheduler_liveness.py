"""Which kube-scheduler the kubelet restarts: one that is ill, or one that leads while its calls get no answers."""

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler import kube_scheduler_liveness, pki
from scheduler.kube_scheduler_liveness import Neighbour
from vgpu import health
from vgpu.kube.client import Unreachable
from vgpu.listener import Listener
from vgpu.standin.services import free_port

HERE = f"{socket.gethostname()}_uuid 4"
ELSEWHERE = "another-pod_uuid 5"


class KubeScheduler:
    """Its /healthz, over TLS with a certificate that no client trusts."""

    def __init__(self, folder: Path) -> None:
        self.status = "200 OK"
        self.asked: list[str] = []
        material = pki.renewed(None, ["localhost"])
        pair = folder / "pair.pem"
        pair.write_text(material.certificate + material.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair)
        self.listener = Listener("kube-scheduler", self._app, "127.0.0.1", free_port(), threads=2, tls=lambda: context)

    def _app(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        self.asked.append(environ["PATH_INFO"])
        start(self.status, [("Content-Type", "text/plain")])
        return [b"[-]leaderElection failed"]


@pytest.fixture
def kube_scheduler(tmp_path: Path) -> Iterator[KubeScheduler]:
    found = KubeScheduler(tmp_path)
    yield found
    found.listener.stop()


@pytest.mark.parametrize(
    ("ready", "term", "said"),
    [
        (True, HERE, ""),
        (True, None, ""),
        (False, HERE, "kube-scheduler leads, but the vgpu scheduler in its pod has not read the cluster yet"),
        (False, ELSEWHERE, ""),
        (False, "", ""),
        (False, None, ""),  # the API server is away: no other replica could do better
    ],
)
def test_who_leads_without_an_extender_makes_room(
    kube_scheduler: KubeScheduler, ready: bool, term: str | None, said: str
) -> None:
    def leader() -> str:
        if term is None:
            raise Unreachable("no answer")
        return term

    assert Neighbour(kube_scheduler.listener.port, lambda: ready, leader).obstacle() == said
    assert kube_scheduler.asked == ["/healthz"]


def test_its_own_word_counts_too(kube_scheduler: KubeScheduler) -> None:
    beside = Neighbour(kube_scheduler.listener.port, lambda: True, lambda: HERE)
    kube_scheduler.status = "500 Internal Server Error"
    assert beside.obstacle() == "kube-scheduler is unhealthy: [-]leaderElection failed"
    kube_scheduler.listener.stop()
    assert "kube-scheduler does not answer" in beside.obstacle()


def test_the_kubelet_asks_on_a_port_of_its_own() -> None:
    said: list[str] = []
    checks = {"/healthz": lambda: "", kube_scheduler_liveness.PATH: lambda: "".join(said)}
    listener = Listener("health", health.app(checks), "127.0.0.1", free_port(), threads=2)
    url = f"http://127.0.0.1:{listener.port}"
    try:
        for path in checks:
            with urllib.request.urlopen(url + path) as got:
                assert got.read() == b"ok\n"
        said.append("it leads")
        for path, status, text in (
            (kube_scheduler_liveness.PATH, "503", b"it leads\n"),
            ("/metrics", "404", b"not one of"),
        ):
            with pytest.raises(urllib.error.HTTPError, match=status) as refused:
                urllib.request.urlopen(url + path)
            assert refused.value.read().startswith(text)
            refused.value.close()
    finally:
        listener.stop()
