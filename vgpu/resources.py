"""What a pod asks for: quantities, the request of each container, and the sentences for invalid requests.

Pure: pods come in as the decoded JSON of the API server.
"""

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

import msgspec

from vgpu import names
from vgpu.allocation import Kind

_SUFFIXES: Final = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_QUANTITY: Final = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d{1,3})|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII)

PLACEMENT_POLICIES: Final = ("spread", "binpack")
CORE_POLICIES: Final = ("fixed", "elastic", "none")
HAMI_CORE: Final = "hami-core"  #: HAMi's word for cards that are shared by limits
MODES: Final = ("share", HAMI_CORE)
MEMORY_MODES: Final = ("static", "movable")
MAX_CONTAINERS: Final = 32  #: largest number of containers in one pod that may ask for cards


class RequestError(ValueError):
    """A pod asks for something that it cannot get; `str()` is one sentence: field, value, what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} is {_quoted(value)}: {allowed}")


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    shown = text if len(text) <= 80 else text[:77] + "..."
    return f'"{shown}"' if isinstance(value, str) else shown


def parse_quantity(value: object) -> Fraction:
    """The exact value of a Kubernetes quantity ("3000", "60k", "1Ki", "1e3", "500m", 2).

    ValueError if it is no quantity. Source: k8s.io/apimachinery/pkg/api/resource, "Quantity" grammar.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("not a quantity")
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError("not a quantity")
    number, exponent, suffix = match.groups()
    if exponent:
        return Fraction(number) * Fraction(10) ** int(exponent[1:])
    return Fraction(number) * _SUFFIXES[suffix or ""]


class ResourceNames(msgspec.Struct, frozen=True):
    """The names in force in this cluster."""

    gpu: str = names.RESOURCE_GPU
    memory: str = names.RESOURCE_MEMORY
    percentage: str = names.RESOURCE_MEMORY_PERCENTAGE
    cores: str = names.RESOURCE_CORES
    priority: str = names.RESOURCE_PRIORITY


class Rules(msgspec.Struct, frozen=True):
    """Names and defaults that turn a container's resources into a request."""

    names: ResourceNames = ResourceNames()
    default_memory: int = 0  #: MiB per card; 0: the whole card
    default_cores: int = 0
    node_policy: str = "spread"
    gpu_policy: str = "spread"
    core_policy: str = "fixed"


class GpuRequest(msgspec.Struct, frozen=True):
    """The request of one container, after defaults."""

    count: int  #: number of different cards
    memory: int = 0  #: MiB on each card; 0: `percent` decides
    percent: int = 100  #: % of each card's physical memory, where `memory` is 0
    cores: int = 0  #: % of each card's time; 0: no guarantee, 100: alone on the card
    priority: int | None = None

    @property
    def whole_card(self) -> bool:
        """Whether the container asks for all memory of the card, explicitly or by default."""
        return not self.memory and self.percent == 100

    def memory_on(self, physical: int) -> int:
        """MiB that this request means on a card of `physical` MiB."""
        return self.memory or physical * self.percent // 100


class CardSelector(msgspec.Struct, frozen=True):
    """Which cards a pod accepts."""

    use_types: tuple[str, ...] = ()
    nouse_types: tuple[str, ...] = ()
    use_uuids: tuple[str, ...] = ()
    nouse_uuids: tuple[str, ...] = ()
    numa_bind: bool = False


