"""The webhook's certificate.

It is stored in a Secret that all replicas share, trusted by caBundle, and renewed without a restart.
"""

import base64
import binascii
import logging
import os
import ssl
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from scheduler.pki import Material, renewed
from vgpu.kube.client import JSON_PATCH, MERGE_PATCH, ApiError, KubeClient

log = logging.getLogger(__name__)

PERIOD: Final = 10.0  #: seconds between looks at the Secret and the webhook configuration
RETRY: Final = (0.2, 5.0)  #: seconds: first and longest pause after a failure
LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1"})
FILES: Final = {"authorities": "ca.crt", "authority_key": "ca.key", "certificate": "tls.crt", "key": "tls.key"}


class _Service(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class _ClientConfig(msgspec.Struct, frozen=True):
    service: _Service | None = None
    url: str | None = None
    caBundle: str | None = None


class _Webhook(msgspec.Struct, frozen=True):
    name: str
    clientConfig: _ClientConfig = _ClientConfig()


class _Configuration(msgspec.Struct, frozen=True):
    webhooks: list[_Webhook] | None = None


class _SecretMeta(msgspec.Struct, frozen=True):
    resourceVersion: str = ""


class _Secret(msgspec.Struct, frozen=True):
    metadata: _SecretMeta = _SecretMeta()
    data: dict[str, str] | None = None


def hosts_of(configuration: _Configuration) -> frozenset[str]:
    """Names under which the API server calls the webhooks.

    Source: admissionregistration/v1 WebhookClientConfig.
    """
    hosts = set(LOCAL_HOSTS)
    for hook in configuration.webhooks or ():
        service, url = hook.clientConfig.service, hook.clientConfig.url
        if service is not None:
            hosts |= {f"{service.name}.{service.namespace}.svc", f"{service.name}.{service.namespace}"}
        if url and (host := urlsplit(url).hostname):
            hosts.add(host)
    return frozenset(hosts)


def _material(secret: _Secret) -> Material | None:
    """The material in the Secret; None when a part is missing."""
    data = secret.data or {}
    try:
        parts = {field: base64.b64decode(data[file], validate=True).decode() for field, file in FILES.items()}
    except (KeyError, binascii.Error, UnicodeDecodeError):
        return None
    return Material(**parts)


class Certificates:
    """Keeps the TLS context, the Secret and the caBundle in step.

    Without a `configuration`, another program owns Secret and caBundle: the scheduler only reads them, and follows
    their changes. `context` has a certificate once `on_ready` has been called; this happens once, in another thread.
    """

    def __init__(
        self, client: KubeClient, secret: tuple[str, str], configuration: str | None, on_ready: Callable[[], None]
    ) -> None:
        self._namespace, self._name = secret
        self._client = client
        self._on_ready = on_ready
        self._secrets = f"/api/v1/namespaces/{self._namespace}/secrets"
        self._hooks = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{configuration}"
        self._own = configuration is not None
        self._seen: Material | None = None  #: material at the last look
        self._loaded: tuple[str, str] | None = None  #: certificate and key
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  #: for new connections; replaced after a renewal

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        pause, longest = RETRY
        said, wait, told = "", 0.0, False
        while not self._stopping.wait(wait):
            try:
                self.step()
                wait, pause, said = PERIOD, RETRY[0], ""
            except (ApiError, msgspec.MsgspecError) as error:
                if str(error) != said:
                    log.warning("cannot update the webhook certificate: %s; trying again", error)
                said, wait = str(error), pause
                pause = min(pause * 2, longest)
            if self._loaded is not None and not told:
                told = True
                self._on_ready()

    def step(self) -> None:
        """Brings Secret, caBundle and context up to date once; raises ApiError where the API server refuses."""
        if not self._own:
            self._load(*self._foreign())
            return
        try:
            configuration = msgspec.json.decode(self._client.get(self._hooks), type=_Configuration)
            missing = None
        except ApiError as error:
            if error.status != 404:
                raise
            configuration, missing = _Configuration(), error
        material = self._shared(hosts_of(configuration))
        # Trust first: calls of the API server would fail with a certificate that it does not trust yet.
        self._publish(configuration, material)
        # The API server learns of a new authority a moment later: a running server goes on with the trusted
        # certificate.
        if self._loaded is None or material == self._seen:
            self._load(material.certificate, material.key)
        self._seen = material
        if missing is not None:
            raise missing

    def _foreign(self) -> tuple[str, str]:
        """Certificate and key from a Secret that another program owns; source: type kubernetes.io/tls."""
        secret = msgspec.json.decode(self._client.get(f"{self._secrets}/{self._name}"), type=_Secret)
        data = secret.data or {}
        try:
            parts = [base64.b64decode(data[FILES[field]], validate=True).decode() for field in ("certificate", "key")]
        except (KeyError, binascii.Error, UnicodeDecodeError):
            raise ApiError(
                500, "Invalid", f"Secret {self._namespace}/{self._name} contains no certificate yet"
            ) from None
        return parts[0], parts[1]

    def _shared(self, hosts: frozenset[str]) -> Material:
        """The Secret's material, renewed where that is due; several replicas agree by the Secret's resourceVersion."""
        while True:
            try:
                secret = msgspec.json.decode(self._client.get(f"{self._secrets}/{self._name}"), type=_Secret)
            except ApiError as error:
                if error.status != 404:
                    raise
                secret = None
            have = _material(secret) if secret is not None else None
            material = renewed(have, hosts)
            if material is have:
                return material
            try:
                self._store(secret, material)
            except ApiError as error:
                if error.status != 409:
                    raise
                continue  # another replica was faster: use its material
            log.info("created a webhook certificate for %s", ", ".join(sorted(hosts)))
            return material

    def _store(self, secret: _Secret | None, material: Material) -> None:
        data = {file: base64.b64encode(getattr(material, field).encode()).decode() for field, file in FILES.items()}
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        if secret is None:
            body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "data": data}
            self._client.request("POST", self._secrets, body=body)
            return
        merge = {"metadata": {"resourceVersion": secret.metadata.resourceVersion}, "data": data}
        self._client.request("PATCH", f"{self._secrets}/{self._name}", body=merge, content_type=MERGE_PATCH)

    def _publish(self, configuration: _Configuration, material: Material) -> None:
        bundle = base64.b64encode(material.authorities.encode()).decode()
        patch: list[dict[str, Any]] = []
        for at, hook in enumerate(configuration.webhooks or ()):
            if hook.clientConfig.caBundle != bundle:
                patch += [
                    {"op": "test", "path": f"/webhooks/{at}/name", "value": hook.name},
                    {"op": "add", "path": f"/webhooks/{at}/clientConfig/caBundle", "value": bundle},
                ]
        if patch:
            self._client.request("PATCH", self._hooks, body=patch, content_type=JSON_PATCH)
            log.info("wrote the caBundle of %s", self._hooks.rsplit("/", 1)[-1])

    def _load(self, certificate: str, key: str) -> None:
        """Loads the pair into a new context.

        OpenSSL reads keys only from files: so the key goes into a private file that is deleted at once.
        """
        if (certificate, key) == self._loaded:
            return
        with tempfile.TemporaryDirectory(prefix="vgpu-tls-") as directory:
            chain = Path(directory) / "tls.pem"
            with os.fdopen(os.open(chain, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{certificate}\n{key}")
            # Not into the live context: for a moment it would have the new certificate and the old key.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_cert_chain(chain)
            except ssl.SSLError as error:
                raise ApiError(500, "Invalid", f"Secret {self._namespace}/{self._name}: {error}") from None
        self.context = context
        self._loaded = (certificate, key)
