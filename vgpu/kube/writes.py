"""All writes of vgpu to the API server, each as one request."""

import hashlib
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from vgpu.kube.client import MERGE_PATCH, STRATEGIC_PATCH, ApiError, KubeClient

log = logging.getLogger(__name__)


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def now() -> str:
    """This moment as the API server writes times: RFC 3339, UTC, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def bind(
    client: KubeClient, namespace: str, name: str, uid: str, node: str, annotations: Mapping[str, str] | None = None
) -> None:
    """Puts a pod on a node; the API server merges `annotations` into the pod in the same transaction.

    ApiError 409 when the pod is bound already, is being deleted or has another uid. Source: Binding v1,
    kubernetes/pkg/registry/core/pod/storage "BindingREST".
    """
    body = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "annotations": dict(annotations or {})},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }
    client.request("POST", f"{pod_path(namespace, name)}/binding", body=body)


def patch_pod(
    client: KubeClient,
    namespace: str,
    name: str,
    metadata: Mapping[str, Any],
    *,
    uid: str | None = None,
    by_status: bool = False,
) -> None:
    """Merges `metadata` ("annotations", "labels"; a value of None removes a key).

    ApiError 409 when `uid` differs, or a `resourceVersion` in `metadata`. `by_status`: uses only the right to write the
    pod's status, which includes annotations (source: kubernetes/pkg/registry/core/pod "podStatusStrategy").
    """
    body = {"metadata": {**metadata, **({"uid": uid} if uid is not None else {})}}
    path = f"{pod_path(namespace, name)}/status" if by_status else pod_path(namespace, name)
    client.request("PATCH", path, body=body, content_type=MERGE_PATCH)


def patch_node(
    client: KubeClient,
    name: str,
    *,
    annotations: Mapping[str, str | None] | None = None,
    labels: Mapping[str, str | None] | None = None,
    version: str | None = None,
) -> None:
    """Merges annotations and labels into a node; a value of None removes the key.

    ApiError 409 when the node's resourceVersion is not `version` any more.
    """
    given = (("annotations", annotations), ("labels", labels), ("resourceVersion", version))
    body = {"metadata": {key: value for key, value in given if value}}
    client.request("PATCH", f"/api/v1/nodes/{name}", body=body, content_type=MERGE_PATCH)


def patch_node_capacity(client: KubeClient, name: str, capacity: Mapping[str, str | None]) -> None:
    """Sets resources in the node's capacity; the kubelet copies them to allocatable."""
    body = {"status": {"capacity": dict(capacity)}}
    client.request("PATCH", f"/api/v1/nodes/{name}/status", body=body, content_type=MERGE_PATCH)


def patch_node_condition(
    client: KubeClient, name: str, type_: str, status: str, reason: str, message: str, *, changed: bool = True
) -> None:
    """Sets one condition of a node and leaves the others; `changed`: the status differs from before."""
    condition = {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now(),
        **({"lastTransitionTime": now()} if changed else {}),
    }
    body = {"status": {"conditions": [condition]}}
    client.request("PATCH", f"/api/v1/nodes/{name}/status", body=body, content_type=STRATEGIC_PATCH)


def evict(client: KubeClient, namespace: str, name: str, uid: str) -> None:
    """Ends a pod, with respect for disruption budgets (ApiError 429 when a budget forbids it now).

    This takes two steps: a dry run of the eviction asks the API server whether it is allowed, then the pod is deleted.
    An eviction request names no node, so no policy can restrict evictions to the pods of one node; a deletion can be
    restricted.
    """
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    }
    client.request("POST", f"{pod_path(namespace, name)}/eviction", body=body, params={"dryRun": "All"})
    delete_pod(client, namespace, name, uid)


def delete_pod(client: KubeClient, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None) -> None:
    """Deletes exactly this pod (ApiError 409 when another pod has its name now); None: the pod's own grace period."""
    body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
    if grace_seconds is not None:
        body["gracePeriodSeconds"] = grace_seconds
    client.request("DELETE", pod_path(namespace, name), body=body)


def pod_reference(namespace: str, name: str, uid: str) -> dict[str, str]:
    """The reference to a pod in an event."""
    return {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid}


def node_reference(name: str) -> dict[str, str]:
    """The reference to a node in an event; kubectl describe finds node events by the name in place of the uid."""
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}


def emit_event(
    client: KubeClient,
    regarding: Mapping[str, str],
    reason: str,
    message: str,
    type_: str = "Warning",
    *,
    reporting: str = "vgpu",
    host: str = "",
) -> None:
    """Emits an event about an object, which `kubectl describe` shows. Repeats are counted, not listed.

    Events are best effort, as everywhere in Kubernetes: a failure is logged and not raised.
    """
    namespace = regarding.get("namespace") or "default"
    said = "\0".join((regarding.get("uid", ""), reason, message, reporting, host))
    name = f"{regarding.get('name', 'unknown')}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    path = f"/api/v1/namespaces/{namespace}/events"
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": dict(regarding),
        "reason": reason,
        "message": message[:1024],  # the API server's limit
        "type": type_,
        "source": {"component": reporting, **({"host": host} if host else {})},
        "reportingComponent": reporting,
        "reportingInstance": host,
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "count": 1,
    }
    try:
        try:
            client.request("POST", path, body=body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            known = msgspec.json.decode(client.get(f"{path}/{name}"))
            again = {"count": known.get("count", 1) + 1, "lastTimestamp": now()}
            client.request("PATCH", f"{path}/{name}", body=again, content_type=MERGE_PATCH)
    except ApiError as error:
        log.warning("cannot write event %s about %s: %s", reason, regarding.get("name"), error)
