"""The warnings of admission."""

import pytest
from admission_world import LIMITS, Catalog, Json, admitted, ask, container, denial, gpu_pod, limits_of, pod

from vgpu import names
from vgpu.config import Config, DevicePlugin


def test_more_than_the_largest_card_has_is_warned_of() -> None:
    (warning,) = ask(gpu_pod({"nvidia.com/gpumem": "90000"}))["warnings"]
    assert (
        warning == "spec.containers[main] asks for 90000 MiB on a card; the largest card of this cluster has 80000 MiB"
    )
    assert "warnings" not in ask(gpu_pod({"nvidia.com/gpumem": "90000"}), cards=Catalog())


def test_less_than_a_context_takes_is_warned_of() -> None:
    cards = Catalog(("T4", 16000), context=2**28 + 1)
    (warning,) = ask(gpu_pod({"nvidia.com/gpumem": "256"}), cards=cards)["warnings"]
    assert warning == "spec.containers[main] asks for 256 MiB on a card; a CUDA context alone takes 257 MiB"
    (warning,) = ask(gpu_pod({"nvidia.com/gpumem-percentage": "1"}), cards=cards)["warnings"]
    assert warning.startswith("spec.containers[main] asks for 160 MiB on a card; a CUDA context")
    assert "warnings" not in ask(gpu_pod({"nvidia.com/gpumem": "257"}), cards=cards)


def test_a_mode_of_memory_that_is_all_on_the_card_is_warned_of() -> None:
    item = gpu_pod({"nvidia.com/gpumem": "3000"})
    item["metadata"]["annotations"] = {names.MEMORY_MODE: "movable"}
    assert "warnings" not in ask(item)
    item["metadata"]["annotations"][names.OVERSUBSCRIBE] = "false"
    (warning,) = ask(item)["warnings"]
    assert warning.startswith(
        'metadata.annotations[vgpu.io/memory-mode] has no effect: vgpu.io/oversubscribe is "false"'
    )


def test_what_has_no_effect_is_warned_of() -> None:
    item = gpu_pod({"nvidia.com/gpumem": "3000", "nvidia.com/gpumem-percentage": "50"})
    item["spec"]["containers"][0]["resources"]["requests"] = {"nvidia.com/gpumem": "2k"}
    assert ask(item)["warnings"] == [
        "spec.containers[main]: nvidia.com/gpumem-percentage has no effect together with nvidia.com/gpumem",
        "spec.containers[main] requests 2k of nvidia.com/gpumem and has the limit 3000: vgpu uses the limit",
    ]
    item = gpu_pod({"nvidia.com/gpumem": "3000"})
    item["spec"]["containers"][0]["resources"]["requests"] = {"nvidia.com/gpumem": "3k"}
    assert "warnings" not in ask(item)


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("key", "likely"),
    [
        ("nvidia.com/gpu-memory", "nvidia.com/gpumem"),
        ("nvidia.com/gpumems", "nvidia.com/gpumem"),
        ("nvidia.com/gpucore", "nvidia.com/gpucores"),
        ("nvidia.com/gpus", "nvidia.com/gpu"),
        ("nvidia.com/gpumem-percent", "nvidia.com/gpumem-percentage"),
    ],
)
def test_misspelt_resources_are_warned_of(asks: bool, key: str, likely: str) -> None:
    item = gpu_pod({key: "5", **({"nvidia.com/gpumem": "3000"} if asks else {})})
    assert ask(item)["warnings"] == [f"{LIMITS}[{key}] is not known: did you mean {likely}?"]


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("field", ["annotations", "labels"])
@pytest.mark.parametrize(
    ("key", "likely"),
    [
        ("nvidia.com/gpu-cores", "nvidia.com/gpucores"),
        ("nvidia.com/GPUmem", "nvidia.com/gpumem"),
        ("vgpu.io/gpumem", "nvidia.com/gpumem"),
        ("gpucores", "nvidia.com/gpucores"),
    ],
)
def test_a_misspelt_resource_outside_of_a_container_is_warned_of(asks: bool, field: str, key: str, likely: str) -> None:
    item = gpu_pod(**{field: {key: "30"}}) if asks else pod(container(), **{field: {key: "30"}})
    (warning,) = ask(item)["warnings"]
    assert (
        warning == f"metadata.{field}[{key}] has no effect: did you mean {likely} in resources.limits of a container?"
    )


