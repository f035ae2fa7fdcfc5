"""Names of other products in a pod, and names in a place where vgpu does not read them: one warning for each."""

from collections.abc import Iterator, Mapping
from typing import Final

from scheduler.admission.checks import containers, where
from scheduler.wire import Pod
from vgpu import names
from vgpu.resources import Rules

#: annotations that a user may set
ANNOTATIONS: Final = (
    names.USE_GPU_TYPE, names.NOUSE_GPU_TYPE, names.USE_GPU_UUID, names.NOUSE_GPU_UUID, names.NUMA_BIND,
    names.VGPU_MODE, names.NODE_POLICY, names.GPU_POLICY, names.CORES_LIMIT, names.CORE_POLICY, names.OVERSUBSCRIBE,
    names.MEMORY_MODE, names.RESIZE, names.POD_GROUP, names.POD_GROUP_MIN,
)  # fmt: skip
#: Annotations of vgpu-manager, all below nvidia.com, → ours
_VGPU_MANAGER: Final = {
    "node-scheduler-policy": names.NODE_POLICY,
    "device-scheduler-policy": names.GPU_POLICY,
    "device-topology-mode": names.NUMA_BIND,
    "include-gpu-type": names.USE_GPU_TYPE,
    "exclude-gpu-type": names.NOUSE_GPU_TYPE,
    "include-gpu-uuid": names.USE_GPU_UUID,
    "exclude-gpu-uuid": names.NOUSE_GPU_UUID,
    "vgpu-compute-policy": names.CORE_POLICY,
}
#: Annotation or label of another product → ours with the same meaning; "": we have none. Sources: the READMEs of HAMi,
#: vgpu-manager (coldzerofear), volcano-vgpu-device-plugin, gpu-manager (tkestack), KubeShare and the KAI scheduler;
#: Volcano's older GPU sharing, elastic-gpu, clusters of Alibaba and Tencent, and AWS's virtual GPU device plugin
KEYS: Final = {
    **{f"nvidia.com/{name}": ours for name, ours in _VGPU_MANAGER.items()},
    "hami.io/node-scheduler-policy": names.NODE_POLICY,
    "hami.io/gpu-scheduler-policy": names.GPU_POLICY,
    "tencent.com/vcuda-core-limit": names.CORES_LIMIT,
    "sharedgpu/gpu_model": names.USE_GPU_TYPE,
    "sharedgpu/group_name": "",
    "sharedgpu/priority": "",
    "volcano.sh/vgpu-mode": "",
}
#: Prefixes of other products' keys; no key of ours is below them
PREFIXES: Final = ("hami.io/", "4pd.io/", "sharedgpu/", "volcano.sh/vgpu-")


def _amounts(rules: Rules) -> dict[str, str]:
    """Resource, annotation or label of another product that asks for a part of a card → our resource."""
    known = rules.names
    manager = {"number": known.gpu, "memory": known.memory, "cores": known.cores}
    return {
        **{f"nvidia.com/vgpu-{name}": ours for name, ours in manager.items()},
        "volcano.sh/vgpu-number": known.gpu,
        "volcano.sh/vgpu-memory": known.memory,
        "volcano.sh/vgpu-memory-percentage": known.percentage,
        "volcano.sh/vgpu-cores": known.cores,
        "volcano.sh/gpu-number": known.gpu,
        "volcano.sh/gpu-memory": known.memory,
        "elasticgpu.io/gpu-core": known.cores,
        "elasticgpu.io/gpu-memory": known.memory,
        "tke.cloud.tencent.com/qgpu-core": known.cores,
        "tke.cloud.tencent.com/qgpu-memory": known.memory,
        "k8s.amazonaws.com/vgpu": known.gpu,
        "tencent.com/vcuda-core": known.cores,
        "tencent.com/vcuda-memory": known.memory,
        "aliyun.com/gpu-mem": known.memory,
        "aliyun.com/gpu-core.percentage": known.cores,
        "koordinator.sh/gpu-core": known.cores,
        "koordinator.sh/gpu-memory": known.memory,
        "koordinator.sh/gpu-memory-ratio": known.percentage,
        "gpu-fraction": known.percentage,
        "gpu-fraction-num-devices": known.gpu,
        "gpu-memory": known.memory,
        "sharedgpu/gpu_limit": known.cores,
        "sharedgpu/gpu_request": known.cores,
        "sharedgpu/gpu_mem": known.memory,
    }


def elsewhere(pod: Pod, rules: Rules) -> tuple[str, ...]:
    """Warnings about keys that have no effect in their place, with the right place."""
    found = [
        warning
        for field, keys in (("annotations", pod.metadata.annotations), ("labels", pod.metadata.labels))
        for warning in _of_metadata(field, keys or {}, rules)
    ]
    amounts, known = _amounts(rules), rules.names
    asking = {known.gpu, known.memory, known.percentage, known.cores}
    for group, _, container in containers(pod):
        if container.resources is None:
            continue
        said = {*(container.resources.limits or ()), *(container.resources.requests or ())}
        if known.priority in said and not asking & said:
            field = f"{where(group, container)}.resources.limits[{known.priority}]"
            found.append(f"{field} has no effect: the container asks for no card")
        for part in ("limits", "requests"):
            for key in getattr(container.resources, part) or ():
                if amounts.get(key, key) != key:
                    field = f"{where(group, container)}.resources.{part}[{key}]"
                    found.append(f"{field} belongs to another product and has no effect on vgpu: write {amounts[key]}")
    return tuple(found)


def _of_metadata(field: str, keys: Mapping[str, str], rules: Rules) -> Iterator[str]:
    known, amounts = rules.names, _amounts(rules)
    ours = (known.gpu, known.memory, known.percentage, known.cores, known.priority)
    for key in keys:
        at = f"metadata.{field}[{key}]"
        if key in ours:
            yield f"{at} has no effect: write it in resources.limits of a container"
        elif key in names.WEBHOOK_LABELS:
            yield from _opting_out(field, key, keys[key])
        elif field == "labels" and key in ANNOTATIONS:
            yield f"{at} has no effect as a label: write it in metadata.annotations"
        elif key in amounts:
            yield f"{at} has no effect: write {amounts[key]} in resources.limits of a container"
        elif KEYS.get(key):
            yield f"{at} belongs to another product and has no effect: write metadata.annotations[{KEYS[key]}]"
        elif key in KEYS or key.startswith(PREFIXES):
            yield f"{at} belongs to another product and has no effect"


def _opting_out(field: str, key: str, value: str) -> Iterator[str]:
    at = f"metadata.{field}[{key}]"
    if field == "annotations":
        yield f"{at} has no effect as an annotation: to opt out of admission, label the pod or its namespace"
    elif value != names.WEBHOOK_IGNORE:
        yield f'{at} is "{value}" and has no effect: "{names.WEBHOOK_IGNORE}" opts out of admission'
