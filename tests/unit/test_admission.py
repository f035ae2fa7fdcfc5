"""Admission of pods: what is denied and in which words, what is written into the pod, what the user is warned of."""

import base64
import copy
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from scheduler.admission import dialects
from scheduler.admission.patches import Patch, pointer
from scheduler.admission.webhook import Admission
from scheduler.wire import BadBody, Pod
from vgpu import names
from vgpu.config import Config, Scheduler, rules
from vgpu.local.apiserver.patches import json_patch
from vgpu.resources import CardSelector, GpuRequest, PodRequest, Rules

Json = dict[str, Any]


class Catalog:
    """A cluster with one small and one large model."""

    def __init__(self, *models: tuple[str, int], context: int | None = None) -> None:
        self.cards, self.context = models, context

    def models(self) -> list[str]:
        return [model for model, _ in self.cards]

    def known(self, uuids: Collection[str]) -> set[str]:
        return {*uuids} & {f"GPU-{model}" for model, _ in self.cards}

    def smallest_context(self) -> int | None:
        return self.context

    def smallest_ask(self, request: GpuRequest, selector: CardSelector) -> int | None:
        wanted = [size for model, size in self.cards if not selector.use_types or model in selector.use_types]
        return min((request.memory_on(size) for size in wanted), default=None)

    def largest_card(self) -> int | None:
        return max((size for _, size in self.cards), default=None)


CARDS = Catalog(("T4", 16000), ("H100", 80000))


def container(name: str = "main", limits: Json | None = None, **more: Any) -> Json:
    return {"name": name, "image": "cuda", "resources": {"limits": limits} if limits is not None else {}, **more}


def pod(*containers: Json, **more: Any) -> Json:
    spec = {"containers": list(containers), "schedulerName": "default-scheduler", **more.pop("spec", {})}
    return {"metadata": {"name": "p", "namespace": "default", **more}, "spec": spec}


def gpu_pod(limits: Json | None = None, **more: Any) -> Json:
    return pod(
        container(limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"} if limits is None else limits), **more
    )


def ask(item: Json, settings: Config | None = None, cards: Catalog = CARDS, **request: Any) -> Json:
    config = settings or Config()
    body = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "u-1",
            "operation": "CREATE",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "namespace": "default",
            "userInfo": {"username": "jane", "groups": ["system:authenticated"]},
            "object": item,
            "oldObject": None,
            "dryRun": False,
            **request,
        },
    }
    admission = Admission(config, rules(config), cards, "kube-system")
    answer: Json = admission.review(msgspec.json.encode(body))["response"]
    assert answer["uid"] == "u-1"
    return answer


def apply(item: Json, answer: Json) -> Json:
    assert answer["allowed"], answer
    if "patch" not in answer:
        return copy.deepcopy(item)
    assert answer["patchType"] == "JSONPatch"
    result: Json = json_patch(item, msgspec.json.decode(base64.b64decode(answer["patch"])))
    return result


def admitted(item: Json, settings: Config | None = None, cards: Catalog = CARDS) -> Json:
    """The pod after admission; admission of the result changes nothing."""
    result = apply(item, ask(item, settings, cards))
    again = ask(result, settings, cards)
    assert apply(result, again) == result
    assert "patch" not in again
    return result


def denial(item: Json, settings: Config | None = None, **request: Any) -> str:
    answer = ask(item, settings, **request)
    assert not answer["allowed"]
    assert "patch" not in answer
    assert answer["status"]["reason"] == "Forbidden"
    message: str = answer["status"]["message"]
    return message


LIMITS = "spec.containers[main].resources.limits"


