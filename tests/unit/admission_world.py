"""A cluster of two models, pods, and admission's answers about them."""

import base64
import copy
from collections.abc import Collection
from typing import Any

import msgspec

from scheduler.admission.webhook import Admission
from vgpu.config import Config, rules
from vgpu.resources import CardSelector, GpuRequest
from vgpu.standin.apiserver.patches import json_patch

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


def limits_of(item: Json, name: str = "main") -> Json:
    for each in item["spec"].get("initContainers", []) + item["spec"]["containers"]:
        if each["name"] == name:
            assert each["resources"]["limits"] == each["resources"]["requests"]
            found: Json = each["resources"]["limits"]
            return found
    raise AssertionError(name)