def test_misspelt_annotations_that_are_labels_are_warned_of() -> None:
    labels = {"vgpu.io/gpu_policy": "spread", "vgpu.io/colour": "red", "nvidia.com/use-gpu-type": "T4", "a/b": "c"}
    assert ask(gpu_pod(labels=labels))["warnings"] == [
        "metadata.labels[vgpu.io/gpu_policy] is not known: did you mean metadata.annotations[vgpu.io/gpu-policy]?",
        "metadata.labels[vgpu.io/colour] is not known and has no effect",
        "metadata.labels[nvidia.com/use-gpu-type] is not known: did you mean"
        " metadata.annotations[nvidia.com/use-gputype]?",
    ]
    assert "warnings" not in ask(gpu_pod(labels={names.LABEL_MANAGED: "true", "priority": "high", "gpu": "true"}))


def test_misspelt_annotations_are_warned_of() -> None:
    notes = {"vgpu.io/gpu_policy": "spread", "vgpu.io/colour": "red", "nvidia.com/use-gpu-type": "T4", "a/b": "c"}
    assert ask(gpu_pod(annotations=notes))["warnings"] == [
        "metadata.annotations[vgpu.io/gpu_policy] is not known: did you mean vgpu.io/gpu-policy?",
        "metadata.annotations[vgpu.io/colour] is not known and has no effect",
        "metadata.annotations[nvidia.com/use-gpu-type] is not known: did you mean nvidia.com/use-gputype?",
    ]


NO_EFFECT = "has no effect: write it in resources.limits of a container"


OTHERS = "belongs to another product and has no effect"


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("field", "key", "said"),
    [
        ("annotations", "nvidia.com/gpucores", NO_EFFECT),
        ("annotations", "nvidia.com/priority", NO_EFFECT),
        ("labels", "nvidia.com/gpumem", NO_EFFECT),
        ("labels", "nvidia.com/gpu", NO_EFFECT),
        ("annotations", "gpu-fraction-num-devices", "has no effect: write nvidia.com/gpu in resources.limits of a"),
        ("labels", "vgpu.io/gpu-policy", "has no effect as a label: write it in metadata.annotations"),
        ("labels", "nvidia.com/use-gputype", "has no effect as a label: write it in metadata.annotations"),
        ("annotations", "hami.io/gpu-scheduler-policy", f"{OTHERS}: write metadata.annotations[vgpu.io/gpu-policy]"),
        ("annotations", "hami.io/node-scheduler-policy", f"{OTHERS}: write metadata.annotations[vgpu.io/node-policy]"),
        ("annotations", "hami.io/device-scoring-weights", OTHERS),
        ("annotations", "4pd.io/vgpu-node", OTHERS),
        (
            "annotations",
            "nvidia.com/device-scheduler-policy",
            f"{OTHERS}: write metadata.annotations[vgpu.io/gpu-policy]",
        ),
        ("annotations", "nvidia.com/include-gpu-type", f"{OTHERS}: write metadata.annotations[nvidia.com/use-gputype]"),
        (
            "annotations",
            "nvidia.com/exclude-gpu-uuid",
            f"{OTHERS}: write metadata.annotations[nvidia.com/nouse-gpuuuid]",
        ),
        ("annotations", "nvidia.com/vgpu-compute-policy", f"{OTHERS}: write metadata.annotations[vgpu.io/core-policy]"),
        ("annotations", "tencent.com/vcuda-core-limit", f"{OTHERS}: write metadata.annotations[vgpu.io/cores-limit]"),
        ("annotations", "volcano.sh/vgpu-mode", OTHERS),
        (
            "labels",
            "sharedgpu/gpu_limit",
            "has no effect: write nvidia.com/gpucores in resources.limits of a container",
        ),
        ("annotations", "gpu-fraction", "has no effect: write nvidia.com/gpumem-percentage in resources.limits of a"),
        ("annotations", "vgpu.io/webhook", "has no effect as an annotation: to opt out of admission, label the pod"),
        ("labels", "hami.io/webhook", 'is "30" and has no effect: "ignore" opts out of admission'),
    ],
)
def test_what_is_written_where_vgpu_does_not_read_it_is_warned_of(asks: bool, field: str, key: str, said: str) -> None:
    item = gpu_pod(**{field: {key: "30"}}) if asks else pod(container(), **{field: {key: "30"}})
    (warning,) = ask(item)["warnings"]
    assert warning.startswith(f"metadata.{field}[{key}] {said}")