@pytest.mark.parametrize(
    ("limits", "field", "value", "allowed"),
    [
        ({"nvidia.com/gpumem": "abc"}, "nvidia.com/gpumem", '"abc"', "from 1 to 16777216"),
        ({"nvidia.com/gpumem": -1}, "nvidia.com/gpumem", "-1", "from 1 to 16777216"),
        ({"nvidia.com/gpumem": 1.5}, "nvidia.com/gpumem", "1.5", "whole number of MiB"),
        ({"nvidia.com/gpumem": "1500m"}, "nvidia.com/gpumem", '"1500m"', "whole number of MiB"),
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 0}, "nvidia.com/gpumem", "0", "from 1 to 16777216"),
        ({"nvidia.com/gpumem": "8Gi"}, "nvidia.com/gpumem", '"8Gi"', "write 8192, not 8Gi"),
        ({"nvidia.com/gpumem-percentage": 101}, "nvidia.com/gpumem-percentage", "101", "from 1 to 100"),
        ({"nvidia.com/gpumem-percentage": 0}, "nvidia.com/gpumem-percentage", "0", "from 1 to 100"),
        ({"nvidia.com/gpucores": 101}, "nvidia.com/gpucores", "101", "from 0 to 100"),
        ({"nvidia.com/gpucores": -5}, "nvidia.com/gpucores", "-5", "from 0 to 100"),
        ({"nvidia.com/gpu": 0, "nvidia.com/gpumem": 3000}, "nvidia.com/gpu", "0", "must be 1 or more"),
        ({"nvidia.com/gpu": "1.5"}, "nvidia.com/gpu", '"1.5"', "whole number of cards"),
        ({"nvidia.com/gpu": 1, "nvidia.com/priority": 2}, "nvidia.com/priority", "2", "0 (high) or 1 (low)"),
    ],
)
def test_a_malformed_request_is_denied_with_field_value_and_what_is_allowed(
    limits: Json, field: str, value: str, allowed: str
) -> None:
    said = denial(gpu_pod(limits))
    assert said.startswith(f"{LIMITS}[{field}] is {value}: ")
    assert allowed in said


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (gpu_pod(spec={"nodeName": "node-a"}), 'spec.nodeName is "node-a": a pod that asks for a GPU is placed by'),
        (
            pod(
                container(limits={"nvidia.com/gpu": 1}),
                container("shell", securityContext={"privileged": True}),
            ),
            "spec.containers[shell].securityContext.privileged is true: must be false in a pod that asks for a GPU",
        ),
        (
            gpu_pod(annotations={"vgpu.io/gpu-policy": "best"}),
            'metadata.annotations[vgpu.io/gpu-policy] is "best": must be one of spread, binpack',
        ),
        (
            gpu_pod(annotations={"nvidia.com/numa-bind": "yes"}),
            'metadata.annotations[nvidia.com/numa-bind] is "yes": must be one of true, false',
        ),
        (
            gpu_pod(annotations={"vgpu.io/allocation": "{}"}),
            'metadata.annotations[vgpu.io/allocation] is "{}": only the scheduler writes it, leave it out',
        ),
        (
            pod(container(), annotations={"vgpu.io/allocation": "{}"}),
            'metadata.annotations[vgpu.io/allocation] is "{}": only the scheduler writes it, leave it out',
        ),
        (
            gpu_pod(annotations={"vgpu.io/allocation": "{}"}, labels={"vgpu.io/webhook": "ignore"}),
            'metadata.annotations[vgpu.io/allocation] is "{}": only the scheduler writes it, leave it out',
        ),
        (
            gpu_pod(spec={"schedulerName": "volcano"}),
            'spec.schedulerName is "volcano": a pod that asks for a GPU is placed by vgpu-scheduler: write that',
        ),
        (
            pod(container(limits={"nvidia.com/gpu": 1}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])),
            'spec.containers[main].env[NVIDIA_VISIBLE_DEVICES] is "all": is set by the product',
        ),
        (
            pod(container(limits={"nvidia.com/gpu": 1}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}])),
            'spec.containers[main].env[NVIDIA_VISIBLE_DEVICES] is "void"',
        ),
        (
            pod(
                container(limits={"nvidia.com/gpu": 1}),
                container("log", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {}}}]),
            ),
            "spec.containers[log].env[NVIDIA_VISIBLE_DEVICES]",
        ),
        (
            pod(container(limits={"nvidia.com/gpu": 1}), container("log", {"vgpu.io/memory": "5"})),
            'spec.containers[log].resources.limits[vgpu.io/memory] is "5": is set by admission only',
        ),
        (pod(container(limits={"vgpu.io/cores": "5"})), f'{LIMITS}[vgpu.io/cores] is "5": is set by admission only'),
    ],
)
def test_what_bypasses_placement_or_isolation_is_denied(item: Json, said: str) -> None:
    assert said in denial(item)


