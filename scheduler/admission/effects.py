"""Annotations and variables of a GPU pod that have another effect than their author expects: one warning for each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from scheduler.admission.checks import containers, where
from scheduler.admission.mutation import Cards
from scheduler.wire import Pod
from vgpu import names
from vgpu.placement.selection import accepts_model, matches
from vgpu.resources import HAMI_CORE, CardSelector, PodRequest, Rules

RESERVED: Final = (names.RESIZE, names.POD_GROUP, names.POD_GROUP_MIN)
#: Variables that set limits where there is no region; in a container of a GPU pod the library does not read them
VARIABLES: Final = {
    names.ENV_MEMORY_LIMIT: "the limit is the container's request of memory",
    names.ENV_CORE_LIMIT: "the limit is the container's request of cores",
    names.ENV_OVERSUBSCRIBE: f"set metadata.annotations[{names.OVERSUBSCRIBE}]",
}
#: Variables that switch limits off where the administrator lets containers do that
SWITCHES: Final = {names.ENV_DISABLE_CONTROL: ("true", "1"), names.ENV_CORE_POLICY: ("disable",)}
SHOWN: Final = 4  #: number of models that a warning names: an API server may cut warnings at 256 characters


def without_effect(pod: Pod, request: PodRequest, cards: Cards, rules: Rules, *, may_disable: bool) -> tuple[str, ...]:
    """All warnings about a pod that asks for a GPU.

    `may_disable`: its containers may switch their limits off.
    """
    notes = pod.metadata.annotations or {}
    return (
        *_annotations(notes, request),
        *_selection(notes, request.selector, cards),
        *_variables(pod, {each.name: each.gpu.priority for each in request.containers}, rules, may_disable),
    )


def _at(key: str) -> str:
    return f"metadata.annotations[{key}]"


def _annotations(notes: Mapping[str, str], request: PodRequest) -> Iterator[str]:
    if notes.get(names.VGPU_MODE) == HAMI_CORE:
        yield f'{_at(names.VGPU_MODE)} is "{HAMI_CORE}", which vgpu calls "share": write "share" or leave it out'
    for key in RESERVED:
        if key in notes:
            yield f"{_at(key)} is reserved and has no effect"
    if request.memory_mode and request.oversubscribe is False:
        yield f'{_at(names.MEMORY_MODE)} has no effect: {names.OVERSUBSCRIBE} is "false", so all memory is on the card'
    if request.cores_limit is None:
        return
    if request.core_policy != "elastic":
        yield (
            f"{_at(names.CORES_LIMIT)} has no effect: {names.CORE_POLICY} is {request.core_policy}; only with elastic"
            " may a container use more cores than it asks for"
        )
        return
    for container in request.containers:
        if container.gpu.cores > request.cores_limit:
            yield (
                f"{_at(names.CORES_LIMIT)} is {request.cores_limit} and has no effect on container {container.name},"
                f" which asks for {container.gpu.cores} %"
            )


def _selection(notes: Mapping[str, str], selector: CardSelector, cards: Cards) -> Iterator[str]:
    for key in (names.USE_GPU_TYPE, names.NOUSE_GPU_TYPE, names.USE_GPU_UUID, names.NOUSE_GPU_UUID):
        if key in notes and not notes[key].strip(" ,"):
            yield f"{_at(key)} is empty and has no effect"
    if cards.largest_card() is None:  # no card is known yet: no warning is possible
        return
    if selector.use_types or selector.nouse_types:
        yield from _models(selector, sorted(cards.models()))
    known = cards.known((*selector.use_uuids, *selector.nouse_uuids))
    usable = known & {*selector.use_uuids}
    if selector.use_uuids and not usable:
        yield f"{_at(names.USE_GPU_UUID)}: no card of this cluster has the UUID {_quoted(selector.use_uuids)}"
    elif selector.use_uuids and usable <= {*selector.nouse_uuids}:
        yield f"{_at(names.NOUSE_GPU_UUID)} excludes all cards of {names.USE_GPU_UUID}"
    strangers = [uuid for uuid in selector.nouse_uuids if uuid not in known]
    if strangers:
        yield f"{_at(names.NOUSE_GPU_UUID)}: no card of this cluster has the UUID {_quoted(strangers)}"


def _models(selector: CardSelector, models: Sequence[str]) -> Iterator[str]:
    there = ", ".join(models[:SHOWN]) + (f" and {len(models) - SHOWN} more" if len(models) > SHOWN else "")
    wanted = CardSelector(use_types=selector.use_types)

    def unmatched(key: str, patterns: Iterable[str]) -> str:
        return f"{_at(key)}: no card of this cluster matches {_quoted(patterns)}; the cluster has {there}"

    if not any(accepts_model(wanted, model) for model in models):
        yield unmatched(names.USE_GPU_TYPE, selector.use_types)
    elif not any(accepts_model(selector, model) for model in models):
        yield f"{_at(names.NOUSE_GPU_TYPE)} excludes every card of this cluster; the cluster has {there}"
    for pattern in selector.nouse_types:
        if not any(matches(model, pattern) for model in models):
            yield unmatched(names.NOUSE_GPU_TYPE, [pattern])


def _quoted(values: Iterable[str]) -> str:
    return " or ".join(f'"{value}"' for value in values)


def _variables(pod: Pod, asking: Mapping[str, int | None], rules: Rules, may_disable: bool) -> Iterator[str]:
    """`asking`: containers that ask for a card, with their priority."""
    for group, _, container in containers(pod):
        if container.name not in asking:
            continue
        for variable in container.env or ():
            at = f"{where(group, container)}.env[{variable.name}]"
            for name, instead in VARIABLES.items():
                if variable.name == name or variable.name.removeprefix(f"{name}_").isdecimal():
                    yield f"{at} has no effect: {instead}"
            if variable.name == names.ENV_PRIORITY and asking[container.name] is None:
                yield f"{at} has no effect: write {rules.names.priority} in resources.limits"
            if not may_disable and (variable.value or "").lower() in SWITCHES.get(variable.name, ()):
                yield f"{at} has no effect: containers of this cluster may not switch their limits off"
