"""Admission webhooks: calls the webhooks of Mutating- and ValidatingWebhookConfiguration objects over TLS.

Not covered: matchConditions (every matching request is sent), matchPolicy, reinvocation and side effects.
"""

import base64
import binascii
import contextlib
import copy
import ssl
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import urllib3

from vgpu.kube.client import ApiError
from vgpu.standin.apiserver import patches
from vgpu.standin.apiserver.selectors import selector_object
from vgpu.standin.apiserver.store import Object, Store

MUTATING = "admissionregistration.k8s.io/mutatingwebhookconfigurations"
VALIDATING = "admissionregistration.k8s.io/validatingwebhookconfigurations"

#: (namespace, name) of a Service → (host, port) where it really listens
AddressBook = Mapping[tuple[str, str], tuple[str, int]]


class Subject(NamedTuple):
    """The request that admission decides."""

    operation: str  #: CREATE, UPDATE or DELETE
    group: str
    version: str
    resource: str
    kind: str
    namespace: str
    name: str
    user: Mapping[str, Any]  #: userInfo
    dry_run: bool


class _Status(msgspec.Struct, frozen=True):
    message: str = ""
    reason: str = ""
    code: int = 0


class _Response(msgspec.Struct, frozen=True):
    uid: str
    allowed: bool
    patch: str | None = None
    patchType: str | None = None
    status: _Status = _Status()
    warnings: list[str] | None = None


class _Review(msgspec.Struct, frozen=True):
    kind: str
    apiVersion: str
    response: _Response


class _CallFailed(Exception):
    """The webhook gave no usable answer: failurePolicy decides."""


def _matches(rule: Mapping[str, Any], subject: Subject) -> bool:
    def has(key: str, value: str) -> bool:
        return value in rule.get(key, ()) or "*" in rule.get(key, ())

    return (
        has("operations", subject.operation)
        and has("apiGroups", subject.group)
        and has("apiVersions", subject.version)
        and (has("resources", subject.resource) or "*/*" in rule.get("resources", ()))
    )


class Webhooks:
    """Admission by the webhook configurations in a store."""

    def __init__(self, store: Store, services: AddressBook | None = None) -> None:
        self._store = store
        self._services = services if services is not None else {}

    def mutate(self, subject: Subject, item: Object, old: Object | None) -> tuple[Object, list[str]]:
        """The object after the mutating webhooks, and their warnings.

        Raises ApiError when a webhook denies the request.
        """
        warnings: list[str] = []
        for hook in self._hooks(MUTATING, subject, item):
            with self._policy(hook):
                response = self._call(hook, subject, item, old)
                warnings += response.warnings or ()
                self._check(hook, response)
                if response.patch:
                    item = _patched(item, response)
        return item, warnings

    def validate(self, subject: Subject, item: Object, old: Object | None) -> list[str]:
        """Warnings of the validating webhooks. Raises ApiError when one denies."""
        warnings: list[str] = []
        for hook in self._hooks(VALIDATING, subject, item):
            with self._policy(hook):
                response = self._call(hook, subject, item, old)
                warnings += response.warnings or ()
                self._check(hook, response)
        return warnings

    def _hooks(self, collection: str, subject: Subject, item: Object) -> Iterator[Mapping[str, Any]]:
        if subject.group == "admissionregistration.k8s.io":
            return  # otherwise a broken webhook could never be removed
        namespace = self._store.get("/namespaces", "", subject.namespace) if subject.namespace else None
        space = ((namespace or {}).get("metadata") or {}).get("labels") or {}
        labels = item["metadata"].get("labels") or {}
        for configuration in self._store.items(collection)[0]:
            for hook in configuration.get("webhooks") or ():
                if (
                    any(_matches(rule, subject) for rule in hook.get("rules") or ())
                    and selector_object(hook.get("objectSelector"), labels)
                    and (not subject.namespace or selector_object(hook.get("namespaceSelector"), space))
                ):
                    yield hook

    @contextlib.contextmanager
    def _policy(self, hook: Mapping[str, Any]) -> Iterator[None]:
        try:
            yield
        except _CallFailed as error:
            if hook.get("failurePolicy", "Fail") != "Ignore":
                text = f'failed calling webhook "{hook.get("name")}": {error}'
                raise ApiError(500, "InternalError", f"Internal error occurred: {text}") from None

    def _check(self, hook: Mapping[str, Any], response: _Response) -> None:
        if not response.allowed:
            said = response.status.message or response.status.reason or "without explanation"
            status = response.status.code if response.status.code >= 400 else 403
            text = f'admission webhook "{hook.get("name")}" denied the request: {said}'
            raise ApiError(status, response.status.reason or "Forbidden", text)

    def _target(self, config: Mapping[str, Any]) -> tuple[str, int, str, str]:
        """(host to connect to, port, name that the certificate must carry, path)."""
        if config.get("url"):
            url = urlsplit(config["url"])
            if url.scheme != "https" or not url.hostname:
                raise _CallFailed(f"{config['url']} is not a https URL")
            return url.hostname, url.port or 443, url.hostname, url.path or "/"
        service = config.get("service") or {}
        key = (service.get("namespace", ""), service.get("name", ""))
        if key not in self._services:
            raise _CallFailed(f'service "{key[1]}" in namespace "{key[0]}" not found')
        host, port = self._services[key]
        return host, port, f"{key[1]}.{key[0]}.svc", service.get("path") or "/"

    def _call(self, hook: Mapping[str, Any], subject: Subject, item: Object, old: Object | None) -> _Response:
        config = hook.get("clientConfig") or {}
        host, port, name, path = self._target(config)
        uid = str(uuid.uuid4())
        timeout = float(hook.get("timeoutSeconds", 10))
        try:
            bundle = base64.b64decode(config.get("caBundle") or "").decode()
            context = ssl.create_default_context(cadata=bundle) if bundle else ssl.create_default_context()
        except (ValueError, ssl.SSLError, binascii.Error) as error:
            raise _CallFailed(f"caBundle: {error}") from None
        with urllib3.HTTPSConnectionPool(
            host, port, ssl_context=context, server_hostname=name, assert_hostname=name, retries=False
        ) as pool:
            try:
                answer = pool.request(
                    "POST",
                    f"{path}?timeout={timeout:g}s",
                    body=msgspec.json.encode(_review(uid, subject, item, old)),
                    headers={"content-type": "application/json", "accept": "application/json"},
                    timeout=timeout,
                )
            except urllib3.exceptions.HTTPError as error:
                raise _CallFailed(f"Post https://{host}:{port}{path}: {error}") from None
        if answer.status != 200:
            text = answer.data.decode(errors="replace")[:200]
            raise _CallFailed(f"https://{host}:{port}{path} answered {answer.status}: {text}")
        try:
            review = msgspec.json.decode(answer.data, type=_Review)
        except msgspec.MsgspecError as error:
            raise _CallFailed(f"the answer is no AdmissionReview: {error}") from None
        if (review.kind, review.apiVersion, review.response.uid) != ("AdmissionReview", "admission.k8s.io/v1", uid):
            raise _CallFailed("the answer is not an admission.k8s.io/v1 AdmissionReview with the uid of the request")
        return review.response