def test_what_the_admin_allows_is_let_through() -> None:
    config = Config(scheduler=Scheduler(privileged="allow", foreign_scheduler="allow", visible_devices="override"))
    privileged = pod(container(limits={"nvidia.com/gpu": 1}, securityContext={"privileged": True}))
    assert admitted(privileged, config)["metadata"]["labels"] == {"vgpu.io/managed": "true"}
    foreign = gpu_pod(spec={"schedulerName": "volcano"})
    answer = ask(foreign, config)
    assert apply(foreign, answer) == foreign
    assert "volcano" in answer["warnings"][0]
    everything = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    item = pod(
        container(limits={"nvidia.com/gpu": 1}, env=[*everything, {"name": "A", "value": "1"}, *everything]),
        container("log", env=[{"name": "B", "value": "2"}, *everything, *everything]),
    )
    priority = {"name": "CUDA_TASK_PRIORITY", "value": "5"}
    both = pod(container(limits={"nvidia.com/gpu": 1, "nvidia.com/priority": 1}, env=[*everything, priority]))
    assert admitted(both, config)["spec"]["containers"][0]["env"] == [{**priority, "value": "1"}]
    main, log = admitted(item, config)["spec"]["containers"]
    assert main["env"] == [{"name": "A", "value": "1"}]
    assert log["env"] == [{"name": "B", "value": "2"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


def test_a_pod_without_gpu_is_left_alone() -> None:
    for item in (pod(container()), pod({"name": "main"}), pod(container(limits={"cpu": "1"}, env=None))):
        answer = ask(item)
        assert answer == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize("label", names.WEBHOOK_LABELS)
def test_a_pod_that_opts_out_is_left_alone(label: str) -> None:
    item = gpu_pod({"nvidia.com/gpumem": "abc"}, labels={label: "ignore"}, spec={"nodeName": "node-a"})
    assert ask(item) == {"uid": "u-1", "allowed": True}
    assert not ask(gpu_pod({"nvidia.com/gpumem": "abc"}, labels={label: "no"}))["allowed"]


def limits_of(item: Json, name: str = "main") -> Json:
    for each in item["spec"].get("initContainers", []) + item["spec"]["containers"]:
        if each["name"] == name:
            assert each["resources"]["limits"] == each["resources"]["requests"]
            found: Json = each["resources"]["limits"]
            return found
    raise AssertionError(name)


def test_everything_that_a_gpu_pod_needs_is_written() -> None:
    item = pod(
        container(limits={"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3k", "nvidia.com/gpucores": "30"}),
        container("log"),
    )
    result = admitted(item)
    assert result["metadata"]["labels"] == {"vgpu.io/managed": "true"}
    assert result["spec"]["schedulerName"] == "vgpu-scheduler"
    assert limits_of(result) == {
        "nvidia.com/gpu": "2",
        "nvidia.com/gpumem": "3k",
        "nvidia.com/gpucores": "30",
        "vgpu.io/memory": "6000",
        "vgpu.io/cores": "60",
    }
    assert "env" not in result["spec"]["containers"][0]
    assert result["spec"]["containers"][1]["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]


def test_requests_without_limits_are_copied_and_one_card_is_the_default() -> None:
    item = pod({"name": "main", "resources": {"requests": {"nvidia.com/gpumem": "100", "cpu": "1"}}})
    result = admitted(item)["spec"]["containers"][0]["resources"]
    assert result["limits"] == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100", "vgpu.io/memory": "100"}
    assert result["requests"] == {**result["limits"], "cpu": "1"}


def test_init_containers_and_sidecars_are_translated_too() -> None:
    item = gpu_pod(
        spec={
            "initContainers": [
                container("warm", {"nvidia.com/gpucores": "10"}),
                container("side", {"nvidia.com/gpumem": "50"}, restartPolicy="Always"),
                container("plain"),
            ]
        }
    )
    result = admitted(item)
    assert limits_of(result, "warm")["vgpu.io/cores"] == "10"
    assert limits_of(result, "side")["vgpu.io/memory"] == "50"
    assert result["spec"]["initContainers"][2]["env"][0]["value"] == "void"


def test_whole_cards_and_percentages_count_as_those_of_the_smallest_accepted_card() -> None:
    whole = gpu_pod({"nvidia.com/gpu": "2"})
    answer = ask(whole)
    assert answer["warnings"] == ["spec.containers[main] takes whole cards; to share them, set nvidia.com/gpumem (MiB)"]
    assert limits_of(admitted(whole)) == {
        "nvidia.com/gpu": "2",
        "nvidia.com/gpumem-percentage": "100",
        "vgpu.io/memory": "32000",
    }
    half = gpu_pod({"nvidia.com/gpumem-percentage": "50"}, annotations={"nvidia.com/use-gputype": "H100"})
    assert limits_of(admitted(half))["vgpu.io/memory"] == "40000"
    assert "warnings" not in ask(half)
    assert "vgpu.io/memory" not in limits_of(admitted(half, cards=Catalog()))


def test_defaults_of_the_cluster_are_written_out() -> None:
    config = Config(scheduler=Scheduler(default_mem=4000, default_cores=20))
    item = gpu_pod({"nvidia.com/gpu": "1"})
    assert limits_of(admitted(item, config)) == {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": "4000",
        "nvidia.com/gpucores": "20",
        "vgpu.io/memory": "4000",
        "vgpu.io/cores": "20",
    }
    assert "warnings" not in ask(item, config)


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
    assert warning.startswith("metadata.annotations[vgpu.io/memory-mode] has no effect beside vgpu.io/oversubscribe")


def test_what_has_no_effect_is_warned_of() -> None:
    item = gpu_pod({"nvidia.com/gpumem": "3000", "nvidia.com/gpumem-percentage": "50"})
    item["spec"]["containers"][0]["resources"]["requests"] = {"nvidia.com/gpumem": "2k"}
    assert ask(item)["warnings"] == [
        "spec.containers[main]: nvidia.com/gpumem-percentage has no effect beside nvidia.com/gpumem",
        "spec.containers[main] requests 2k of nvidia.com/gpumem and has the limit 3000: the limit counts",
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


def test_misspelt_annotations_are_warned_of() -> None:
    notes = {"vgpu.io/gpu_policy": "spread", "vgpu.io/colour": "red", "nvidia.com/use-gpu-type": "T4", "a/b": "c"}
    assert ask(gpu_pod(annotations=notes))["warnings"] == [
        "metadata.annotations[vgpu.io/gpu_policy] is not known: did you mean vgpu.io/gpu-policy?",
        "metadata.annotations[vgpu.io/colour] is not known and has no effect",
        "metadata.annotations[nvidia.com/use-gpu-type] is not known: did you mean nvidia.com/use-gputype?",
    ]


NO_EFFECT = "has no effect: write it in resources.limits of a container"
OTHERS = "is another product's and has no effect"


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    ("field", "key", "said"),
    [
        ("annotations", "nvidia.com/gpucores", NO_EFFECT),
        ("annotations", "nvidia.com/priority", NO_EFFECT),
        ("labels", "nvidia.com/gpumem", NO_EFFECT),
        ("labels", "nvidia.com/gpu", NO_EFFECT),
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
        ("annotations", "vgpu.io/webhook", "has no effect as an annotation: opting out of admission is a label"),
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
    ],
)
def test_another_products_part_of_a_card_is_warned_of(key: str, likely: str) -> None:
    for limits in ({key: "5"}, {key: "5", "nvidia.com/gpumem": "3000"}):
        (warning,) = ask(gpu_pod(limits))["warnings"]
        assert warning == f"{LIMITS}[{key}] is another product's and has no effect on vgpu: write {likely}"


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
            'nvidia.com/use-gputype]: no card of this cluster matches "Tesla-T5" or "A100*"; there are H100, T4',
        ),
        (
            {"nvidia.com/nouse-gputype": "A10"},
            'nvidia.com/nouse-gputype]: no card of this cluster matches "A10"; there are H100, T4',
        ),
        (
            {"nvidia.com/use-gputype": "T4", "nvidia.com/nouse-gputype": "T4"},
            "nvidia.com/nouse-gputype] leaves no card of this cluster; there are H100, T4",
        ),
        ({"nvidia.com/use-gputype": " ,"}, "nvidia.com/use-gputype] is empty and has no effect"),
        ({"nvidia.com/use-gpuuuid": "0"}, 'nvidia.com/use-gpuuuid]: no card of this cluster has the UUID "0"'),
        ({"nvidia.com/nouse-gpuuuid": "x"}, 'nvidia.com/nouse-gpuuuid]: no card of this cluster has the UUID "x"'),
        (
            {"nvidia.com/use-gpuuuid": "GPU-T4", "nvidia.com/nouse-gpuuuid": "GPU-T4"},
            "nvidia.com/nouse-gpuuuid] leaves none of the cards of nvidia.com/use-gpuuuid",
        ),
        ({"nvidia.com/vgpu-mode": "hami-core"}, 'nvidia.com/vgpu-mode] is "hami-core", which is "share" here'),
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


def test_a_few_mib_are_probably_gib() -> None:
    (warning,) = ask(gpu_pod({"nvidia.com/gpumem": "16"}))["warnings"]
    assert warning.endswith("less than any CUDA context takes; the unit is MiB: for 16 GiB, write 16384")
    assert "warnings" not in ask(gpu_pod({"nvidia.com/gpumem": "64"}))


RANGED = "kubernetes.io/limit-ranger"


def ranged(*written: str) -> Json:
    """The annotation in which the API server says what a LimitRange has set."""
    return {RANGED: f"LimitRanger plugin set: {'; '.join(written)}"}


def test_a_card_by_a_limit_range_alone_is_warned_of() -> None:
    notes = ranged("nvidia.com/gpumem limit for container log", "cpu, nvidia.com/gpumem request for container log")
    item = pod(container(limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}),
               container("log", {"nvidia.com/gpumem": "3000"}), annotations=notes)  # fmt: skip
    (warning,) = ask(item)["warnings"]
    assert warning == (
        "spec.containers[log] gets a card because a LimitRange of the namespace sets nvidia.com/gpumem: 3000;"
        " set nvidia.com/gpu: 0 in it if it needs none"
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
    said, by = "asks for no card (nvidia.com/gpu: 0)", "set by a LimitRange, is removed"
    assert warnings == [
        f"spec.initContainers[warm] {said}: nvidia.com/gpumem, nvidia.com/gpucores, {by}",
        f"spec.containers[log] {said}: nvidia.com/gpumem, {by}",
    ]
    alone = pod(container(limits=none), annotations=ranged("nvidia.com/gpumem limit for container main"))
    assert admitted(alone)["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "0"}
    assert "must be 1 or more where memory" in denial(pod(container(limits=none)))  # nobody but the user wrote it


def test_keys_of_others_and_our_own_are_not_warned_of() -> None:
    notes = {"nvidia.com/use-gputype": "T4", "vgpu.io/gpu-policy": "spread", "nvidia.com/something": "1"}
    limits = {"nvidia.com/gpumem": "3000", "nvidia.com/mig-1g.5gb": "1", "nvidia.com/gpu.shared": "1", "cpu": "1"}
    assert "warnings" not in ask(gpu_pod(limits, annotations=notes))
    assert "warnings" not in ask(gpu_pod({**limits, "vgpu.io/memory": "3000"}))


def test_totals_written_by_a_user_are_set_right() -> None:
    item = gpu_pod({"nvidia.com/gpumem": "100", "vgpu.io/memory": "1", "vgpu.io/cores": "7"})
    item["spec"]["containers"][0]["resources"]["requests"] = {"vgpu.io/memory": "1"}
    assert limits_of(admitted(item)) == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "100", "vgpu.io/memory": "100"}


def test_priority_becomes_the_environment_and_never_a_second_variable() -> None:
    twice = [{"name": "CUDA_TASK_PRIORITY", "value": "5"}, {"name": "A"}, {"name": "CUDA_TASK_PRIORITY", "value": "6"}]
    item = pod(container(limits={"nvidia.com/gpumem": "1", "nvidia.com/priority": "1"}, env=twice))
    env = admitted(item)["spec"]["containers"][0]["env"]
    assert env == [{"name": "CUDA_TASK_PRIORITY", "value": "1"}, {"name": "A"}]
    fresh = pod({"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", "nvidia.com/priority": "0"}}})
    assert admitted(fresh)["spec"]["containers"][0]["env"] == [{"name": "CUDA_TASK_PRIORITY", "value": "0"}]


