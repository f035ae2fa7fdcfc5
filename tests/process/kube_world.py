"""Shared by the tests of the stand-ins: a client on a fresh API server, and shorthands for its requests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vgpu.kube.client import ApiError, KubeClient
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import wait_for

SECONDS = 20.0


def connect(server: ApiServer, folder: Path, user: str = "kubernetes-admin") -> KubeClient:
    path = folder / f"kubeconfig-{user.replace(':', '-')}"
    server.write_kubeconfig(path, user)
    return KubeClient.connect(path)


class World:
    """An API server and a client of it."""

    def __init__(self, folder: Path, server: ApiServer | None = None) -> None:
        self.folder = folder
        self.server = server or ApiServer()
        self.server.start()
        self.client = connect(self.server, folder)

    def close(self) -> None:
        self.client.close()
        self.server.stop()

    def restart(self) -> None:
        """Stops the API server and starts it again, with all its objects and at the same port."""
        self.server.stop()
        self.server = ApiServer(self.server.port, store=self.server.store)
        self.server.start()

    def get(self, path: str, **params: str) -> Any:
        return msgspec.json.decode(self.client.get(path, **params))

    def send(self, method: str, path: str, body: object = None, **more: Any) -> Any:
        return msgspec.json.decode(self.client.request(method, path, body=body, **more))

    def create(self, one: Mapping[str, Any]) -> Any:
        """Creates a pod."""
        namespace = one["metadata"].get("namespace", "default")
        return self.send("POST", f"/api/v1/namespaces/{namespace}/pods", one)

    def pod(self, name: str, namespace: str = "default") -> Any:
        """The pod, {} when there is no such pod."""
        try:
            return self.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return {}

    def node(self, name: str) -> Any:
        return self.get(f"/api/v1/nodes/{name}")

    def phase(self, name: str) -> str:
        phase: str = self.pod(name).get("status", {}).get("phase", "gone")
        return phase

    def wait_phase(self, name: str, phase: str) -> Any:
        wait_for(f"pod {name} {phase}", lambda: self.phase(name) == phase, SECONDS)
        return self.pod(name)

    def events(self, name: str) -> list[tuple[str, str]]:
        """(reason, message) of the events about a pod."""
        found = self.get("/api/v1/namespaces/default/events", fieldSelector=f"involvedObject.name={name}")["items"]
        return [(event["reason"], event["message"]) for event in found]


def pod(name: str, *, limits: Mapping[str, object] | None = None, **more: Any) -> dict[str, Any]:
    """A manifest with one container `main`; `more` goes into its spec, `metadata` into the metadata."""
    meta = {"name": name, "namespace": "default", **more.pop("metadata", {})}
    container = {"name": "main", "image": "none", "command": ["sleep", "60"]}
    if limits:
        container["resources"] = {"limits": dict(limits)}  # type: ignore[assignment]  # a manifest is plain JSON
    container |= more.pop("main", {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"containers": [container], **more}}
