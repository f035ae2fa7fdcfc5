"""The product's own names: nvidia.com/gpu, gpumem, gpumem-percentage, gpucores, priority (docs/reference.md)."""

from scheduler.wire import Pod
from vgpu.resources import PodRequest, Rules, containers_of, read_pod


def uses(pod: Pod, rules: Rules) -> bool:
    known = rules.names
    asking = {known.gpu, known.memory, known.percentage, known.cores}
    for _, _, container in containers_of(pod.mapping().get("spec") or {}):
        resources = container.get("resources") or {}
        if asking & {*(resources.get("limits") or ()), *(resources.get("requests") or ())}:
            return True
    return False


def translate(pod: Pod, rules: Rules) -> PodRequest | None:
    return read_pod(pod.mapping(), rules)