def _patched(item: Object, response: _Response) -> Object:
    if response.patchType != "JSONPatch":
        raise _CallFailed(f"patchType is {response.patchType!r}, not JSONPatch")
    try:
        operations = msgspec.json.decode(base64.b64decode(response.patch or "", validate=True))
        patched: Object = patches.json_patch(item, operations)
    except (msgspec.MsgspecError, binascii.Error, patches.PatchError) as error:
        raise _CallFailed(f"the patch cannot be applied: {error}") from None
    return patched


def _review(uid: str, subject: Subject, item: Object, old: Object | None) -> dict[str, Any]:
    kind = {"group": subject.group, "version": subject.version, "kind": subject.kind}
    resource = {"group": subject.group, "version": subject.version, "resource": subject.resource}
    options = {"CREATE": "CreateOptions", "UPDATE": "UpdateOptions", "DELETE": "DeleteOptions"}[subject.operation]
    api_version = f"{subject.group}/{subject.version}" if subject.group else subject.version
    typed = {"kind": subject.kind, "apiVersion": api_version}
    return {
        "kind": "AdmissionReview",
        "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": uid,
            "kind": kind,
            "resource": resource,
            "requestKind": kind,
            "requestResource": resource,
            **({"name": subject.name} if subject.name else {}),
            **({"namespace": subject.namespace} if subject.namespace else {}),
            "operation": subject.operation,
            "userInfo": dict(subject.user),
            "object": {**typed, **copy.deepcopy(item)} if subject.operation != "DELETE" else None,
            "oldObject": {**typed, **old} if old is not None else None,
            "dryRun": subject.dry_run,
            "options": {"kind": options, "apiVersion": "meta.k8s.io/v1"},
        },
    }


def user_info(name: str) -> dict[str, Any]:
    """userInfo of a user; the groups follow from the form of the name, as in the real authenticators."""
    groups: Sequence[str] = ("system:authenticated",)
    if name.startswith("system:serviceaccount:"):
        namespace = name.split(":")[2]
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", *groups)
    elif name == "kubernetes-admin":
        groups = ("system:masters", *groups)
    return {"username": name, "groups": list(groups)}
