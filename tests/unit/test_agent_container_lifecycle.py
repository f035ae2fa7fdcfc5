"""Which containers of a pod have ended before it does."""

import pytest

from device_plugin.container_lifecycle import Course
from vgpu.kube.objects import Container, ContainerState, ContainerStatus, Meta, Pod, PodSpec, PodStatus, Terminated

UID = "uid"
SPEC = PodSpec(
    initContainers=[Container("first"), Container("sidecar", restartPolicy="Always"), Container("second")],
    containers=[Container("main"), Container("other")],
)


def pod(spec: PodSpec = SPEC, *statuses: ContainerStatus) -> Pod:
    return Pod(Meta(uid=UID), spec, PodStatus(containerStatuses=list(statuses)))


def ended(course: Course, one: Pod, *granted: str) -> list[str]:
    return [name for name in granted if course.ended(one, name, granted)]


def test_an_init_container_ends_before_the_next_one_starts_and_sidecars_stay() -> None:
    course = Course()
    granted = []
    for name, gone in {"first": [], "sidecar": ["first"], "second": ["first"], "main": ["first", "second"]}.items():
        course.starts(UID, name, pod())
        granted.append(name)
        assert ended(course, pod(), *granted) == gone
    assert ended(Course(), pod(), *granted) == ["first", "second"], "an agent that knows no order"


def test_an_init_container_that_starts_once_more_counts_again() -> None:
    course, granted = Course(), ("first", "sidecar", "second", "main")
    course.starts(UID, "first", pod())
    assert ended(course, pod(), *granted) == ["second"]
    course.starts(UID, "sidecar", pod())
    assert ended(course, pod(), *granted) == ["first", "second"]
    course.starts(UID, "second", pod())
    assert ended(course, pod(), *granted) == ["first"]
    course.forget(())
    assert ended(course, pod(), *granted) == ["first", "second"]


@pytest.mark.parametrize(
    ("policy", "own", "code", "gone"),
    [
        ("Always", "", 0, False),
        ("Always", "Never", 1, True),
        ("Never", "", 1, True),
        ("Never", "Always", 0, False),
        ("OnFailure", "", 0, True),
        ("OnFailure", "", 1, False),
    ],
)
def test_an_application_container_has_ended_where_nothing_restarts_it(
    policy: str, own: str, code: int, gone: bool
) -> None:
    spec = PodSpec(containers=[Container("main", restartPolicy=own), Container("other")], restartPolicy=policy)
    over = ContainerStatus("main", "containerd://1", ContainerState(Terminated(code)))
    course = Course()
    assert course.ended(pod(spec, over), "main", ["main", "other"]) is gone
    assert not course.ended(pod(spec), "main", ["main", "other"])
    assert not course.ended(pod(spec, ContainerStatus("main", "containerd://1")), "main", ["main"])
    course.starts(UID, "main", pod(spec, over))
    assert not course.ended(pod(spec, over), "main", ["main"]), "what is told of it is of the instance before"
    again = ContainerStatus("main", "containerd://2", ContainerState(Terminated(code)))
    assert course.ended(pod(spec, again), "main", ["main"]) is gone


def test_where_rules_say_what_restarts_nothing_has_ended() -> None:
    rules = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [88]}}]
    spec = PodSpec(containers=[Container("main"), Container("other", restartPolicyRules=rules)], restartPolicy="Never")
    over = ContainerStatus("main", "containerd://1", ContainerState(Terminated(0)))
    assert not Course().ended(pod(spec, over), "main", ["main", "other"])
