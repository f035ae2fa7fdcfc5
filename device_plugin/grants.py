"""What may be granted: never more of a card than there is, whatever the scheduler said; and the core policy. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from vgpu import names
from vgpu.allocation import Held, merge
from vgpu.devices import Gpu, GpuSlice
from vgpu.kube.objects import Container
from vgpu.native.region import CorePolicy
from vgpu.resources import PodRequest


def total(pods: Iterable[Mapping[str, Held]]) -> dict[str, Held]:
    """What several pods occupy together, by card UUID."""
    together: dict[str, Held] = {}
    for pod in pods:
        together = merge(together, dict(pod))
    return together


def excess(cards: Mapping[str, Gpu], granted: Mapping[str, Held], wanted: Mapping[str, Held]) -> str | None:
    """A sentence for the first card on which `wanted` does not fit beside `granted`; None when all fits.

    Σ limits ≤ card × scaling, Σ guarantees ≤ card, Σ cores ≤ 100 % × scaling, and nobody beside a pod that holds 100 %.
    """
    for uuid, asked in wanted.items():
        gpu = cards.get(uuid)
        if gpu is None:
            return f"card {uuid} is not on this node"
        before = granted.get(uuid, Held())
        name = f"card {gpu.index} ({gpu.model}, {uuid})"
        if before.alone and asked.slots:
            return f"{name} is held whole by another pod (cores 100)"
        if asked.alone and before.slots:
            return f"{name} has slices of other pods and cannot be given alone (cores 100)"
        for what, unit, held, more, room in (
            ("memory", "MiB", before.mem, asked.mem, gpu.memory),
            ("physical memory", "MiB", before.phys, asked.phys, gpu.physical_memory),
            ("cores", "%", before.cores, asked.cores, gpu.cores),
        ):
            if what == "cores" and asked.alone:
                continue  # nobody else is on the card, and 100 % of it is there whatever the scaling
            if more and held + more > room:
                return f"{name} has {room} {unit} of {what}, {held} held by other pods: {more} more do not fit"
    return None


def move(slices: Sequence[GpuSlice], uuids: Sequence[str]) -> tuple[GpuSlice, ...] | None:
    """The same slices on the cards `uuids`; those on one of these stay there. None when the counts differ."""
    if len(slices) != len(uuids):
        return None
    free = iter(sorted(set(uuids) - {piece.uuid for piece in slices}))
    return tuple(piece if piece.uuid in uuids else msgspec.structs.replace(piece, uuid=next(free)) for piece in slices)


def core_policy(request: PodRequest | None, container: Container | None, *, may_disable: bool) -> CorePolicy:
    """The policy of one container: its GPU_CORE_UTILIZATION_POLICY, else its pod's annotation, else the configured one.

    `force` is fixed, whatever the pod says; `disable` is none where the administrator lets containers switch limits
    off, and else has no effect, as has any other value.
    """
    variables = {one.name: one.value.lower() for one in container.env} if container else {}
    asked = variables.get(names.ENV_CORE_POLICY)
    if asked == "force":
        return "fixed"
    if asked == "disable" and may_disable:
        return "none"
    return msgspec.convert(request.core_policy, CorePolicy) if request else "fixed"