class ContainerRequest(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    gpu: GpuRequest


class PodRequest(msgspec.Struct, frozen=True):
    """A pod's request: its GPU containers in the order of the spec (init containers first), and its annotations."""

    containers: tuple[ContainerRequest, ...]
    selector: CardSelector = CardSelector()
    node_policy: str = "spread"
    gpu_policy: str = "spread"
    core_policy: str = "fixed"
    cores_limit: int | None = None  #: elastic ceiling in %
    oversubscribe: bool | None = None
    memory_mode: str | None = None  #: one of MEMORY_MODES; None: the node's mode


def containers_of(spec: Mapping[str, Any]) -> Iterator[tuple[str, Kind, Mapping[str, Any]]]:
    """(path, kind, container) of a pod spec in the order of their start; ephemeral containers hold no resources."""
    for container in spec.get("initContainers") or ():
        kind = Kind.SIDECAR if container.get("restartPolicy") == "Always" else Kind.INIT
        yield f"spec.initContainers[{container.get('name', '')}]", kind, container
    for container in spec.get("containers") or ():
        yield f"spec.containers[{container.get('name', '')}]", Kind.APP, container


def read_container(path: str, container: Mapping[str, Any], rules: Rules) -> GpuRequest | None:
    """The request of one container, None when the container asks for no GPU. Raises RequestError."""
    known = rules.names
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}

    def number(name: str, low: int, high: int, allowed: str) -> int | None:
        where = "limits" if name in limits else "requests"
        value = limits.get(name, requests.get(name))
        if value is None:
            return None
        field = f"{path}.resources.{where}[{name}]"
        try:
            exact = parse_quantity(value)
        except ValueError:
            raise RequestError(field, value, allowed) from None
        if exact.denominator != 1 or not low <= exact <= high:
            raise RequestError(field, value, allowed)
        return int(exact)

    count = number(known.gpu, 0, 1024, "must be a whole number of cards, 1 or more")
    memory = number(
        known.memory,
        1,
        names.MAX_MEMORY_MIB,
        f"must be a whole number of MiB from 1 to {names.MAX_MEMORY_MIB}; the unit is MiB: write 8192, not 8Gi",
    )
    percent = number(known.percentage, 1, 100, "must be a whole number from 1 to 100 (% of the card's memory)")
    cores = number(known.cores, 0, 100, "must be a whole number from 0 to 100 (% of the card's time)")
    priority = number(known.priority, 0, 1, "must be 0 (high) or 1 (low)")
    if count is None and memory is None and percent is None and cores is None:
        return None
    if count == 0:
        if memory is not None or percent is not None or cores:
            raise RequestError(
                f"{path}.resources.limits[{known.gpu}]",
                0,
                "must be 1 or more if the container asks for memory or cores",
            )
        return None
    if memory is None and percent is None and rules.default_memory:
        memory = rules.default_memory
    return GpuRequest(
        count=1 if count is None else count,
        memory=memory or 0,
        percent=100 if percent is None or memory else percent,
        cores=rules.default_cores if cores is None else cores,
        priority=priority,
    )


def _list(annotations: Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in annotations.get(key, "").split(",") if part.strip())


def _choice(annotations: Mapping[str, str], key: str, allowed: tuple[str, ...], default: str) -> str:
    value = annotations.get(key, default)
    if value not in allowed:
        raise RequestError(f"metadata.annotations[{key}]", value, f"must be one of {', '.join(allowed)}")
    return value


def read_pod(pod: Mapping[str, Any], rules: Rules) -> PodRequest | None:
    """What a pod asks for, None when none of its containers asks for a GPU. Raises RequestError."""
    found = []
    for path, kind, container in containers_of(pod.get("spec") or {}):
        request = read_container(path, container, rules)
        if request is not None:
            found.append(ContainerRequest(container.get("name", ""), kind, request))
    if not found:
        return None
    if len(found) > MAX_CONTAINERS:
        told = f"must be {MAX_CONTAINERS} or less in one pod; the scheduler cannot choose cards for more in time"
        raise RequestError("the number of containers that ask for cards", len(found), told)
    notes: Mapping[str, str] = (pod.get("metadata") or {}).get("annotations") or {}
    flags = ("true", "false")
    _choice(notes, names.VGPU_MODE, MODES, "share")
    ceiling = None
    if names.CORES_LIMIT in notes:
        value = notes[names.CORES_LIMIT]
        if not value.isdecimal() or not 1 <= int(value) <= 100:
            raise RequestError(
                f"metadata.annotations[{names.CORES_LIMIT}]", value, "must be a whole number from 1 to 100 (%)"
            )
        ceiling = int(value)
    return PodRequest(
        containers=tuple(found),
        selector=CardSelector(
            use_types=_list(notes, names.USE_GPU_TYPE),
            nouse_types=_list(notes, names.NOUSE_GPU_TYPE),
            use_uuids=_list(notes, names.USE_GPU_UUID),
            nouse_uuids=_list(notes, names.NOUSE_GPU_UUID),
            numa_bind=_choice(notes, names.NUMA_BIND, flags, "false") == "true",
        ),
        node_policy=_choice(notes, names.NODE_POLICY, PLACEMENT_POLICIES, rules.node_policy),
        gpu_policy=_choice(notes, names.GPU_POLICY, PLACEMENT_POLICIES, rules.gpu_policy),
        core_policy=_choice(notes, names.CORE_POLICY, CORE_POLICIES, rules.core_policy),
        cores_limit=ceiling,
        oversubscribe=None
        if names.OVERSUBSCRIBE not in notes
        else _choice(notes, names.OVERSUBSCRIBE, flags, "true") == "true",
        memory_mode=None
        if names.MEMORY_MODE not in notes
        else _choice(notes, names.MEMORY_MODE, MEMORY_MODES, "static"),
    )