@pytest.mark.parametrize(
    ("key", "likely"),
    [
        ("volcano.sh/vgpu-memory", "nvidia.com/gpumem"),
        ("nvidia.com/vgpu-number", "nvidia.com/gpu"),
        ("tencent.com/vcuda-core", "nvidia.com/gpucores"),
        ("aliyun.com/gpu-mem", "nvidia.com/gpumem"),
        ("aliyun.com/gpu-core.percentage", "nvidia.com/gpucores"),
        ("volcano.sh/gpu-memory", "nvidia.com/gpumem"),
        ("tke.cloud.tencent.com/qgpu-core", "nvidia.com/gpucores"),
        ("elasticgpu.io/gpu-memory", "nvidia.com/gpumem"),
        ("k8s.amazonaws.com/vgpu", "nvidia.com/gpu"),
    ],
)
def test_another_products_part_of_a_card_is_warned_of(key: str, likely: str) -> None:
    for limits in ({key: "5"}, {key: "5", "nvidia.com/gpumem": "3000"}):
        (warning,) = ask(gpu_pod(limits))["warnings"]
        assert warning == f"{LIMITS}[{key}] belongs to another product and has no effect on vgpu: write {likely}"


@pytest.mark.parametrize(
    ("field", "key", "likely"),
    [
        ("annotations", "vgpu.io/use-gputype", "nvidia.com/use-gputype"),
        ("annotations", "nvidia.com/gpu-policy", "vgpu.io/gpu-policy"),
        ("annotations", "use-gputype", "nvidia.com/use-gputype"),
        ("annotations", "nvidia.com/Use-GPUType", "nvidia.com/use-gputype"),
        ("limits", "nvidia.com/GPUmem", "nvidia.com/gpumem"),
        ("limits", "vgpu.io/gpumem", "nvidia.com/gpumem"),
    ],
)
def test_the_right_name_with_another_prefix_or_case_is_warned_of(field: str, key: str, likely: str) -> None:
    item = gpu_pod({"nvidia.com/gpumem": "3000", **({key: "1"} if field == "limits" else {})})
    if field == "annotations":
        item["metadata"]["annotations"] = {key: "T4"}
    (warning,) = ask(item)["warnings"]
    assert warning.endswith(f"[{key}] is not known: did you mean {likely}?")


