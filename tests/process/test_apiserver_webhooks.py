"""Admission webhooks of the API server stand-in over real TLS."""

import base64
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
import urllib3
from cheroot import wsgi
from cheroot.ssl.builtin import BuiltinSSLAdapter
from flask import Flask, Response, request
from kube_world import World, connect, pod

from vgpu.kube.client import MERGE_PATCH, ApiError
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import free_port

MUTATING = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
VALIDATING = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
SERVICE = "hook.kube-system.svc"

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Hook:
    """A webhook whose answers a test defines; it stores the requests."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.requests: list[dict[str, Any]] = []
        self.answer: Answer = lambda _: {"allowed": True}
        certificate = self.ca.issue_cert("127.0.0.1", SERVICE)
        chain, key = folder / "chain.pem", folder / "key.pem"
        key.write_bytes(certificate.private_key_pem.bytes())
        chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        app = Flask("hook")
        app.add_url_rule("/webhook", "webhook", self._review, methods=["POST"])
        self.port = free_port()
        self._server = wsgi.Server(("127.0.0.1", self.port), app, numthreads=4)
        self._server.ssl_adapter = BuiltinSSLAdapter(str(chain), str(key))
        self._server.expiration_interval = 0.1
        self._server.prepare()
        self._thread = threading.Thread(target=self._server.serve, daemon=True)
        self._thread.start()

    def _review(self) -> Response:
        review = msgspec.json.decode(request.get_data())
        asked = review["request"]
        self.requests.append(asked)
        response = {"uid": asked["uid"], **self.answer(asked)}
        body = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": response}
        return Response(msgspec.json.encode(body), mimetype="application/json")

    def stop(self) -> None:
        self._server.stop()
        self._thread.join()

    @property
    def bundle(self) -> str:
        return base64.b64encode(self.ca.cert_pem.bytes()).decode()

    def configuration(self, name: str = "hook", **more: Any) -> dict[str, Any]:
        rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
        config = {"url": f"https://127.0.0.1:{self.port}/webhook", "caBundle": self.bundle}
        hook = {"name": "pods.example.io", "rules": [rule], "clientConfig": config, **more}
        return {"metadata": {"name": name}, "webhooks": [hook]}


def patching(*operations: dict[str, Any]) -> Answer:
    patch = base64.b64encode(msgspec.json.encode(operations)).decode()
    return lambda _: {"allowed": True, "patchType": "JSONPatch", "patch": patch}


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Hook]:
    hook = Hook(tmp_path)
    yield hook
    hook.stop()


@pytest.fixture
def world(tmp_path: Path, hook: Hook) -> Iterator[World]:
    world = World(tmp_path, ApiServer(services={("kube-system", "hook"): ("127.0.0.1", hook.port)}))
    yield world
    world.close()


def test_patch_is_applied_and_the_result_defaulted(world: World, hook: Hook) -> None:
    limits = {"nvidia.com/gpu": 1, "vgpu.io/memory": 60000}
    hook.answer = patching(
        {"op": "add", "path": "/metadata/labels", "value": {"vgpu.io/managed": "true"}},
        {"op": "add", "path": "/spec/containers/0/resources", "value": {"limits": limits}},
        {"op": "replace", "path": "/spec/schedulerName", "value": "vgpu-scheduler"},
    )
    world.send("POST", MUTATING, hook.configuration())
    made = world.create(pod("a"))
    assert made["metadata"]["labels"] == {"vgpu.io/managed": "true"}
    assert made["spec"]["schedulerName"] == "vgpu-scheduler"
    canonical = {"nvidia.com/gpu": "1", "vgpu.io/memory": "60k"}
    assert made["spec"]["containers"][0]["resources"] == {"limits": canonical, "requests": canonical}
    assert world.pod("a") == made


def test_request_carries_what_the_real_server_sends(world: World, hook: Hook, tmp_path: Path) -> None:
    world.send("POST", MUTATING, hook.configuration())
    client = connect(world.server, tmp_path, "system:serviceaccount:team:builder")
    body = pod("a", limits={"nvidia.com/gpumem": 60000})
    client.request("POST", "/api/v1/namespaces/default/pods", body=body, params={"dryRun": "All"})
    (asked,) = hook.requests
    assert (asked["operation"], asked["namespace"], asked["name"], asked["dryRun"]) == ("CREATE", "default", "a", True)
    assert asked["kind"] == {"group": "", "version": "v1", "kind": "Pod"}
    assert asked["resource"] == {"group": "", "version": "v1", "resource": "pods"}
    assert asked["userInfo"]["username"] == "system:serviceaccount:team:builder"
    assert "system:serviceaccounts:team" in asked["userInfo"]["groups"]
    assert asked["object"]["kind"] == "Pod"
    assert asked["object"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpumem": "60k"}
    assert asked["oldObject"] is None


def test_denial_carries_the_sentence(world: World, hook: Hook) -> None:
    hook.answer = lambda _: {"allowed": False, "status": {"message": "gpumem is 0: must be 1 or more", "code": 400}}
    world.send("POST", MUTATING, hook.configuration())
    said = r'admission webhook "pods\.example\.io" denied the request: gpumem is 0: must be 1 or more'
    with pytest.raises(ApiError, match=said) as error:
        world.create(pod("a"))
    assert error.value.status == 400
    assert world.pod("a") == {}


def test_invalid_after_the_webhook_is_refused(world: World, hook: Hook) -> None:
    hook.answer = patching({"op": "add", "path": "/spec/containers/0/resources/requests",
                            "value": {"nvidia.com/gpu": "1"}})  # fmt: skip
    world.send("POST", MUTATING, hook.configuration())
    with pytest.raises(ApiError, match="Limit must be set for non overcommitable resources"):
        world.create(pod("a"))


def test_requests_without_limits_reach_the_webhook(world: World, hook: Hook) -> None:
    """The real server validates after mutation, so that a webhook can repair an object that validation would refuse."""
    hook.answer = patching({"op": "add", "path": "/spec/containers/0/resources/limits",
                            "value": {"nvidia.com/gpu": "1"}})  # fmt: skip
    world.send("POST", MUTATING, hook.configuration())
    made = world.create(pod("a", main={"resources": {"requests": {"nvidia.com/gpu": 1}}}))
    assert made["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_warnings_are_headers(world: World, hook: Hook) -> None:
    hook.answer = lambda _: {"allowed": True, "warnings": ['a whole card is taken: "main"']}
    world.send("POST", MUTATING, hook.configuration())
    answer = urllib3.request("POST", f"{world.server.url}/api/v1/namespaces/default/pods", json=pod("a"))
    assert answer.headers["Warning"] == '299 - "a whole card is taken: \\"main\\""'


def test_validating_webhooks_see_the_mutated_pod(world: World, hook: Hook) -> None:
    def decide(asked: dict[str, Any]) -> dict[str, Any]:
        if asked["object"]["metadata"].get("labels"):
            return {"allowed": False, "status": {"message": "has labels"}}
        return patching({"op": "add", "path": "/metadata/labels", "value": {"a": "b"}})(asked)

    hook.answer = decide
    world.send("POST", MUTATING, hook.configuration())
    world.send("POST", VALIDATING, hook.configuration())
    with pytest.raises(ApiError, match="has labels") as error:
        world.create(pod("a"))
    assert error.value.status == 403


def test_updates_show_both_versions(world: World, hook: Hook) -> None:
    configuration = hook.configuration()
    configuration["webhooks"][0]["rules"][0]["operations"] = ["UPDATE"]
    world.send("POST", VALIDATING, configuration)
    made = world.create(pod("a"))
    assert not hook.requests
    path = "/api/v1/namespaces/default/pods/a"
    world.send("PATCH", path, {"metadata": {"annotations": {"x": "1"}}}, content_type=MERGE_PATCH)
    world.send("PATCH", f"{path}/status", {"status": {"phase": "Running"}}, content_type=MERGE_PATCH)
    (asked,) = hook.requests
    assert asked["oldObject"]["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    assert asked["object"]["metadata"]["annotations"] == {"x": "1"}


def test_a_change_during_admission_is_not_lost(world: World, hook: Hook) -> None:
    configuration = hook.configuration()
    configuration["webhooks"][0]["rules"][0]["operations"] = ["UPDATE"]
    world.send("POST", VALIDATING, configuration)
    world.create(pod("a"))
    path = "/api/v1/namespaces/default/pods/a"

    def change(_: dict[str, Any]) -> dict[str, Any]:
        if len(hook.requests) == 1:
            world.send("PATCH", f"{path}/status", {"status": {"phase": "Running"}}, content_type=MERGE_PATCH)
        return {"allowed": True}

    hook.answer = change
    world.send("PATCH", path, {"metadata": {"annotations": {"x": "1"}}}, content_type=MERGE_PATCH)
    assert len(hook.requests) == 2
    stored = world.pod("a")
    assert (stored["metadata"]["annotations"], stored["status"]["phase"]) == ({"x": "1"}, "Running")


@pytest.mark.parametrize(
    ("selector", "reached"),
    [
        ({"objectSelector": {"matchExpressions": [{"key": "skip", "operator": "DoesNotExist"}]}}, False),
        ({"objectSelector": {"matchLabels": {"skip": "yes"}}}, True),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}}, True),
        ({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}, False),
    ],
)
def test_selectors(world: World, hook: Hook, selector: dict[str, Any], reached: bool) -> None:
    world.send("POST", MUTATING, hook.configuration(**selector))
    world.create(pod("a", metadata={"labels": {"skip": "yes"}}))
    assert bool(hook.requests) is reached


def test_service_is_found_by_the_address_book_and_its_name_is_verified(world: World, hook: Hook) -> None:
    service = {"namespace": "kube-system", "name": "hook", "path": "/webhook"}
    world.send("POST", MUTATING, hook.configuration(clientConfig={"service": service, "caBundle": hook.bundle}))
    world.create(pod("a"))
    assert len(hook.requests) == 1


def test_a_certificate_of_another_authority_is_refused(world: World, hook: Hook) -> None:
    configuration = hook.configuration()
    other = base64.b64encode(trustme.CA().cert_pem.bytes()).decode()
    configuration["webhooks"][0]["clientConfig"]["caBundle"] = other
    world.send("POST", MUTATING, configuration)
    with pytest.raises(ApiError, match=r"failed calling webhook .*CERTIFICATE_VERIFY_FAILED") as error:
        world.create(pod("a"))
    assert (error.value.status, error.value.reason) == (500, "InternalError")
    assert not hook.requests


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"allowed": True, "uid": "other"}, "with the uid of the request"),
        ({"allowed": "yes"}, "no AdmissionReview"),
        ({"allowed": True, "patchType": "JSONPatch", "patch": "!"}, "cannot be applied"),
        ({"allowed": True, "patchType": "Merge", "patch": "e30="}, "not JSONPatch"),
    ],
)
def test_unusable_answers(world: World, hook: Hook, answer: dict[str, Any], said: str) -> None:
    hook.answer = lambda _: answer
    world.send("POST", MUTATING, hook.configuration())
    with pytest.raises(ApiError, match=said):
        world.create(pod("a"))
    world.send("DELETE", f"{MUTATING}/hook")
    world.send("POST", MUTATING, hook.configuration(failurePolicy="Ignore"))
    assert world.create(pod("a"))["metadata"]["name"] == "a"


def test_a_dead_webhook_fails_or_is_ignored_by_policy(world: World, hook: Hook) -> None:
    hook.stop()
    world.send("POST", MUTATING, hook.configuration())
    with pytest.raises(ApiError, match="failed calling webhook"):
        world.create(pod("a"))
    world.send("DELETE", f"{MUTATING}/hook")
    world.send("POST", MUTATING, hook.configuration(failurePolicy="Ignore"))
    world.create(pod("a"))


def test_tls_is_really_spoken(hook: Hook) -> None:
    context = ssl.create_default_context(cadata=hook.ca.cert_pem.bytes().decode())
    with (
        socket.create_connection(("127.0.0.1", hook.port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=SERVICE) as secure,
    ):
        assert secure.version() in ("TLSv1.2", "TLSv1.3")
