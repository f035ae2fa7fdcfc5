"""What the API server does to a pod on its own: defaults, canonical quantities, validation, permitted changes."""

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from vgpu.kube.client import ApiError
from vgpu.resources import parse_quantity

Pod = dict[str, Any]

_DECIMAL = {-3: "n", -2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_NATIVE = ("cpu", "memory", "ephemeral-storage")


def canonical(value: object) -> str:
    """A quantity as the API server writes it: 60000 becomes "60k", "1.5" becomes "1500m".

    ValueError if it is no quantity. Source: k8s.io/apimachinery/pkg/api/resource, Quantity.CanonicalizeBytes.

    Source: k8s.io/apimachinery/pkg/api/resource, Quantity.CanonicalizeBytes.
    """
    exact = parse_quantity(value)
    text = str(value)
    if text.endswith("i") and abs(exact) >= 1024:
        whole = math.ceil(exact) if exact > 0 else math.floor(exact)
        power = 0
        while whole and whole % 1024 == 0 and power < len(_BINARY) - 1:
            whole //= 1024
            power += 1
        return f"{whole}{_BINARY[power]}"
    nano = exact * 10**9
    whole = math.ceil(nano) if nano > 0 else math.floor(nano)  # finer than nano is rounded away from zero
    if not whole:
        return "0"
    power = -3
    while whole % 1000 == 0 and power < 6:
        whole //= 1000
        power += 1
    if re.search(r"[eE]\d|[eE][+-]\d", text):
        return f"{whole}e{3 * power}" if power else str(whole)
    return f"{whole}{_DECIMAL[power]}"


def is_extended(resource: str) -> bool:
    """Whether the resource is counted in whole units and never overcommitted, such as nvidia.com/gpu."""
    domain = resource.partition("/")[0] if "/" in resource else ""
    return bool(domain) and domain != "kubernetes.io" and not domain.endswith(".kubernetes.io")


def containers(pod: Pod) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field path, container) of init containers and containers."""
    for part in ("initContainers", "containers"):
        for index, container in enumerate(pod["spec"].get(part) or ()):
            yield f"spec.{part}[{index}]", container


def set_defaults(pod: Pod) -> None:
    """Fills in the API server's defaults, in place. Raises ApiError 400 for values that cannot be decoded."""
    spec = pod.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("containers"), list) or not spec["containers"]:
        raise ApiError(422, "Invalid", f'Pod "{pod["metadata"]["name"]}" is invalid: spec.containers: Required value')
    for path, container in containers(pod):
        if not isinstance(container, dict) or not container.get("name"):
            raise ApiError(422, "Invalid", f"{path}.name: Required value")
        resources = container.setdefault("resources", {})
        for part in ("limits", "requests"):
            for name, value in (resources.get(part) or {}).items():
                try:
                    resources[part][name] = canonical(value)
                except ValueError:
                    raise ApiError(
                        400,
                        "BadRequest",
                        f'Pod in version "v1" cannot be handled as a Pod: {path}.resources.{part}[{name}]: quantities'
                        f" must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
                    ) from None
        if resources.get("limits"):
            resources["requests"] = {**resources["limits"], **(resources.get("requests") or {})}
        image = container.get("image", "")
        latest = ":" not in image.rpartition("/")[2] or image.endswith(":latest")
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
    for key, value in (
        ("restartPolicy", "Always"),
        ("terminationGracePeriodSeconds", 30),
        ("dnsPolicy", "ClusterFirst"),
        ("schedulerName", "default-scheduler"),
        ("enableServiceLinks", True),
        ("priority", 0),
        ("preemptionPolicy", "PreemptLowerPriority"),
    ):
        spec.setdefault(key, value)
    spec.setdefault("securityContext", {})
    pod["status"] = {"phase": "Pending", "qosClass": qos_class(pod)}


def canonical_node(node: dict[str, Any]) -> dict[str, Any]:
    """The node with its quantities as the API server writes them. Raises ApiError 400 for an invalid quantity."""
    status = dict(node.get("status") or {})
    for part in ("capacity", "allocatable"):
        try:
            if status.get(part):
                status[part] = {name: canonical(value) for name, value in status[part].items()}
        except ValueError:
            raise ApiError(400, "BadRequest", f"status.{part} holds a value that is no quantity") from None
    return {**node, "status": status} if "status" in node else node