def test_a_priority_without_a_card_is_warned_of() -> None:
    item = pod(container(limits={"nvidia.com/gpumem": "3000"}), container("log", {"nvidia.com/priority": "1"}))
    (warning,) = ask(item)["warnings"]
    assert warning.startswith("spec.containers[log].resources.limits[nvidia.com/priority] has no effect: the container")
    assert "warnings" not in ask(gpu_pod({"nvidia.com/gpumem": "3000", "nvidia.com/priority": "1"}))


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        (
            {"nvidia.com/use-gputype": "Tesla-T5, A100*"},
            'nvidia.com/use-gputype]: no card of this cluster matches "Tesla-T5" or "A100*"; the cluster has H100, T4',
        ),
        (
            {"nvidia.com/nouse-gputype": "A10"},
            'nvidia.com/nouse-gputype]: no card of this cluster matches "A10"; the cluster has H100, T4',
        ),
        (
            {"nvidia.com/use-gputype": "T4", "nvidia.com/nouse-gputype": "T4"},
            "nvidia.com/nouse-gputype] excludes every card of this cluster; the cluster has H100, T4",
        ),
        ({"nvidia.com/use-gputype": " ,"}, "nvidia.com/use-gputype] is empty and has no effect"),
        ({"nvidia.com/use-gpuuuid": "0"}, 'nvidia.com/use-gpuuuid]: no card of this cluster has the UUID "0"'),
        ({"nvidia.com/nouse-gpuuuid": "x"}, 'nvidia.com/nouse-gpuuuid]: no card of this cluster has the UUID "x"'),
        (
            {"nvidia.com/use-gpuuuid": "GPU-T4", "nvidia.com/nouse-gpuuuid": "GPU-T4"},
            "nvidia.com/nouse-gpuuuid] excludes all cards of nvidia.com/use-gpuuuid",
        ),
        ({"nvidia.com/vgpu-mode": "hami-core"}, 'nvidia.com/vgpu-mode] is "hami-core", which vgpu calls "share"'),
        ({"vgpu.io/cores-limit": "50"}, "vgpu.io/cores-limit] has no effect: vgpu.io/core-policy is fixed; only with"),
        (
            {"vgpu.io/cores-limit": "20", "vgpu.io/core-policy": "elastic"},
            "vgpu.io/cores-limit] is 20 and has no effect on container main, which asks for 30 %",
        ),
        ({"vgpu.io/resize": "{}"}, "vgpu.io/resize] is reserved and has no effect"),
        ({"vgpu.io/pod-group": "a"}, "vgpu.io/pod-group] is reserved and has no effect"),
    ],
)
def test_annotations_that_do_not_do_what_they_say_are_warned_of(notes: Json, said: str) -> None:
    limits = {"nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
    (warning,) = ask(gpu_pod(limits, annotations=notes))["warnings"]
    assert warning.startswith(f"metadata.annotations[{said}")


def test_annotations_that_do_are_not_warned_of() -> None:
    limits = {"nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}
    notes = {
        "nvidia.com/use-gputype": "Tesla-T4,A100", "nvidia.com/nouse-gputype": "NVIDIA-H100",
        "nvidia.com/use-gpuuuid": "GPU-T4,GPU-gone", "vgpu.io/core-policy": "elastic", "vgpu.io/cores-limit": "50",
        "nvidia.com/vgpu-mode": "share",
    }  # fmt: skip
    assert "warnings" not in ask(gpu_pod(limits, annotations=notes))
    unknown = {"nvidia.com/use-gputype": "Tesla-T5", "nvidia.com/nouse-gpuuuid": "x"}  # as long as no card is known
    assert "warnings" not in ask(gpu_pod(limits, annotations=unknown), cards=Catalog())


def test_variables_that_a_slice_does_not_read_are_warned_of() -> None:
    limits = {"nvidia.com/gpumem": "3000"}
    mine = [{"name": name, "value": "1g"} for name in ("CUDA_DEVICE_MEMORY_LIMIT_0", "CUDA_DEVICE_SM_LIMIT", "CUDA_X")]
    item = pod(container(limits=limits, env=mine), container("log", env=mine))
    said = "has no effect: the limit is the container's request of"
    assert ask(item)["warnings"] == [
        f"spec.containers[main].env[CUDA_DEVICE_MEMORY_LIMIT_0] {said} memory",
        f"spec.containers[main].env[CUDA_DEVICE_SM_LIMIT] {said} cores",
    ]


def test_a_priority_by_a_variable_alone_is_warned_of() -> None:
    limits, mine = {"nvidia.com/gpumem": "3000"}, [{"name": names.ENV_PRIORITY, "value": "1"}]
    (warning,) = ask(pod(container(limits=limits, env=mine), container("log", env=mine)))["warnings"]
    assert warning == (
        "spec.containers[main].env[CUDA_TASK_PRIORITY] has no effect: write nvidia.com/priority in resources.limits"
    )
    both = admitted(pod(container(limits={**limits, "nvidia.com/priority": "1"})))  # it has the variable now
    assert "warnings" not in ask(both)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CUDA_DISABLE_CONTROL", "true", True),
        ("GPU_CORE_UTILIZATION_POLICY", "Disable", True),
        ("CUDA_DISABLE_CONTROL", "false", False),
        ("GPU_CORE_UTILIZATION_POLICY", "force", False),
        ("ACTIVE_OOM_KILLER", "true", False),
    ],
)
def test_switching_limits_off_where_nobody_may_is_warned_of(name: str, value: str, said: bool) -> None:
    item = pod(container(limits={"nvidia.com/gpumem": "3000"}, env=[{"name": name, "value": value}]))
    end = "has no effect: containers of this cluster may not switch their limits off"
    assert ask(item).get("warnings", []) == [f"spec.containers[main].env[{name}] {end}"] * said
    allowed = Config(device_plugin=DevicePlugin(allowDisableControl=True))
    assert "warnings" not in ask(item, allowed)


