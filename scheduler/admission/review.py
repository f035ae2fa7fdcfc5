"""AdmissionReview v1: what the API server sends, and what the webhook answers.

Source: k8s.io/api/admission/v1 "types.go".
"""

import base64
from typing import Any, Final

import msgspec

from scheduler.wire import BadBody, parse

API_VERSION: Final = "admission.k8s.io/v1"


class _Resource(msgspec.Struct, frozen=True):
    group: str = ""
    resource: str = ""


class UserInfo(msgspec.Struct, frozen=True):
    username: str = ""
    groups: list[str] | None = None


class Request(msgspec.Struct, frozen=True):
    uid: str
    operation: str
    resource: _Resource = _Resource()
    subResource: str | None = None
    namespace: str | None = None
    userInfo: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(b"null")
    oldObject: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def of_pods(self) -> bool:
        return not self.resource.group and self.resource.resource == "pods"


class AdmissionReview(msgspec.Struct, frozen=True):
    apiVersion: str
    kind: str
    request: Request


def decode(body: bytes) -> Request:
    """Decodes a review; raises BadBody when the body is not an AdmissionReview v1 with a request."""
    review = parse(body, AdmissionReview)
    if (review.apiVersion, review.kind) != (API_VERSION, "AdmissionReview"):
        raise BadBody(f"the body is {review.apiVersion} {review.kind}, not {API_VERSION} AdmissionReview")
    if not review.request.uid:
        raise BadBody("the body is not AdmissionReview: request.uid is empty")
    return review.request


class Answer(msgspec.Struct, frozen=True):
    """`denied`: the sentence for the user; None: allowed, after the JSON patch where there is one."""

    denied: str | None = None
    warnings: tuple[str, ...] = ()
    patch: tuple[dict[str, Any], ...] = ()


def encode(uid: str, answer: Answer) -> dict[str, Any]:
    response: dict[str, Any] = {"uid": uid, "allowed": answer.denied is None}
    if answer.denied is not None:
        response["status"] = {"code": 403, "reason": "Forbidden", "message": answer.denied}
    if answer.warnings:
        response["warnings"] = list(answer.warnings)
    if answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(answer.patch)).decode()
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}
