"""What a GPU pod must not be or have.

Every function raises RequestError: field, value, what is allowed.
"""

from collections.abc import Collection, Iterator

from scheduler.wire import Container, Pod
from vgpu import names
from vgpu.config import Scheduler
from vgpu.resources import PodRequest, RequestError

#: Values that admission sees for an unset schedulerName
UNSET_SCHEDULERS = ("", "default-scheduler")
TOTALS = (names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_TOTAL_CORES)
GROUPS = ("initContainers", "containers", "ephemeralContainers")
VOID = "void"  #: NVIDIA_VISIBLE_DEVICES of a container that sees no card


def containers(pod: Pod) -> Iterator[tuple[str, int, Container]]:
    """(field of the spec, index, container) of every container, ephemeral containers included."""
    for group in GROUPS:
        for index, container in enumerate(getattr(pod.spec, group) or ()):
            yield group, index, container


def where(group: str, container: Container) -> str:
    return f"spec.{group}[{container.name}]"


def created_without_records(pod: Pod) -> None:
    """A new pod must have no records: vgpu would trust them."""
    notes = pod.metadata.annotations or {}
    for record in names.RECORDS:
        if record in notes:
            raise RequestError(
                f"metadata.annotations[{record}]",
                notes[record],
                "only the scheduler writes this annotation; leave it out",
            )


def records_unchanged(old: Pod, new: Pod) -> None:
    """Records, and the label that marks a pod as managed, must not change."""
    for field, keys, before, after in (
        ("annotations", names.RECORDS, old.metadata.annotations, new.metadata.annotations),
        ("labels", (names.LABEL_MANAGED,), old.metadata.labels, new.metadata.labels),
    ):
        for key in keys:
            was, is_ = (before or {}).get(key), (after or {}).get(key)
            if was != is_:
                allowed = (
                    f"must stay {'unset' if was is None else was}; only the scheduler and the node agents may change it"
                )
                raise RequestError(f"metadata.{field}[{key}]", is_, allowed)


def totals_are_ours(pod: Pod, asking: Collection[str]) -> None:
    """A container that asks for no GPU must not take from the totals that other pods share."""
    for group, _, container in containers(pod):
        if container.name in asking or container.resources is None:
            continue
        for part in ("limits", "requests"):
            values = getattr(container.resources, part) or {}
            for total in TOTALS:
                if total in values:
                    raise RequestError(
                        f"{where(group, container)}.resources.{part}[{total}]",
                        values[total],
                        "only admission sets this total, from the container's requests on each card; leave it out",
                    )


def scheduled_by_us(pod: Pod, scheduler_name: str) -> None:
    """The pod must use our scheduler: only it knows the cards."""
    given = pod.spec.schedulerName or ""
    if given not in (*UNSET_SCHEDULERS, scheduler_name):
        raise RequestError(
            "spec.schedulerName",
            given,
            f"{scheduler_name} places pods that ask for a GPU: write that name or leave the field out",
        )


def not_placed_yet(pod: Pod) -> None:
    """The pod must not name its node: that would bypass placement."""
    if pod.spec.nodeName:
        raise RequestError(
            "spec.nodeName",
            pod.spec.nodeName,
            "the scheduler places pods that ask for a GPU: use a nodeSelector or affinity instead",
        )


def not_privileged(pod: Pod, settings: Scheduler) -> None:
    """The pod must have no privileged container: it would see every card of its node."""
    if settings.privileged == "allow":
        return
    for group, _, container in containers(pod):
        if container.securityContext is not None and container.securityContext.privileged:
            raise RequestError(
                f"{where(group, container)}.securityContext.privileged",
                True,
                "must be false in a pod that asks for a GPU: a privileged container sees every card of its node",
            )


def visible_devices_unset(pod: Pod, request: PodRequest | None, settings: Scheduler) -> None:
    """The scheduler chooses which cards a container sees.

    The value `void` in a container that asks for no card comes from admission itself.
    """
    if settings.visible_devices == "override":
        return
    asking = {each.name for each in request.containers} if request is not None else set()
    for group, _, container in containers(pod):
        for variable in container.env or ():
            if variable.name != names.ENV_VISIBLE_DEVICES:
                continue
            if container.name not in asking and variable.value == VOID:
                continue
            raise RequestError(
                f"{where(group, container)}.env[{variable.name}]",
                variable.value if variable.valueFrom is None else "(from another source)",
                "vgpu sets this variable in pods that ask for a GPU: leave it out",
            )


def create(pod: Pod, request: PodRequest, settings: Scheduler) -> None:
    """All checks of a new GPU pod."""
    not_placed_yet(pod)
    not_privileged(pod, settings)
    totals_are_ours(pod, {each.name for each in request.containers})
    visible_devices_unset(pod, request, settings)