def test_a_few_mib_are_probably_gib() -> None:
    (warning,) = ask(gpu_pod({"nvidia.com/gpumem": "16"}))["warnings"]
    assert warning.endswith("less than any CUDA context takes; the unit is MiB: for 16 GiB, write 16384")
    assert "warnings" not in ask(gpu_pod({"nvidia.com/gpumem": "64"}))


RANGED = "kubernetes.io/limit-ranger"


def ranged(*written: str) -> Json:
    """The annotation in which the API server lists what a LimitRange has set."""
    return {RANGED: f"LimitRanger plugin set: {'; '.join(written)}"}


def test_a_card_by_a_limit_range_alone_is_warned_of() -> None:
    notes = ranged("nvidia.com/gpumem limit for container log", "cpu, nvidia.com/gpumem request for container log")
    item = pod(container(limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}),
               container("log", {"nvidia.com/gpumem": "3000"}), annotations=notes)  # fmt: skip
    (warning,) = ask(item)["warnings"]
    assert warning == (
        "spec.containers[log] gets a card because a LimitRange of the namespace sets nvidia.com/gpumem: 3000;"
        " set nvidia.com/gpu: 0 in the container if it needs no card"
    )
    assert limits_of(admitted(item), "log")["nvidia.com/gpu"] == "1"
    own = ranged("nvidia.com/gpumem limit for container main")  # it asks for a card itself, and takes the default
    assert "warnings" not in ask(gpu_pod({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}, annotations=own))


