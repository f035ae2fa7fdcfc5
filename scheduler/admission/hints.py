"""Keys of a pod that look like ours but are not: without a warning, they would be ignored silently."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Final

from scheduler.admission import checks, strangers
from scheduler.admission.checks import containers, where
from scheduler.wire import Pod
from vgpu import names
from vgpu.resources import Rules

OURS: Final = "vgpu.io/"  #: only we use this prefix: an unknown annotation with it is a mistake
ANNOTATIONS: Final = (*strangers.ANNOTATIONS, *names.RECORDS)
_PREFIXES: Final = ("vgpu.io", "nvidia.com", "hami.io", "4pd.io")  #: prefixes where users look for our names
USUAL: Final = ("gpu", "priority")  #: usual names that users give annotations and labels for any purpose
CLOSE: Final = 0.75  #: similarity (difflib) from which a name counts as misspelt: gpu-memory for gpumem


def misspelt(pod: Pod, rules: Rules) -> tuple[str, ...]:
    """One warning for each annotation, label and resource that probably should be one of ours."""
    known = rules.names
    resources = (known.gpu, known.memory, known.percentage, known.cores, known.priority)
    others = (*resources, *names.WEBHOOK_LABELS)  # strangers.py warns about these
    found = []
    for field, keys in (("annotations", pod.metadata.annotations), ("labels", pod.metadata.labels)):
        amounts = {key: likely for key, likely in _misses(keys or (), resources) if likely and key not in USUAL}
        for key, likely in {**dict(_misses(keys or (), ANNOTATIONS)), **amounts}.items():
            at = f"metadata.{field}[{key}]"
            if key in others or key in ANNOTATIONS or key == names.LABEL_MANAGED:
                continue
            if key in amounts:
                found.append(f"{at} has no effect: did you mean {likely} in resources.limits of a container?")
            elif field == "annotations" or not likely:
                found.append(f"{at} is not known{_perhaps(likely)}")
            else:
                found.append(f"{at} is not known: did you mean metadata.annotations[{likely}]?")
    for group, _, container in containers(pod):
        if container.resources is None:
            continue
        for part in ("limits", "requests"):
            for key, likely in _misses(getattr(container.resources, part) or (), resources):
                if likely and key not in checks.TOTALS:
                    found.append(f"{where(group, container)}.resources.{part}[{key}] is not known{_perhaps(likely)}")
    return tuple(found)


def _perhaps(likely: str) -> str:
    return f": did you mean {likely}?" if likely else " and has no effect"


def _misses(keys: Iterable[str], known: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(key, probably meant key, or "") for keys that are not known.

    A probable key has the same prefix and a similar name, or the same name with another prefix or none.
    """
    by_name = {each.partition("/")[2]: each for each in known}
    for key in keys:
        if key in known or key in strangers.KEYS:
            continue
        prefix, slash, name = key.rpartition("/")
        siblings = [each.partition("/")[2] for each in known if slash and each.startswith(f"{prefix}/")]
        close = difflib.get_close_matches(name.casefold(), siblings, 1, CLOSE)
        if close:
            yield key, f"{prefix}/{close[0]}"
        elif name in by_name and (not slash or prefix in _PREFIXES):
            yield key, by_name[name]
        elif key.startswith(OURS):
            yield key, ""
