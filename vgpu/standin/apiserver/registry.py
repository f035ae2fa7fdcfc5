"""The verbs of the API server on any resource: create, update, patch, delete, bind, evict."""

import copy
import random
import string
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from vgpu.kube.client import ApiError
from vgpu.kube.writes import now
from vgpu.standin.apiserver import patches, podrules
from vgpu.standin.apiserver.store import Object, Store
from vgpu.standin.apiserver.webhooks import Subject, Webhooks

_KINDS = {
    "nodes": "Node", "pods": "Pod", "namespaces": "Namespace", "events": "Event", "secrets": "Secret",
    "configmaps": "ConfigMap", "services": "Service", "endpoints": "Endpoints", "serviceaccounts": "ServiceAccount",
    "leases": "Lease", "deployments": "Deployment", "daemonsets": "DaemonSet", "jobs": "Job",
    "resourcequotas": "ResourceQuota", "priorityclasses": "PriorityClass",
    "mutatingwebhookconfigurations": "MutatingWebhookConfiguration",
    "validatingwebhookconfigurations": "ValidatingWebhookConfiguration",
}  # fmt: skip
_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
_CARRIED = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
ATTEMPTS = 20  #: tries of a patch that meets concurrent changes


class Where(NamedTuple):
    """The resource that a request path names."""

    group: str  #: "" for the core group
    version: str
    resource: str
    namespace: str | None  #: None: an object without namespace, or all namespaces
    name: str | None
    subresource: str

    @property
    def collection(self) -> str:
        return f"{self.group}/{self.resource}"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def kind(self) -> str:
        return _KINDS.get(self.resource, self.resource.removesuffix("s").capitalize())

    @property
    def title(self) -> str:
        """The name in messages: pods, daemonsets.apps."""
        return f"{self.resource}.{self.group}" if self.group else self.resource


class Caller(NamedTuple):
    """The user of a request, and the request's options."""

    user: dict[str, Any]
    dry_run: bool = False