def test_no_card_beside_the_default_of_a_limit_range_is_no_card() -> None:
    notes = ranged(
        "nvidia.com/gpucores, nvidia.com/gpumem limit for init container warm",
        "nvidia.com/gpumem limit for container log",
    )
    none = {"nvidia.com/gpu": "0", "nvidia.com/gpumem": "3000"}
    item = gpu_pod(annotations=notes, spec={"initContainers": [container("warm", {**none, "nvidia.com/gpucores": 5})]})
    both = {"limits": {**none, "cpu": "1"}, "requests": {**none, "cpu": "1"}}
    item["spec"]["containers"].append({"name": "log", "image": "cuda", "resources": both})
    result = admitted(item)
    assert result["spec"]["initContainers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "0"}
    kept = {"nvidia.com/gpu": "0", "cpu": "1"}
    assert result["spec"]["containers"][1]["resources"] == {"limits": kept, "requests": kept}
    warnings = ask(item)["warnings"]
    said, by = "asks for no card (nvidia.com/gpu: 0): admission removes", "which a LimitRange has set"
    assert warnings == [
        f"spec.initContainers[warm] {said} nvidia.com/gpumem, nvidia.com/gpucores, {by}",
        f"spec.containers[log] {said} nvidia.com/gpumem, {by}",
    ]
    alone = pod(container(limits=none), annotations=ranged("nvidia.com/gpumem limit for container main"))
    assert admitted(alone)["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "0"}
    assert "must be 1 or more if the container asks" in denial(pod(container(limits=none)))  # the user wrote it himself


def test_no_card_by_a_limit_range_is_for_those_who_ask_for_none() -> None:
    both = ranged("nvidia.com/gpu, nvidia.com/gpumem limit for container log")
    asks = container(limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
    item = pod(asks, container("log", {"nvidia.com/gpu": "0", "nvidia.com/gpumem": "3000"}), annotations=both)
    assert admitted(item)["spec"]["containers"][1]["resources"]["limits"] == {"nvidia.com/gpu": "0"}
    (warning,) = ask(item)["warnings"]
    assert warning.endswith(
        "[log] asks for no card (nvidia.com/gpu: 0): admission removes nvidia.com/gpumem, which a LimitRange has set"
    )
    zero = ranged("nvidia.com/gpu limit for container main")
    own = pod(container(limits={"nvidia.com/gpu": "0", "nvidia.com/gpumem": "3000"}), annotations=zero)
    assert limits_of(admitted(own))["nvidia.com/gpu"] == "1"
    (warning,) = ask(own)["warnings"]
    assert warning.startswith("spec.containers[main] asks for nvidia.com/gpumem: ")
    assert warning.endswith("admission removes nvidia.com/gpu, which a LimitRange has set")
    assert "warnings" not in ask(pod(container(limits={"nvidia.com/gpu": "0"}), annotations=zero))


def test_memory_by_a_limit_range_in_place_of_a_percentage_is_warned_of() -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpumem-percentage": "50"}
    item = gpu_pod(limits, annotations=ranged("nvidia.com/gpumem limit for container main"))
    _, warning = ask(item)["warnings"]
    assert warning == (
        "spec.containers[main] has nvidia.com/gpumem: 3000 by a LimitRange of the namespace, which counts in place of"
        " its nvidia.com/gpumem-percentage; set nvidia.com/gpumem in it"
    )
    other = gpu_pod(limits, annotations=ranged("nvidia.com/gpumem-percentage limit for container main"))
    assert len(ask(other)["warnings"]) == 1


def test_who_is_denied_a_card_that_a_limit_range_asks_for_is_told_of_it() -> None:
    notes = ranged("nvidia.com/gpumem limit for container main")
    item = pod(container(limits={"nvidia.com/gpumem": "3000"}, securityContext={"privileged": True}), annotations=notes)
    assert "privileged is true: must be false in a pod that asks for a GPU" in denial(item)
    (warning,) = ask(item)["warnings"]
    assert "gets a card because a LimitRange of the namespace sets nvidia.com/gpumem: 3000" in warning


def test_keys_of_others_and_our_own_are_not_warned_of() -> None:
    notes = {"nvidia.com/use-gputype": "T4", "vgpu.io/gpu-policy": "spread", "nvidia.com/something": "1"}
    limits = {"nvidia.com/gpumem": "3000", "nvidia.com/mig-1g.5gb": "1", "nvidia.com/gpu.shared": "1", "cpu": "1"}
    assert "warnings" not in ask(gpu_pod(limits, annotations=notes))
    assert "warnings" not in ask(gpu_pod({**limits, "vgpu.io/memory": "3000"}))
