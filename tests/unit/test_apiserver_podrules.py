"""What the API server does to pods: quantities, defaults, validation."""

import copy
from fractions import Fraction
from typing import Any

import pytest

from vgpu.kube.client import ApiError
from vgpu.standin.apiserver.podrules import canonical, check_update, is_extended, requested, set_defaults, validate


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (60000, "60k"),  # measured on a real API server
        ("60000", "60k"),
        (3000, "3k"),
        (8192, "8192"),
        ("1.5", "1500m"),
        ("0.0005", "500u"),
        (0, "0"),
        ("-1", "-1"),
        ("-60000", "-60k"),
        ("1000000", "1M"),
        ("1024Ki", "1Mi"),
        ("1.5Gi", "1536Mi"),
        ("0.5Ki", "512"),
        ("1e3", "1e3"),
        ("1e4", "10e3"),
        ("12E", "12E"),
        ("0.0000000001", "1n"),
    ],
)
def test_canonical_quantity(value: object, text: str) -> None:
    assert canonical(value) == text


@pytest.mark.parametrize("value", ["abc", "", "1 Gi", True, None, "1e"])
def test_no_quantity(value: object) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        canonical(value)


def pod(*, limits: Any = None, requests: Any = None, **spec: Any) -> dict[str, Any]:
    resources = {key: value for key, value in (("limits", limits), ("requests", requests)) if value}
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "main", "image": "busybox", "resources": resources}], **spec},
    }


def test_defaults() -> None:
    one = pod(limits={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 60000})
    set_defaults(one)
    container = one["spec"]["containers"][0]
    assert container["resources"]["requests"] == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "60k"}
    assert container["imagePullPolicy"] == "Always"
    assert one["spec"]["schedulerName"] == "default-scheduler"
    assert one["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
    again = copy.deepcopy(one)
    set_defaults(again)
    assert again == one


def test_unparsable_quantity_is_a_bad_request() -> None:
    with pytest.raises(ApiError, match="quantities must match") as caught:
        set_defaults(pod(limits={"nvidia.com/gpumem": "abc"}))
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"requests": {"nvidia.com/gpu": "1"}}, "Limit must be set for non overcommitable"),
        ({"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "1"}}, "must be equal to nvidia.com/gpu"),
        ({"limits": {"nvidia.com/gpu": "1.5"}}, "must be an integer"),
        ({"limits": {"nvidia.com/gpu": "-1"}}, "greater than or equal to 0"),
        ({"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}, "less than or equal to cpu limit"),
        ({"limits": {"gpu": "1"}}, "must be a standard resource"),
    ],
)
def test_invalid_resources(resources: Any, said: str) -> None:
    one = pod(**resources)
    set_defaults(one)
    with pytest.raises(ApiError, match=said) as caught:
        validate(one)
    assert (caught.value.status, caught.value.reason) == (422, "Invalid")


def test_only_some_fields_of_the_spec_change() -> None:
    old = pod()
    check_update(old, pod(tolerations=[{"operator": "Exists"}], activeDeadlineSeconds=3))
    image = pod()
    image["spec"]["containers"][0]["image"] = "other"
    check_update(old, image)
    with pytest.raises(ApiError, match=r"changed: schedulerName\)"):
        check_update(old, pod(schedulerName="other"))


@pytest.mark.parametrize(
    ("name", "extended"),
    [("cpu", False), ("nvidia.com/gpu", True), ("vgpu.io/memory", True), ("batch.kubernetes.io/x", False)],
)
def test_extended_resources(name: str, extended: bool) -> None:
    assert is_extended(name) is extended


def test_requested_counts_the_largest_init_container_beside_its_sidecars() -> None:
    def container(name: str, count: int, **more: str) -> dict[str, Any]:
        return {"name": name, "resources": {"limits": {"nvidia.com/gpu": str(count)}}, **more}

    one = {
        "spec": {
            "initContainers": [
                container("first", 4),
                container("side", 1, restartPolicy="Always"),
                container("second", 5),
            ],
            "containers": [container("a", 2), container("b", 2)],
        }
    }
    assert requested(one) == {"nvidia.com/gpu": Fraction(6)}