def qos_class(pod: Pod) -> str:
    """Guaranteed, Burstable or BestEffort, by cpu and memory of the containers."""
    asked, guaranteed = False, True
    for _, container in containers(pod):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        asked = asked or any(name in limits or name in requests for name in ("cpu", "memory"))
        guaranteed = guaranteed and all(limits.get(name) == requests.get(name, "") for name in ("cpu", "memory"))
    if not asked:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"


def validate(pod: Pod) -> None:
    """Raises ApiError 422 with all faults in one message."""
    faults = []
    names: set[str] = set()
    for path, container in containers(pod):
        if container["name"] in names:
            faults.append(f'{path}.name: Duplicate value: "{container["name"]}"')
        names.add(container["name"])
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for part in ("limits", "requests"):
            for name, text in (resources.get(part) or {}).items():
                field, value = f"{path}.resources.{part}[{name}]", parse_quantity(text)
                if "/" not in name and name not in _NATIVE and not name.startswith("hugepages-"):
                    faults.append(f'{field}: Invalid value: "{name}": must be a standard resource for containers')
                if value < 0:
                    faults.append(f'{field}: Invalid value: "{text}": must be greater than or equal to 0')
                if is_extended(name) and value.denominator != 1:
                    faults.append(f"{field}: Invalid value: {text}: must be an integer")
        for name, text in requests.items():
            field = f"{path}.resources.requests[{name}]"
            limit = limits.get(name)
            if is_extended(name) and limit is None:
                faults.append(f"{path}.resources.limits: Required value: Limit must be set for non overcommitable"
                              f" resources: {name}")  # fmt: skip
            elif is_extended(name) and limit != text:
                faults.append(f'{field}: Invalid value: "{text}": must be equal to {name} limit of {limit}')
            elif limit is not None and parse_quantity(text) > parse_quantity(limit):
                faults.append(
                    f'{field}: Invalid value: "{text}": must be less than or equal to {name} limit of {limit}'
                )
    if faults:
        many = f"[{', '.join(faults)}]" if len(faults) > 1 else faults[0]
        raise ApiError(422, "Invalid", f'Pod "{pod["metadata"]["name"]}" is invalid: {many}')


def _fixed(pod: Pod) -> dict[str, Any]:
    """The part of the spec that never changes."""
    spec = {key: value for key, value in pod["spec"].items() if key not in ("activeDeadlineSeconds", "tolerations")}
    for part in ("containers", "initContainers"):
        spec[part] = [{key: item[key] for key in item if key != "image"} for item in spec.get(part) or ()]
    return spec


def check_update(old: Pod, new: Pod) -> None:
    """Raises ApiError 422 when the change touches a fixed field of the spec."""
    before, after = _fixed(old), _fixed(new)
    if before != after:
        changed = sorted(key for key in before | after if before.get(key) != after.get(key))
        raise ApiError(
            422,
            "Invalid",
            f'Pod "{old["metadata"]["name"]}" is invalid: spec: Forbidden: pod updates may not change fields other than'
            " `spec.containers[*].image`, `spec.initContainers[*].image`, `spec.activeDeadlineSeconds`,"
            f" `spec.tolerations` (changed: {', '.join(changed)})",
        )


def requested(pod: Pod) -> dict[str, Fraction]:
    """What a pod asks of its node, by resource.

    It is the larger of two amounts: apps and sidecars together, or the largest init container with the sidecars that
    run at that time. Source: KEP-753, "resource calculation".
    """
    sidecars: dict[str, Fraction] = {}
    peak: dict[str, Fraction] = {}
    apps: dict[str, Fraction] = {}
    for container in pod["spec"].get("initContainers") or ():
        asked = _requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars = now = _sum(sidecars, asked)
        else:
            now = _sum(sidecars, asked)
        peak = {name: max(peak.get(name, Fraction()), now.get(name, Fraction())) for name in peak | now}
    for container in pod["spec"]["containers"]:
        apps = _sum(apps, _requests(container))
    total = _sum(apps, sidecars)
    return {name: max(peak.get(name, Fraction()), total.get(name, Fraction())) for name in peak | total}


def _requests(container: dict[str, Any]) -> dict[str, Fraction]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse_quantity(value) for name, value in asked.items()}


def _sum(left: dict[str, Fraction], right: dict[str, Fraction]) -> dict[str, Fraction]:
    return {name: left.get(name, Fraction()) + right.get(name, Fraction()) for name in left | right}
