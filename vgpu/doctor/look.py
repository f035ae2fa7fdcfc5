"""Gathers the facts for the checks: from the API server, and from this machine.

Changes nothing, except that it creates the directory of `vgpu run` where it is missing.
"""

import base64
import binascii
import os
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from vgpu import inventory, names
from vgpu.config import Config
from vgpu.doctor.cluster import HARMLESS, OTHER_PLUGINS, Cluster, Part, Trial, Webhook
from vgpu.doctor.host import Host, Kubelet
from vgpu.errors import UserError
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.objects import Condition, Meta, Node, ObjectList
from vgpu.kubelet import checkpoint
from vgpu.workstation.library import preloadable
from vgpu.workstation.state import state_dir

T = TypeVar("T")

HOOK: Final = "pods.vgpu.io"
_CONFIGURATIONS: Final = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
#: Settings of NVIDIA's container toolkit: the package's file, then the GPU operator's
TOOLKIT_FILES: Final = (
    "/etc/nvidia-container-runtime/config.toml",
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
)
_TLS_FLAG: Final = "--tls-secret="  #: flag of the scheduler
PAGE: Final = "500"


class _Container(msgspec.Struct, frozen=True):
    name: str = ""
    image: str = ""
    args: list[str] = []


class _Spec(msgspec.Struct, frozen=True):
    nodeName: str = ""
    containers: list[_Container] = []


class _Status(msgspec.Struct, frozen=True):
    conditions: list[Condition] = []


