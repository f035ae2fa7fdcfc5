"""The record on a pod of its slices (`vgpu.io/allocation`), and what the record occupies on the cards."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from vgpu.devices import Gpu, GpuSlice
from vgpu.names import ALLOCATION


class Kind(StrEnum):
    """When a container runs in the life of its pod."""

    INIT = "init"  #: runs to completion before the next container starts
    SIDECAR = "sidecar"  #: init container with restartPolicy Always: runs until the pod ends
    APP = "app"


class Allocation(msgspec.Struct, frozen=True, gc=False):
    """Slices of every GPU container of a pod, by container name.

    `moving`: the cards of the kubelet's ids, for containers whose slices are on other cards. By this, the agent asks
    for a move; the scheduler makes the move (`moved`) when there is room. Until then the pod holds both.
    """

    containers: dict[str, tuple[GpuSlice, ...]]
    moving: dict[str, tuple[GpuSlice, ...]] = {}
    v: int = 1

    def of(self, container: str) -> tuple[GpuSlice, ...]:
        """All slices that a container blocks for others: its own, and the slices to which it moves."""
        both = (*self.containers.get(container, ()), *self.moving.get(container, ()))
        return tuple(dict.fromkeys(both))

    def moved(self) -> "Allocation":
        """The record after the move."""
        return Allocation({**self.containers, **self.moving})

    def leaving(self) -> "Allocation":
        """The record of a pod that makes room for another pod before it moves: it holds only its new cards."""
        stay = {name: slices for name, slices in self.containers.items() if name not in self.moving}
        return Allocation(stay, self.moving)


class Held(msgspec.Struct, frozen=True, gc=False):
    """What a pod occupies on one card, at its peak."""

    slots: int = 0
    mem: int = 0  #: MiB of limits
    phys: int = 0  #: MiB of guarantees
    cores: int = 0  #: %
    alone: int = 0  #: slices with cores 100, which have the card alone, at any core scaling

    @property
    def behind(self) -> int:
        """MiB that may be in host memory."""
        return self.mem - self.phys

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.slots + other.slots,
            self.mem + other.mem,
            self.phys + other.phys,
            self.cores + other.cores,
            self.alone + other.alone,
        )

    def peak(self, other: "Held") -> "Held":
        """The larger value of each figure, for two parts of a pod that never run at the same time."""
        return Held(
            max(self.slots, other.slots),
            max(self.mem, other.mem),
            max(self.phys, other.phys),
            max(self.cores, other.cores),
            max(self.alone, other.alone),
        )


def encode(allocation: Allocation) -> str:
    body: dict[str, object] = {"v": allocation.v, "containers": allocation.containers}
    if allocation.moving:
        body["moving"] = allocation.moving
    return msgspec.json.encode(body).decode()


def decode(text: str) -> Allocation:
    """Reads the annotation; raises ValueError naming it when the text is malformed or of another version."""
    try:
        allocation = msgspec.json.decode(text, type=Allocation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"annotation {ALLOCATION}: {error}") from None
    if allocation.v != 1:
        raise ValueError(f"annotation {ALLOCATION}: version {allocation.v} is unknown; this release supports version 1")
    return allocation


def of_slices(slices: Iterable[GpuSlice]) -> dict[str, Held]:
    """What slices that run at the same time occupy, by card UUID."""
    held: dict[str, Held] = {}
    for piece in slices:
        one = Held(1, piece.mem, piece.guarantee, piece.cores, int(piece.cores == 100))
        held[piece.uuid] = held.get(piece.uuid, Held()) + one
    return held


def merge(left: dict[str, Held], right: dict[str, Held]) -> dict[str, Held]:
    """Sum, card by card."""
    return {uuid: left.get(uuid, Held()) + right.get(uuid, Held()) for uuid in left | right}


def excess(
    cards: Mapping[str, Gpu], before: Mapping[str, Held], wanted: Mapping[str, Held], *, known: bool = False
) -> str | None:
    """A sentence for the first card on which `wanted` does not fit next to what others hold; None when all fits.

    The rules: Σ limits ≤ card × scaling, Σ guarantees ≤ card, Σ of what is not guaranteed ≤ host memory behind the
    card, Σ cores ≤ 100 % × scaling, and no other pod next to a pod that holds 100 %. `known`: the pod has been on the
    card before, and its host memory too, at any scaling now.
    """
    for uuid, asked in wanted.items():
        gpu = cards.get(uuid)
        if gpu is None:
            return f"card {uuid} is not on this node"
        others = before.get(uuid, Held())
        name = f"card {gpu.index} ({gpu.model}, {uuid})"
        if others.alone and asked.slots:
            return f"another pod holds all of {name} (cores 100)"
        if asked.alone and others.slots:
            return f"{name} has slices of other pods, so no pod can hold all of it (cores 100)"
        for what, taken, more, room in (
            ("MiB of memory", others.mem, 0 if known else asked.mem, gpu.memory),
            (
                "MiB of host memory",
                others.behind,
                0 if known else asked.behind,
                max(0, gpu.memory - gpu.physical_memory),
            ),
            ("MiB of physical memory", others.phys, asked.phys, gpu.physical_memory),
            ("% of cores", others.cores, asked.cores, gpu.cores),
            ("slices", others.slots, asked.slots, gpu.slots),
        ):
            if what == "% of cores" and asked.alone:
                continue  # no other pod is on the card, and 100 % of it exists at any scaling
            if more and taken + more > room:
                return f"{name} has {room} {what}, {taken} held by other pods: {more} more do not fit"
    return None


def held(containers: Iterable[tuple[Kind, Iterable[GpuSlice]]]) -> dict[str, Held]:
    """What a pod occupies on each card at its peak; `containers` in the order of the spec, init containers first.

    Init containers run one after the other, next to the sidecars that started before them; apps run next to all
    sidecars. Source: Kubernetes' own rule for pods with sidecars (KEP-753, "resource calculation").
    """
    sidecars: dict[str, Held] = {}
    peak: dict[str, Held] = {}
    running: dict[str, Held] = {}
    for kind, slices in containers:
        occupied = of_slices(slices)
        if kind is Kind.SIDECAR:
            sidecars = merge(sidecars, occupied)
            now = sidecars
        elif kind is Kind.INIT:
            now = merge(sidecars, occupied)
        else:
            running = merge(running, occupied)
            continue
        peak = {uuid: peak.get(uuid, Held()).peak(now.get(uuid, Held())) for uuid in peak | now}
    now = merge(running, sidecars)
    return {uuid: peak.get(uuid, Held()).peak(now.get(uuid, Held())) for uuid in peak | now}