def test_the_names_of_the_cluster_are_used() -> None:
    config = Config(resource_name="example.org/vgpu", resource_mem="example.org/mem", scheduler_name="other")
    result = admitted(gpu_pod({"example.org/mem": "10"}), config)
    assert limits_of(result) == {"example.org/vgpu": "1", "example.org/mem": "10", "vgpu.io/memory": "10"}
    assert result["spec"]["schedulerName"] == "other"
    assert ask(gpu_pod({"nvidia.com/gpu": "1"}), config) == {"uid": "u-1", "allowed": True}


def update(old: Json, new: Json, **request: Any) -> Json:
    return ask(new, operation="UPDATE", oldObject=old, **request)


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ({}, {"annotations": {"vgpu.io/allocation": "{}"}}, "metadata.annotations[vgpu.io/allocation]"),
        ({"annotations": {"vgpu.io/allocation": "{}"}}, {}, "metadata.annotations[vgpu.io/allocation]"),
        (
            {"annotations": {"vgpu.io/allocation": "{}"}},
            {"annotations": {"vgpu.io/allocation": "{1}"}},
            "metadata.annotations[vgpu.io/allocation]",
        ),
        ({"labels": {"vgpu.io/managed": "true"}}, {"labels": {}}, "metadata.labels[vgpu.io/managed]"),
    ],
)
def test_records_cannot_be_forged_later(before: Json, after: Json, field: str) -> None:
    old, new = gpu_pod(**before), gpu_pod(**after)
    answer = update(old, new)
    assert not answer["allowed"]
    assert answer["status"]["message"].startswith(field)
    ours = {"username": "system:serviceaccount:kube-system:vgpu", "groups": ["system:serviceaccounts:kube-system"]}
    assert update(old, new, userInfo=ours)["allowed"]
    assert update(old, old)["allowed"]