class Registry:
    """Applies requests to a store."""

    def __init__(self, store: Store, webhooks: Webhooks) -> None:
        self.store = store
        self._webhooks = webhooks
        for name in _NAMESPACES:
            with store.lock:
                if store.get("/namespaces", "", name) is None:
                    labels = {"kubernetes.io/metadata.name": name}
                    meta = {"name": name, "labels": labels, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
                    store.put("/namespaces", {"kind": "Namespace", "apiVersion": "v1", "metadata": meta})

    def get(self, where: Where) -> Object:
        found = self.store.get(where.collection, where.namespace or "", where.name or "")
        if found is None:
            raise ApiError(404, "NotFound", f'{where.title} "{where.name}" not found')
        return found

    def create(self, where: Where, body: Object, caller: Caller) -> tuple[Object, list[str]]:
        """Creates an object; returns the stored object and warnings of admission."""
        item = copy.deepcopy(body)
        self._check_type(where, item)
        meta = item.setdefault("metadata", {})
        if meta.get("resourceVersion"):
            raise ApiError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if not meta.get("name"):
            if not meta.get("generateName"):
                raise ApiError(422, "Invalid", f"{where.kind} is invalid: metadata.name: Required value")
            meta["name"] = meta["generateName"] + "".join(random.choices(string.ascii_lowercase + string.digits, k=5))
        for key in _CARRIED:
            meta.pop(key, None)
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if where.namespace is not None:
            meta["namespace"] = where.namespace
            if self.store.get("/namespaces", "", where.namespace) is None:
                raise ApiError(404, "NotFound", f'namespaces "{where.namespace}" not found')
        elif where.resource == "namespaces":
            meta["labels"] = {**(meta.get("labels") or {}), "kubernetes.io/metadata.name": meta["name"]}
        if where.collection == "/pods":
            meta["generation"] = 1
            self._set_priority(item)
            podrules.set_defaults(item)
        elif where.collection == "/nodes":
            item = podrules.canonical_node(item)
        subject = self._subject("CREATE", where, meta["name"], caller)
        item, warnings = self._webhooks.mutate(subject, item, None)
        if where.collection == "/pods":
            podrules.set_defaults(item)
            podrules.validate(item)
        warnings += self._webhooks.validate(subject, item, None)
        with self.store.lock:
            if self.store.get(where.collection, where.namespace or "", meta["name"]) is not None:
                raise ApiError(409, "AlreadyExists", f'{where.title} "{meta["name"]}" already exists')
            return (item if caller.dry_run else self.store.put(where.collection, item)), warnings

    def _set_priority(self, pod: Object) -> None:
        name = (pod.get("spec") or {}).get("priorityClassName")
        if not name:
            return
        found = self.store.get("scheduling.k8s.io/priorityclasses", "", name)
        if found is None:
            text = f'pods "{pod["metadata"]["name"]}" is forbidden: no PriorityClass with name {name} was found'
            raise ApiError(403, "Forbidden", text)
        pod["spec"] |= {
            "priority": found.get("value", 0),
            "preemptionPolicy": found.get("preemptionPolicy", "PreemptLowerPriority"),
        }

    def update(self, where: Where, body: Object, caller: Caller) -> tuple[Object, list[str]]:
        """Replaces the object, or its status. ApiError 409 when the object has changed since `body` was read."""
        self._check_type(where, body)
        if (body.get("metadata") or {}).get("name", where.name) != where.name:
            raise ApiError(400, "BadRequest", "the name of the object does not match the name on the URL")
        return self._change(where, lambda _: copy.deepcopy(body), caller)

    def patch(self, where: Where, patch: Any, content_type: str, caller: Caller) -> tuple[Object, list[str]]:
        """Applies a merge, JSON or strategic merge patch."""
        apply = {
            "application/merge-patch+json": patches.merge,
            "application/json-patch+json": patches.json_patch,
            "application/strategic-merge-patch+json": patches.strategic,
        }.get(content_type)
        if apply is None:
            raise ApiError(
                415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}"
            )

        def changed(old: Object) -> Object:
            try:
                new: Object = apply(old, patch)
            except patches.PatchError as error:
                raise ApiError(
                    422, "Invalid", f"the server rejected our request due to an error in our request: {error}"
                ) from None
            if not isinstance(new, dict) or not isinstance(new.get("metadata"), dict):
                raise ApiError(422, "Invalid", "the patch leaves no object with metadata")
            return new

        return self._change(where, changed, caller)

    def _change(self, where: Where, make: Callable[[Object], Object], caller: Caller) -> tuple[Object, list[str]]:
        for _ in range(ATTEMPTS):
            old = self.get(where)
            new = self._carry(where, old, make(old))
            if where.collection == "/nodes":
                new = podrules.canonical_node(new)
            warnings: list[str] = []
            if not where.subresource:
                subject = self._subject("UPDATE", where, where.name or "", caller)
                new, warnings = self._webhooks.mutate(subject, new, old)
                if where.collection == "/pods":
                    podrules.check_update(old, new)
                warnings += self._webhooks.validate(subject, new, old)
            with self.store.lock:
                if self.get(where) is not old:
                    continue
                if new == old or caller.dry_run:
                    return new, warnings
                meta = new["metadata"]
                if meta.get("deletionTimestamp") and not meta.get("finalizers") and where.collection != "/pods":
                    return self.store.remove(where.collection, new), warnings
                return self.store.put(where.collection, new), warnings
        raise self._conflict(where, "the object has been modified; please apply your changes to the latest version")

    def _carry(self, where: Where, old: Object, new: Object) -> Object:
        """The new object, with all fields that this kind of request cannot change taken from the old object."""
        before, meta = old["metadata"], dict(new.get("metadata") or {})
        if meta.get("resourceVersion", before["resourceVersion"]) != before["resourceVersion"]:
            text = "the object has been modified; please apply your changes to the latest version and try again"
            raise self._conflict(where, text)
        if meta.get("uid", before["uid"]) != before["uid"]:
            text = f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {before['uid']}"
            raise self._conflict(where, text)
        for key in (*_CARRIED, "resourceVersion", "name", "namespace"):
            meta.pop(key, None)
            if key in before:
                meta[key] = before[key]
        kept = "spec" if where.subresource == "status" else "status"
        new = {**new, "kind": old.get("kind", where.kind), "apiVersion": old.get("apiVersion", where.api_version)}
        new = {key: value for key, value in new.items() if key != kept}
        return {**new, "metadata": meta, **({kept: old[kept]} if kept in old else {})}

    def delete(self, where: Where, options: Object, caller: Caller) -> Object:
        """Deletes an object, or marks a running pod or an object with finalizers as being deleted."""
        old = self.get(where)
        wanted = options.get("preconditions") or {}
        for key, name in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(key, old["metadata"][key]) != old["metadata"][key]:
                text = f"Precondition failed: {name} in precondition: {wanted[key]}"
                raise self._conflict(where, f"{text}, {name} in object meta: {old['metadata'][key]}")
        self._webhooks.validate(self._subject("DELETE", where, where.name or "", caller), old, old)
        with self.store.lock:
            old = self.get(where)
            if caller.dry_run:
                return old
            grace = self._grace(where, old, options.get("gracePeriodSeconds"))
            if not grace and not old["metadata"].get("finalizers"):
                return self.store.remove(where.collection, old)
            meta = old["metadata"]
            if meta.get("deletionTimestamp") and meta.get("deletionGracePeriodSeconds", 0) <= grace:
                return old
            meta = {**meta, "deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
            return self.store.put(where.collection, {**old, "metadata": meta})

    @staticmethod
    def _grace(where: Where, item: Object, asked: int | None) -> int:
        """Grace period in seconds; a pod that no kubelet runs is deleted at once."""
        if where.collection != "/pods":
            return 0
        if not item["spec"].get("nodeName") or (item.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return 0
        return int(item["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked)

    def bind(self, where: Where, binding: Object) -> None:
        """Assigns a pod to a node, and merges its annotations in the same step.

        Source: kubernetes/pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata.
        """
        node = (binding.get("target") or {}).get("name")
        if not node:
            raise ApiError(422, "Invalid", "Binding is invalid: target.name: Required value")
        given = binding.get("metadata") or {}
        with self.store.lock:
            pod = self.get(where)
            meta, spec = pod["metadata"], pod["spec"]
            if given.get("uid") and given["uid"] != meta["uid"]:
                text = f"Precondition failed: UID in precondition: {given['uid']}, UID in object meta: {meta['uid']}"
                raise self._conflict(where, text, "pods/binding")
            if meta.get("deletionTimestamp"):
                text = f"pod {where.name} is being deleted, cannot be assigned to a host"
                raise self._conflict(where, text, "pods/binding")
            if spec.get("nodeName"):
                text = f'pod {where.name} is already assigned to node "{spec["nodeName"]}"'
                raise self._conflict(where, text, "pods/binding")
            annotations = {**(meta.get("annotations") or {}), **(given.get("annotations") or {})}
            status = pod.get("status") or {}
            others = [one for one in status.get("conditions") or () if one.get("type") != "PodScheduled"]
            scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}
            self.store.put(
                where.collection,
                {
                    **pod,
                    "metadata": {**meta, **({"annotations": annotations} if annotations else {})},
                    "spec": {**spec, "nodeName": node},
                    "status": {**status, "conditions": [*others, scheduled]},
                },
            )

    def _conflict(self, where: Where, text: str, title: str = "") -> ApiError:
        return ApiError(
            409, "Conflict", f'Operation cannot be fulfilled on {title or where.title} "{where.name}": {text}'
        )

    def _check_type(self, where: Where, body: Object) -> None:
        version = body.setdefault("apiVersion", where.api_version)
        if version != where.api_version:
            text = (
                f"the API version in the data ({version}) does not match the expected API version ({where.api_version})"
            )
            raise ApiError(400, "BadRequest", text)
        body.setdefault("kind", where.kind)
        namespace = (body.get("metadata") or {}).get("namespace")
        if namespace and namespace != where.namespace:
            text = "the namespace of the provided object does not match the namespace sent on the request"
            raise ApiError(400, "BadRequest", text)

    @staticmethod
    def _subject(operation: str, where: Where, name: str, caller: Caller) -> Subject:
        return Subject(
            operation, where.group, where.version, where.resource, where.kind, where.namespace or "", name,
            caller.user, caller.dry_run,
        )  # fmt: skip
