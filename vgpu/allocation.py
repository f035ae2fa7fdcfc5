"""Who holds which slice: the record on a pod (`vgpu.io/allocation`) and what it occupies on the cards."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from vgpu.devices import GpuSlice
from vgpu.names import ALLOCATION


class Kind(StrEnum):
    """When a container runs in the life of its pod."""

    INIT = "init"  #: runs to completion before the next one starts
    SIDECAR = "sidecar"  #: init container with restartPolicy Always: runs until the pod ends
    APP = "app"


class Allocation(msgspec.Struct, frozen=True):
    """Slices of every GPU container of a pod, by container name."""

    containers: dict[str, tuple[GpuSlice, ...]]
    v: int = 1


class Held(msgspec.Struct, frozen=True):
    """What a pod occupies on one card, at its peak."""

    slots: int = 0
    mem: int = 0  #: MiB of limits
    phys: int = 0  #: MiB of guarantees
    cores: int = 0  #: %
    alone: int = 0  #: slices with cores 100, which share the card with nobody, whatever the card's core scaling

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.slots + other.slots,
            self.mem + other.mem,
            self.phys + other.phys,
            self.cores + other.cores,
            self.alone + other.alone,
        )

    def peak(self, other: "Held") -> "Held":
        """The larger value of each figure: two parts of a pod that never run at the same time."""
        return Held(
            max(self.slots, other.slots),
            max(self.mem, other.mem),
            max(self.phys, other.phys),
            max(self.cores, other.cores),
            max(self.alone, other.alone),
        )


def encode(allocation: Allocation) -> str:
    body = {"v": allocation.v, "containers": allocation.containers}
    return msgspec.json.encode(body).decode()


def decode(text: str) -> Allocation:
    """Reads the annotation; raises ValueError naming it when it is malformed or of another version."""
    try:
        allocation = msgspec.json.decode(text, type=Allocation)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"annotation {ALLOCATION}: {error}") from None
    if allocation.v != 1:
        raise ValueError(f"annotation {ALLOCATION}: version {allocation.v} is not known, 1 is")
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


def held(containers: Iterable[tuple[Kind, Iterable[GpuSlice]]]) -> dict[str, Held]:
    """What a pod occupies on each card at its peak; `containers` in the order of the spec, init containers first.

    Init containers run one after the other beside the sidecars started before them; apps run beside all sidecars.
    Source: Kubernetes' own rule for pods with sidecars (KEP-753, "resource calculation").
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
