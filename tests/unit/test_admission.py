"""Admission of pods: which pods are denied with which message, and what is written into the pod."""

from typing import Any

import pytest
from admission_world import LIMITS, Catalog, Json, admitted, apply, ask, container, denial, gpu_pod, limits_of, pod

from scheduler.admission import dialects
from scheduler.admission.patches import Patch, pointer
from scheduler.wire import BadBody, Pod
from vgpu import names
from vgpu.config import Config, Scheduler
from vgpu.resources import PodRequest, Rules
from vgpu.standin.apiserver.patches import json_patch


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
        (
            gpu_pod(spec={"nodeName": "node-a"}),
            'spec.nodeName is "node-a": the scheduler places pods that ask for a GPU',
        ),
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
            'metadata.annotations[vgpu.io/allocation] is "{}": only the scheduler writes this annotation; leave it out',
        ),
        (
            pod(container(), annotations={"vgpu.io/allocation": "{}"}),
            'metadata.annotations[vgpu.io/allocation] is "{}": only the scheduler writes this annotation; leave it out',
        ),
        (
            gpu_pod(annotations={"vgpu.io/allocation": "{}"}, labels={"vgpu.io/webhook": "ignore"}),
            'metadata.annotations[vgpu.io/allocation] is "{}": only the scheduler writes this annotation; leave it out',
        ),
        (
            gpu_pod(spec={"schedulerName": "volcano"}),
            'spec.schedulerName is "volcano": vgpu-scheduler places pods that ask for a GPU: write that',
        ),
        (
            pod(container(limits={"nvidia.com/gpu": 1}, env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])),
            'spec.containers[main].env[NVIDIA_VISIBLE_DEVICES] is "all": vgpu sets this variable',
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
            'spec.containers[log].resources.limits[vgpu.io/memory] is "5": only admission sets this total',
        ),
        (
            pod(container(limits={"vgpu.io/cores": "5"})),
            f'{LIMITS}[vgpu.io/cores] is "5": only admission sets this total',
        ),
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
        denial(gpu_pod())
        == 'spec.containers is "nvidia, tencent": a pod may use the GPU resource names of only one family'
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
