"""The webhook as the API server calls it: over real TLS, trusted by the caBundle that the scheduler itself wrote."""

import base64
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kube_world import World, pod
from scheduler_world import SECONDS

from scheduler import pki
from scheduler.admission.webhook import Admission
from scheduler.app import MAX_REVIEW_BODY, service_app
from scheduler.certificates import Certificates
from scheduler.cluster import ClusterState
from vgpu.config import Config, rules
from vgpu.kube.client import MERGE_PATCH, ApiError
from vgpu.listener import Listener
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import free_port, wait_for

SECRET = "/api/v1/namespaces/kube-system/secrets/tls"
HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
HOST = "vgpu-scheduler.kube-system.svc"


class Webhook:
    """One replica's certificate and listener."""

    def __init__(self, world: World, port: int) -> None:
        self.port = port
        self.loaded = 0
        self.certificates = Certificates(world.client, ("kube-system", "tls"), "vgpu", self._on_ready)
        self.ready = False
        config = Config()
        admission = Admission(config, rules(config), ClusterState(), "kube-system")
        self.app = service_app(admission, lambda: self.ready)
        self.listener: Listener | None = None

    def _on_ready(self) -> None:
        self.loaded += 1

    def start(self) -> None:
        self.certificates.step()
        self.listener = Listener(
            *("webhook", self.app, "127.0.0.1", self.port),
            threads=4,
            tls=lambda: self.certificates.context,
            max_body=MAX_REVIEW_BODY,
        )

    def close(self) -> None:
        if self.listener is not None:
            self.listener.stop()

    def call(self, world: World, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        """Calls the webhook as the API server does: trusts only caBundle."""
        bundle = base64.b64decode(world.get(f"{HOOKS}/vgpu")["webhooks"][0]["clientConfig"]["caBundle"]).decode()
        context = ssl.create_default_context(cadata=bundle)
        with urllib3.HTTPSConnectionPool(
            "127.0.0.1", self.port, ssl_context=context, server_hostname=HOST, assert_hostname=HOST
        ) as pool:
            answer = pool.request(method, path, body=body, retries=False, timeout=SECONDS)
        return answer.status, answer.data.decode()

    def serial(self) -> int:
        """Serial number of the certificate that is served now."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only reads the certificate
        with (
            socket.create_connection(("127.0.0.1", self.port), SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as secure,
        ):
            der = secure.getpeercert(binary_form=True)
        assert der is not None
        return pki.x509.load_der_x509_certificate(der).serial_number


def configuration() -> dict[str, Any]:
    hook = {
        "name": "pods.vgpu.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "clientConfig": {
            "service": {"name": "vgpu-scheduler", "namespace": "kube-system", "path": "/webhook", "port": 443}
        },
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
    }
    return {"metadata": {"name": "vgpu"}, "webhooks": [hook, {**hook, "name": "other.vgpu.io", "rules": []}]}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def world(tmp_path: Path, port: int) -> Iterator[World]:
    world = World(tmp_path, ApiServer(services={("kube-system", "vgpu-scheduler"): ("127.0.0.1", port)}))
    yield world
    world.close()


@pytest.fixture
def webhook(world: World, port: int) -> Iterator[Webhook]:
    world.send("POST", HOOKS, configuration())
    webhook = Webhook(world, port)
    webhook.start()
    yield webhook
    webhook.close()


def bundles(world: World) -> set[str]:
    return {hook["clientConfig"].get("caBundle") for hook in world.get(f"{HOOKS}/vgpu")["webhooks"]}


@pytest.mark.usefixtures("webhook")
def test_a_gpu_pod_is_translated_on_its_way_into_the_cluster(world: World) -> None:
    made = world.create(pod("p", limits={"nvidia.com/gpumem": 60000, "nvidia.com/gpucores": 30}))
    assert made["spec"]["schedulerName"] == "vgpu-scheduler"
    assert made["metadata"]["labels"] == {"vgpu.io/managed": "true"}
    limits = made["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": "60k",
        "nvidia.com/gpucores": "30",
        "vgpu.io/memory": "60k",
        "vgpu.io/cores": "30",
    }
    plain = world.create(pod("plain"))
    assert "labels" not in plain["metadata"]


@pytest.mark.usefixtures("webhook")
def test_a_sidecar_declines_what_a_limit_range_gives_it(world: World) -> None:
    """As the API server sends it: the default is in the container, and the annotation names its source."""
    item = pod("p", limits={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000})
    default = {"nvidia.com/gpu": "0", "nvidia.com/gpumem": "3k", "cpu": "1"}
    item["spec"]["containers"].append({"name": "log", "image": "log", "resources": {"limits": default}})
    said = (
        "LimitRanger plugin set: nvidia.com/gpumem limit for container main; nvidia.com/gpumem limit for container log"
    )
    item["metadata"]["annotations"] = {"kubernetes.io/limit-ranger": said}
    main, log = world.create(item)["spec"]["containers"]
    assert main["resources"]["limits"]["vgpu.io/memory"] == "3k"
    assert log["resources"]["limits"] == {"nvidia.com/gpu": "0", "cpu": "1"}
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in log["env"]


@pytest.mark.usefixtures("webhook")
def test_a_denial_reaches_the_user_word_for_word(world: World) -> None:
    with pytest.raises(ApiError) as denied:
        world.create(pod("p", limits={"nvidia.com/gpumem": "8Gi"}))
    assert denied.value.status == 403
    assert denied.value.message == (
        'admission webhook "pods.vgpu.io" denied the request: '
        'spec.containers[main].resources.limits[nvidia.com/gpumem] is "8Gi": must be a whole number of MiB '
        "from 1 to 16777216; the unit is MiB: write 8192, not 8Gi"
    )


def test_health_and_readiness(world: World, webhook: Webhook) -> None:
    assert webhook.call(world, "GET", "/healthz") == (200, "ok\n")
    assert webhook.call(world, "GET", "/readyz") == (503, "the scheduler has not read the cluster yet\n")
    webhook.ready = True
    assert webhook.call(world, "GET", "/readyz") == (200, "ok\n")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/webhook", b"{", 400, "the body is not JSON"),
        ("POST", "/webhook", b"null", 400, "Expected `object`, got `null`"),
        (
            "POST",
            "/webhook",
            b'{"apiVersion":"v1","kind":"Pod","request":{"uid":"u","operation":"CREATE"}}',
            400,
            "v1 Pod",
        ),
        ("GET", "/webhook", b"", 405, "not allowed"),
        ("POST", "/filter", b"{}", 404, "not found"),
        ("POST", "/bind", b"{}", 404, "not found"),
        ("GET", "/metrics", b"", 404, "not found"),
    ],
)
def test_bad_requests_are_answered_and_the_service_stays_up(
    world: World, webhook: Webhook, method: str, path: str, body: bytes, status: int, said: str
) -> None:
    answer, text = webhook.call(world, method, path, body)
    assert answer == status
    assert said in text
    assert "Traceback" not in text
    assert webhook.call(world, "GET", "/healthz")[0] == 200


def test_a_body_that_is_too_large_is_not_read(world: World, webhook: Webhook) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only the size matters here
    with (
        socket.create_connection(("127.0.0.1", webhook.port), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=HOST) as secure,
    ):
        secure.sendall(b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
        assert secure.recv(65536).startswith(b"HTTP/1.1 413")
    assert webhook.call(world, "GET", "/healthz")[0] == 200


def test_a_client_that_sends_all_of_a_large_body_first_reads_the_answer(world: World, webhook: Webhook) -> None:
    assert webhook.call(world, "POST", "/webhook", b" " * (8 * 2**20)) == (
        413,
        "the body is larger than 3145728 bytes\n",
    )
    assert webhook.call(world, "GET", "/healthz")[0] == 200


def test_silent_and_plain_clients_hold_up_nobody(world: World, webhook: Webhook) -> None:
    silent = [socket.create_connection(("127.0.0.1", webhook.port), SECONDS) for _ in range(20)]
    with socket.create_connection(("127.0.0.1", webhook.port), SECONDS) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"ok" not in plain.recv(65536)
    pool = urllib3.HTTPSConnectionPool("127.0.0.1", webhook.port, cert_reqs="CERT_NONE")
    with pytest.warns(urllib3.exceptions.InsecureRequestWarning):
        # Shorter than the listener's own time-out for silent clients.
        assert pool.request("GET", "/healthz", retries=False, timeout=5).status == 200
    for each in silent:
        each.close()
    assert webhook.call(world, "GET", "/healthz")[0] == 200


def test_replicas_share_one_certificate(world: World, webhook: Webhook) -> None:
    other = Webhook(world, free_port())
    other.start()
    try:
        assert other.serial() == webhook.serial()
        assert other.call(world, "GET", "/healthz")[0] == 200
    finally:
        other.close()


def test_replicas_that_start_at_once_agree(world: World, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world.send("POST", HOOKS, configuration())
    first, second = Webhook(world, port), Webhook(world, free_port())
    real = Certificates._store

    def slow(self: Certificates, *args: Any) -> None:
        monkeypatch.setattr(Certificates, "_store", real)
        second.start()  # overtakes the first replica between its look and its write
        real(self, *args)

    monkeypatch.setattr(Certificates, "_store", slow)
    try:
        first.start()
        assert first.serial() == second.serial()
    finally:
        first.close()
        second.close()


def test_an_empty_secret_made_by_the_chart_is_filled(world: World, port: int) -> None:
    world.send("POST", HOOKS, configuration())
    secret = {"metadata": {"name": "tls", "labels": {"app": "vgpu"}}, "data": {"note": "a2VwdA=="}}
    world.send("POST", "/api/v1/namespaces/kube-system/secrets", secret)
    webhook = Webhook(world, port)
    webhook.start()
    try:
        assert webhook.call(world, "GET", "/healthz")[0] == 200
        filled = world.get(SECRET)
        assert set(filled["data"]) == {"note", "ca.crt", "ca.key", "tls.crt", "tls.key"}
        assert filled["metadata"]["labels"] == {"app": "vgpu"}
    finally:
        webhook.close()


def test_a_certificate_near_its_end_is_replaced_without_a_restart(world: World, webhook: Webhook) -> None:
    before = webhook.serial()
    then = datetime.now(UTC) - pki.SERVING_LIFE + pki.SERVING_MARGIN - timedelta(days=1)
    old = pki.renewed(None, {HOST}, then)
    parts = {
        "ca.crt": old.authorities,
        "ca.key": old.authority_key,
        "tls.crt": old.certificate,
        "tls.key": old.key,
    }
    data = {file: base64.b64encode(text.encode()).decode() for file, text in parts.items()}
    world.send("PATCH", SECRET, {"data": data}, content_type=MERGE_PATCH)
    webhook.certificates.step()
    assert webhook.serial() == before, "nobody trusts the new one yet"
    webhook.certificates.step()
    after = webhook.serial()
    assert after not in (before, pki.x509.load_pem_x509_certificate(old.certificate.encode()).serial_number)
    assert webhook.call(world, "GET", "/healthz")[0] == 200
    webhook.certificates.step()
    assert webhook.serial() == after


def test_no_call_fails_while_authority_and_certificate_are_replaced(world: World, webhook: Webhook) -> None:
    before, then = webhook.serial(), datetime.now(UTC) - pki.AUTHORITY_LIFE + pki.AUTHORITY_MARGIN - timedelta(days=1)
    done = threading.Event()
    answers: list[int] = []
    failures: list[Exception] = []

    def call() -> None:
        while not done.is_set():
            try:
                answers.append(webhook.call(world, "GET", "/healthz")[0])
            except (OSError, urllib3.exceptions.HTTPError) as error:
                failures.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        for _ in range(3):
            had = webhook.serial()
            secret = world.get(SECRET)["data"]
            authority, key = pki._authority(then)  # the next look finds it near its end
            mixed = base64.b64decode(secret["ca.crt"]).decode()
            parts = {"ca.crt": authority + mixed, "ca.key": key}
            data = {file: base64.b64encode(text.encode()).decode() for file, text in parts.items()}
            world.send("PATCH", SECRET, {"data": data}, content_type=MERGE_PATCH)
            for _ in range(2):
                webhook.certificates.step()
                enough = len(answers) + 3
                wait_for("calls", lambda enough=enough: len(answers) > enough or failures, SECONDS)
            assert webhook.serial() != had
    finally:
        done.set()
        caller.join()
    assert not failures
    assert set(answers) == {200}
    assert webhook.serial() != before


def test_a_certificate_of_somebody_else_is_followed_and_left_alone(world: World, port: int) -> None:
    webhook = Webhook(world, port)
    webhook.certificates = Certificates(world.client, ("kube-system", "tls"), None, webhook._on_ready)
    with pytest.raises(ApiError, match="404"):
        webhook.certificates.step()
    secrets = SECRET.rpartition("/")[0]
    world.send("POST", secrets, {"metadata": {"name": "tls"}, "type": "kubernetes.io/tls", "data": {"tls.crt": ""}})
    with pytest.raises(ApiError, match="contains no certificate yet"):
        webhook.certificates.step()

    def fill(key_of: pki.Material, certificate_of: pki.Material) -> dict[str, str]:
        parts = {"tls.crt": certificate_of.certificate.strip(), "tls.key": key_of.key.strip()}
        data = {file: base64.b64encode(text.encode()).decode() for file, text in parts.items()}
        kept: dict[str, str] = world.send("PATCH", SECRET, {"data": data}, content_type=MERGE_PATCH)["data"]
        return kept

    one, two = (pki.renewed(None, {HOST}) for _ in range(2))
    kept = fill(one, one)
    webhook.start()
    try:
        first = webhook.serial()
        assert world.get(SECRET)["data"] == kept
        fill(one, two)
        with pytest.raises(ApiError, match="kube-system/tls"):
            webhook.certificates.step()
        fill(two, two)
        webhook.certificates.step()
        assert webhook.serial() != first
    finally:
        webhook.close()


def test_a_ca_bundle_that_was_wiped_is_written_again(world: World, webhook: Webhook) -> None:
    good = bundles(world)
    assert len(good) == 1, "the same for every webhook of the configuration"
    world.send("PUT", f"{HOOKS}/vgpu", {**configuration(), "metadata": world.get(f"{HOOKS}/vgpu")["metadata"]})
    assert bundles(world) == {None}
    webhook.certificates.step()
    assert bundles(world) == good


def test_the_certificate_comes_up_before_the_configuration_and_while_the_api_server_is_away(
    world: World, port: int
) -> None:
    webhook = Webhook(world, port)
    world.server.stop()
    webhook.certificates.start()
    try:
        world.restart()
        wait_for("the first certificate", lambda: webhook.loaded, SECONDS)
        world.send("POST", HOOKS, configuration())
        wait_for("caBundle", lambda: None not in bundles(world), SECONDS)
        assert webhook.loaded == 1
        names = json.dumps(world.get(SECRET)["data"])
        assert "tls.crt" in names
    finally:
        webhook.certificates.stop()
