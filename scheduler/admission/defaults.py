"""Requests that a LimitRange of the namespace has written into a container.

The API server applies a LimitRange before it calls a webhook, and says in an annotation what it wrote: "LimitRanger
plugin set: nvidia.com/gpumem limit for container log; …" (plugin/pkg/admission/limitranger). A default is a request
like any other, so the container gets a card; `nvidia.com/gpu: 0` in the container means that it wants none. Where the
LimitRange also sets `nvidia.com/gpu: 0`, this counts for containers that ask for nothing themselves.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from scheduler.admission.checks import containers, where
from scheduler.admission.patches import Patch
from scheduler.wire import Container, Pod
from vgpu.resources import Rules, parse_quantity

ANNOTATION: Final = "kubernetes.io/limit-ranger"
_WRITTEN: Final = re.compile(r"([^:;]+?) (?:limit|request) for (init container|container) (\S+)")
_GROUPS: Final = {"initContainers": "init container", "containers": "container"}
PARTS: Final = ("limits", "requests")


def declined(pod: Pod, rules: Rules, patch: Patch) -> tuple[Pod, list[str]]:
    """The pod without the defaults in containers that say `gpu: 0`, and warnings; the operations go into `patch`.

    Other containers that ask only by a default get a warning.
    """
    known = rules.names
    amounts = (known.memory, known.percentage, known.cores)
    written = dict(_written(pod))
    warnings: list[str] = []
    groups: dict[str, list[Container]] = {}
    for group, index, container in containers(pod):
        groups.setdefault(group, []).append(container)
        defaults = written.get((_GROUPS.get(group, ""), container.name), set())
        given = [name for name in (known.gpu, *amounts) if name in defaults and _asked(container, name) is not None]
        if not given or container.resources is None:
            continue
        own = [name for name in (known.gpu, *amounts) if name not in given and _asked(container, name) is not None]
        if _is_zero(_asked(container, known.gpu)):
            if known.gpu in given:
                given = [known.gpu] if own else [name for name in given if name != known.gpu]
            if not given:
                continue
            why = f"asks for {', '.join(own)}" if known.gpu in given else f"asks for no card ({known.gpu}: 0)"
            names = ", ".join(given)
            warnings.append(f"{where(group, container)} {why}: admission removes {names}, which a LimitRange has set")
            parts: dict[str, Mapping[str, str | int | float] | None] = {}
            for part in PARTS:
                values = getattr(container.resources, part)
                for name in given:
                    if values and name in values:
                        patch.remove(("spec", group, index, "resources", part, name))
                parts[part] = values and {key: value for key, value in values.items() if key not in given}
            resources = msgspec.structs.replace(container.resources, **parts)
            groups[group][-1] = msgspec.structs.replace(container, resources=resources)
        elif known.memory in given and known.percentage in own:
            warnings.append(
                f"{where(group, container)} has {known.memory}: {_asked(container, known.memory)} by a LimitRange of"
                f" the namespace, which counts in place of its {known.percentage}; set {known.memory} in it"
            )
        elif not own:
            amounts_set = ", ".join(f"{name}: {_asked(container, name)}" for name in given)
            warnings.append(
                f"{where(group, container)} gets a card because a LimitRange of the namespace sets {amounts_set};"
                f" set {known.gpu}: 0 in the container if it needs no card"
            )
    return msgspec.structs.replace(pod, spec=msgspec.structs.replace(pod.spec, **groups)), warnings


def _written(pod: Pod) -> Iterator[tuple[tuple[str, str], set[str]]]:
    """((kind, container), resources that a LimitRange set in that container)."""
    found: dict[tuple[str, str], set[str]] = {}
    _, _, text = (pod.metadata.annotations or {}).get(ANNOTATION, "").partition(": ")
    for part in text.split("; "):
        match = _WRITTEN.fullmatch(part.strip())
        if match:
            found.setdefault((match[2], match[3]), set()).update(name.strip() for name in match[1].split(","))
    yield from found.items()


def _asked(container: Container, name: str) -> object:
    resources = container.resources
    if resources is None:
        return None
    return (resources.limits or {}).get(name, (resources.requests or {}).get(name))


def _is_zero(value: object) -> bool:
    try:
        return value is not None and parse_quantity(value) == 0
    except ValueError:
        return False