def test_an_ephemeral_container_of_a_managed_pod_sees_no_card() -> None:
    def with_debugger(**more: Any) -> Json:
        return gpu_pod(labels={"vgpu.io/managed": "true"}, spec={"ephemeralContainers": [{"name": "debugger", **more}]})

    old = gpu_pod(labels={"vgpu.io/managed": "true"})
    new = with_debugger()
    request = {"operation": "UPDATE", "oldObject": old, "subResource": "ephemeralcontainers"}
    result = apply(new, ask(new, **request))
    assert result["spec"]["ephemeralContainers"][0]["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert "env" not in result["spec"]["containers"][0]
    for bad in (
        {"securityContext": {"privileged": True}},
        {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]},
    ):
        assert "spec.ephemeralContainers[debugger]" in denial(with_debugger(**bad), **request)
    # Labels that the request leaves out: the pod keeps them.
    bare = gpu_pod(spec={"ephemeralContainers": [{"name": "debugger"}]})
    assert "metadata.labels[vgpu.io/managed]" in denial(bare, **request)
    ours = {"username": "system:serviceaccount:kube-system:vgpu", "groups": ["system:serviceaccounts:kube-system"]}
    result = apply(bare, ask(bare, userInfo=ours, **request))
    assert result["spec"]["ephemeralContainers"][0]["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    free = pod(container(), spec={"ephemeralContainers": [{"name": "debugger"}]})
    assert ask(free, **{**request, "oldObject": pod(container())}) == {"uid": "u-1", "allowed": True}


@pytest.mark.parametrize(
    "request_",
    [
        {"operation": "DELETE", "object": None},
        {"resource": {"group": "", "resource": "nodes"}, "object": {}},
        {"subResource": "binding", "object": {}},
        {"operation": "UPDATE", "subResource": "status", "object": {}},
    ],
)
def test_other_requests_are_allowed_unread(request_: Json) -> None:
    assert ask({}, **request_) == {"uid": "u-1", "allowed": True}


def test_a_review_without_a_pod_is_a_bad_body() -> None:
    with pytest.raises(BadBody, match=r"request\.object is missing"):
        ask({}, object=None)
    with pytest.raises(BadBody, match=r"\$\.spec\.containers"):
        ask({"spec": {"containers": "main"}})


def test_one_family_of_names_per_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign:
        def uses(self, _: Pod, __: Rules) -> bool:
            return True

        def translate(self, _: Pod, __: Rules) -> PodRequest | None:
            return PodRequest(())

    both = {**dialects.dialects(), "tencent": Foreign()}
    monkeypatch.setattr("scheduler.admission.webhook.dialects", lambda: both)
    assert (
        denial(gpu_pod()) == 'spec.containers is "nvidia, tencent": a pod asks for GPUs in the names of one family only'
    )


def test_pointers_escape_both_signs() -> None:
    assert pointer("metadata", "labels", "a/b~c", 0) == "/metadata/labels/a~1b~0c/0"
    patch = Patch()
    patch.merge(("m",), {"keep": 1, "a/b": 1, "gone": 1}, {"a/b": 2, "new": 3, "gone": None, "never": None})
    document = {"m": {"keep": 1, "a/b": 1, "gone": 1}}
    assert json_patch(document, patch.operations) == {"m": {"keep": 1, "a/b": 2, "new": 3}}
    nothing = Patch()
    nothing.merge(("m",), None, {"a": None})
    assert nothing.operations == []
