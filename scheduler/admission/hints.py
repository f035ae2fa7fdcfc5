"""Keys of a pod that look like ours and are none: they would be ignored without a word."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Final

from scheduler.admission.checks import containers, where
from scheduler.wire import Pod
from vgpu import names
from vgpu.resources import Rules

OURS: Final = "vgpu.io/"  #: nobody else's: an unknown annotation of this prefix is a mistake
ANNOTATIONS: Final = (
    names.USE_GPU_TYPE, names.NOUSE_GPU_TYPE, names.USE_GPU_UUID, names.NOUSE_GPU_UUID, names.NUMA_BIND,
    names.VGPU_MODE, names.NODE_POLICY, names.GPU_POLICY, names.CORES_LIMIT, names.CORE_POLICY, names.OVERSUBSCRIBE,
    names.MEMORY_MODE, names.RESIZE, names.POD_GROUP, names.POD_GROUP_MIN, *names.RECORDS,
)  # fmt: skip
CLOSE: Final = 0.75  #: similarity (difflib) from which a name is taken for a misspelt one: gpu-memory for gpumem


def misspelt(pod: Pod, rules: Rules) -> tuple[str, ...]:
    """One warning for each annotation and resource that is probably meant for us."""
    known = rules.names
    resources = (known.gpu, known.memory, known.percentage, known.cores, known.priority)
    found = [
        f"metadata.annotations[{key}] is not known{_perhaps(likely)}"
        for key, likely in _misses(pod.metadata.annotations or (), ANNOTATIONS)
    ]
    for group, _, container in containers(pod):
        if container.resources is None:
            continue
        for part in ("limits", "requests"):
            for key, likely in _misses(getattr(container.resources, part) or (), resources):
                if likely:
                    found.append(f"{where(group, container)}.resources.{part}[{key}] is not known{_perhaps(likely)}")
    return tuple(found)


def _perhaps(likely: str) -> str:
    return f": did you mean {likely}?" if likely else " and has no effect"


def _misses(keys: Iterable[str], known: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(key, likely meant) of keys that are not known and are close to one of the same prefix, or ours ("")."""
    for key in keys:
        prefix, slash, name = key.partition("/")
        if not slash or key in known:
            continue
        siblings = [each.partition("/")[2] for each in known if each.startswith(f"{prefix}/")]
        close = difflib.get_close_matches(name, siblings, 1, CLOSE)
        if close:
            yield key, f"{prefix}/{close[0]}"
        elif key.startswith(OURS):
            yield key, ""
