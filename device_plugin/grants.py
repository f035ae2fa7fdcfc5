"""Pure computations about grants: sums, slices on other cards, and the core policy."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from vgpu import names
from vgpu.allocation import Held, merge
from vgpu.devices import GpuSlice
from vgpu.kube.objects import Container
from vgpu.native.region import CorePolicy
from vgpu.resources import PodRequest


def total(pods: Iterable[Mapping[str, Held]]) -> dict[str, Held]:
    """What several pods occupy together, by card UUID."""
    together: dict[str, Held] = {}
    for pod in pods:
        together = merge(together, dict(pod))
    return together


def move(slices: Sequence[GpuSlice], uuids: Sequence[str]) -> tuple[GpuSlice, ...] | None:
    """The same slices on the cards `uuids`; slices that are on one of these cards stay there.

    None when the counts differ.
    """
    if len(slices) != len(uuids):
        return None
    free = iter(sorted(set(uuids) - {piece.uuid for piece in slices}))
    return tuple(piece if piece.uuid in uuids else msgspec.structs.replace(piece, uuid=next(free)) for piece in slices)


def core_policy(request: PodRequest | None, container: Container | None, *, may_disable: bool) -> CorePolicy:
    """The policy of one container.

    It is the container's GPU_CORE_UTILIZATION_POLICY, else its pod's annotation, else the configured policy. The value
    `force` of the variable means a fixed share, even against the annotation. `disable` means no policy where the
    administrator lets containers switch limits off. Otherwise `disable` has no effect, like any other value.
    """
    variables = {one.name: one.value.lower() for one in container.env} if container else {}
    asked = variables.get(names.ENV_CORE_POLICY)
    if asked == "force":
        return "fixed"
    if asked == "disable" and may_disable:
        return "none"
    return msgspec.convert(request.core_policy, CorePolicy) if request else "fixed"