class _Pod(msgspec.Struct, frozen=True):
    metadata: Meta = Meta()
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _Service(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = ""


class _ClientConfig(msgspec.Struct, frozen=True):
    service: _Service | None = None
    caBundle: str = ""


class _Hook(msgspec.Struct, frozen=True):
    name: str = ""
    clientConfig: _ClientConfig = _ClientConfig()


class _Configuration(msgspec.Struct, frozen=True):
    metadata: Meta = Meta()
    webhooks: list[_Hook] = []


class _Secret(msgspec.Struct, frozen=True):
    data: dict[str, str] = {}


class _Version(msgspec.Struct, frozen=True):
    gitVersion: str = ""


def cluster(client: KubeClient, namespace: str) -> Cluster:
    """All facts that this account may read; `namespace`: where the dry run creates a GPU pod."""
    refused: dict[str, str] = {}

    def ask(what: str, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except (ApiError, msgspec.MsgspecError) as error:
            refused[what] = str(error)
            return None

    version = ask("version", lambda: msgspec.json.decode(client.get("/version"), type=_Version).gitVersion)
    webhooks = ask("webhooks", lambda: tuple(_webhooks(client)))
    first = webhooks[0] if webhooks else Webhook("")
    parts = ask("pods", lambda: tuple(_parts(client)))
    secret = next((part.tls_secret for part in parts or () if part.tls_secret), f"{first.service}-tls")
    return Cluster(
        version=version,
        webhooks=webhooks,
        parts=parts,
        nodes=ask("nodes", lambda: tuple(_list(client, "/api/v1/nodes", Node))),
        trial=ask("trial", lambda: _trial(client, namespace, first)) if webhooks or webhooks is None else None,
        service=ask("service", lambda: _there(client, first.service)) if first.service else None,
        served=ask("secret", lambda: _served(client, secret)) if webhooks else None,
        refused=refused,
    )


def _list(client: KubeClient, path: str, kind: type[T]) -> Iterator[T]:
    decoder: msgspec.json.Decoder[ObjectList[T]] = msgspec.json.Decoder(ObjectList[kind])  # type: ignore[valid-type]  # a type known only at run time
    token = ""
    while True:
        page = decoder.decode(client.get(path, limit=PAGE, **({"continue": token} if token else {})))
        yield from page.items or ()
        token = page.metadata.continue_
        if not token:
            return


def _webhooks(client: KubeClient) -> Iterator[Webhook]:
    for found in _list(client, _CONFIGURATIONS, _Configuration):
        hook = next((each.clientConfig for each in found.webhooks if each.name == HOOK), None)
        if hook is None:
            continue
        service = f"{hook.service.namespace}/{hook.service.name}" if hook.service else ""
        given = found.metadata.annotations.get(names.CHART_NAMES, "").split(",")
        resource, scheduler = (given[0], given[-1]) if len(given) > 1 else (names.RESOURCE_GPU, names.SCHEDULER_NAME)
        yield Webhook(found.metadata.name, service, _decoded(hook.caBundle), resource, scheduler)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return text.encode()  # no valid certificate either, and the check reports that


def _parts(client: KubeClient) -> Iterator[Part]:
    for pod in _list(client, "/api/v1/pods", _Pod):
        labels = pod.metadata.labels
        images = tuple(each.image for each in pod.spec.containers)
        name = f"{pod.metadata.namespace}/{pod.metadata.name}"
        if labels.get("app.kubernetes.io/part-of") == "vgpu":
            component = labels.get("app.kubernetes.io/component", "?")
            ready = any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions)
            version = labels.get("app.kubernetes.io/version", "")
            yield Part(component, name, pod.spec.nodeName, ready, version, images, _tls_secret(pod))
        elif any(_other_plugin(each) for each in pod.spec.containers):
            yield Part("", name, pod.spec.nodeName, images=images)


def _tls_secret(pod: _Pod) -> str:
    """NAMESPACE/NAME of the webhook's certificate, from the scheduler's flags."""
    flags = [flag for each in pod.spec.containers for flag in each.args if flag.startswith(_TLS_FLAG)]
    return flags[0].removeprefix(_TLS_FLAG) if flags else ""


def _other_plugin(container: _Container) -> bool:
    repository = container.image.partition("@")[0]
    known = any(part in repository for part in OTHER_PLUGINS)
    return known and not any(part in container.name for part in HARMLESS)


def _trial(client: KubeClient, namespace: str, hook: Webhook) -> Trial:
    """A dry run: admission answers, and the API server stores nothing."""
    container = {"name": "main", "image": "none", "resources": {"limits": {hook.resource: "1"}}}
    body = {"metadata": {"generateName": "vgpu-doctor-"}, "spec": {"containers": [container]}}
    path = f"/api/v1/namespaces/{namespace}/pods"
    try:
        answer = client.request("POST", path, body=body, params={"dryRun": "All"}, timeout=30)
    except ApiError as error:
        return Trial(error=str(error), namespace=namespace)
    labels = msgspec.json.decode(answer, type=_Pod).metadata.labels
    return Trial(labels.get(names.LABEL_MANAGED) == "true", namespace=namespace)


def _there(client: KubeClient, place: str) -> bool:
    namespace, _, name = place.partition("/")
    try:
        client.get(f"/api/v1/namespaces/{namespace}/services/{name}")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


def _served(client: KubeClient, place: str) -> bytes:
    namespace, _, name = place.partition("/")
    secret = msgspec.json.decode(client.get(f"/api/v1/namespaces/{namespace}/secrets/{name}"), type=_Secret)
    return _decoded(secret.data.get("tls.crt", ""))


def host(config: Config, environ: Mapping[str, str]) -> Host:
    """The facts about this machine."""
    found: dict[str, Any] = {"simulate": environ.get(names.ENV_SIMULATE) or config.simulate}
    try:
        found["inventory"] = inventory.read()
    except inventory.InventoryError as error:
        found["no_inventory"] = str(error)
    try:
        library = preloadable()
        found["no_library"] = _loads(library)
        found["library"] = "" if found["no_library"] else str(library)
    except (OSError, UserError) as error:
        found["no_library"] = str(error)
    try:
        found["state"] = str(state_dir())
    except (OSError, UserError) as error:
        found["no_state"] = str(error)
    found["kubelet"] = _kubelet(Path(config.device_plugin.kubeletRoot) / "device-plugins")
    toolkit = next((path for path in TOOLKIT_FILES if Path(path).exists()), "")
    if toolkit:
        found |= {"toolkit": toolkit, "settings": _settings(Path(toolkit))}
    rolled_out = Path(config.global_.gpu_hook_path) / "vgpu"
    if rolled_out.is_dir():
        found["rolled_out"] = tuple(path.name for path in rolled_out.glob("libvgpu-*.so"))
    return Host(**found)


def _loads(library: Path) -> str:
    """Why the dynamic linker cannot preload this library; empty: it can."""
    done = subprocess.run(
        ["/bin/sh", "-c", ":"],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr.strip().partition("\n")[0] if done.returncode or "cannot be preloaded" in done.stderr else ""


def _kubelet(folder: Path) -> Kubelet | None:
    try:
        sockets = tuple(sorted(path.name for path in folder.iterdir() if path.is_socket()))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Kubelet(str(folder), refused=f"{error.strerror}: {folder}")
    try:
        registered = checkpoint.read(folder / checkpoint.FILE_NAME).registered
    except (OSError, checkpoint.CheckpointError) as error:
        return Kubelet(str(folder), sockets, refused=str(error))
    return Kubelet(str(folder), sockets, tuple(registered))


def _settings(file: Path) -> dict[str, object] | None:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
