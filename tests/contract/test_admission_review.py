"""AdmissionReviews that a real kube-apiserver sent, answered in the form that it accepts."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.admission.webhook import Admission
from scheduler.cluster import ClusterState
from scheduler.wire import BadBody
from vgpu.config import Config, rules
from vgpu.standin.apiserver.patches import json_patch

WIRE = Path(__file__).parents[1] / "data" / "wire"
STEMS = ("admission-nodecache", "admission-fullnodes")


def review(body: bytes) -> dict[str, Any]:
    config = Config()
    found: dict[str, Any] = Admission(config, rules(config), ClusterState(), "kube-system").review(body)
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("stem", STEMS)
def test_the_captured_pod_is_translated(stem: str) -> None:
    body = (WIRE / f"{stem}.json").read_bytes()
    request = json.loads(body)["request"]
    answer = review(body)
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = answer["response"]
    assert set(response) == {"uid", "allowed", "patchType", "patch"}
    assert response["uid"] == request["uid"]
    patched = json_patch(request["object"], json.loads(base64.b64decode(response["patch"])))
    asked = {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": "60k",
        "nvidia.com/gpucores": "50",
        "vgpu.io/memory": "60000",
        "vgpu.io/cores": "50",
    }
    main, sidecar = patched["spec"]["containers"]
    assert main["resources"] == {"limits": asked, "requests": asked}
    assert sidecar["env"] == patched["spec"]["initContainers"][0]["env"]
    assert sidecar["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert patched["spec"]["schedulerName"] == "vgpu-scheduler"
    assert patched["metadata"]["labels"] == {"vgpu.io/managed": "true"}
    expected = json.loads(json.dumps(request["object"]))
    expected["metadata"]["labels"] = patched["metadata"]["labels"]
    for field in ("containers", "initContainers", "schedulerName"):
        expected["spec"][field] = patched["spec"][field]
    assert patched == expected, "nothing else is touched"


def test_the_answer_to_a_denial_has_status_and_no_patch() -> None:
    captured = json.loads((WIRE / "admission-nodecache.json").read_text())
    captured["request"]["object"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpucores"] = "101"
    response = review(json.dumps(captured).encode())["response"]
    assert response == {
        "uid": captured["request"]["uid"],
        "allowed": False,
        "status": {
            "code": 403,
            "reason": "Forbidden",
            "message": 'spec.containers[main].resources.limits[nvidia.com/gpucores] is "101": '
            "must be a whole number from 0 to 100 (% of the card's time)",
        },
    }


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_is_answered_alike(dry_run: bool) -> None:
    captured = json.loads((WIRE / "admission-nodecache.json").read_text())
    captured["request"]["dryRun"] = dry_run
    assert review(json.dumps(captured).encode()) == review((WIRE / "admission-nodecache.json").read_bytes())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"apiVersion": "admission.k8s.io/v1beta1"},
            "admission.k8s.io/v1beta1 AdmissionReview, not admission.k8s.io/v1",
        ),
        ({"kind": "Pod"}, "admission.k8s.io/v1 Pod, not"),
        ({"request": None}, "$.request"),
        ({"request": {"uid": "", "operation": "CREATE"}}, "request.uid is empty"),
        ({"request": {"operation": "CREATE"}}, "missing required field `uid`"),
    ],
)
def test_what_is_no_review_is_a_bad_body(change: dict[str, Any], said: str) -> None:
    captured = json.loads((WIRE / "admission-nodecache.json").read_text())
    with pytest.raises(BadBody) as found:
        review(json.dumps({**captured, **change}).encode())
    assert said in str(found.value)
