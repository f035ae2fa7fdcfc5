"""The admission webhook: denies invalid pods, and writes out in full what a GPU pod asks for."""

import logging
from typing import Any, Final

import msgspec

from scheduler.admission import checks
from scheduler.admission.defaults import declined
from scheduler.admission.dialects import dialects
from scheduler.admission.effects import without_effect
from scheduler.admission.hints import misspelt
from scheduler.admission.mutation import Cards, Mutation, hide_cards
from scheduler.admission.patches import Patch
from scheduler.admission.review import Answer, Request, decode, encode
from scheduler.admission.strangers import elsewhere
from scheduler.wire import BadBody, Pod, parse
from vgpu import names
from vgpu.config import Config
from vgpu.resources import PodRequest, RequestError, Rules

log = logging.getLogger(__name__)

EPHEMERAL: Final = "ephemeralcontainers"


class Admission:
    """Gives the same answer to the same question: dry runs and repetitions need no special code."""

    def __init__(self, settings: Config, rules: Rules, cards: Cards, trusted_namespace: str) -> None:
        """`trusted_namespace`: its service accounts (the scheduler's, the agents') may change records."""
        self._settings = settings
        self._rules = rules
        self._cards = cards
        self._trusted = f"system:serviceaccounts:{trusted_namespace}"

    def review(self, body: bytes) -> dict[str, Any]:
        """The answer to an AdmissionReview; raises BadBody when the body is no AdmissionReview."""
        request = decode(body)
        try:
            answer = self._judge(request)
        except RequestError as error:
            answer = Answer(denied=str(error))
        if answer.denied is not None:
            log.info("denied %s of a pod in namespace %s: %s", request.operation, request.namespace, answer.denied)
        return encode(request.uid, answer)

    def _judge(self, request: Request) -> Answer:
        if not request.of_pods:
            return Answer()
        if request.operation == "CREATE" and not request.subResource:
            return self._create(_pod(request.object, "object"))
        if request.operation == "UPDATE" and request.subResource in (None, "", EPHEMERAL):
            old, new = _pod(request.oldObject, "oldObject"), _pod(request.object, "object")
            if self._trusted not in (request.userInfo.groups or ()):
                checks.records_unchanged(old, new)
            if request.subResource == EPHEMERAL:
                return self._debug(old, new)
        return Answer()

    def _create(self, pod: Pod) -> Answer:
        checks.created_without_records(pod)  # a pod that opted out of admission is checked, too
        labels = pod.metadata.labels or {}
        if any(labels.get(label) == names.WEBHOOK_IGNORE for label in names.WEBHOOK_LABELS):
            return Answer()
        hints = [*elsewhere(pod, self._rules), *misspelt(pod, self._rules)]
        patch = Patch()
        pod, warnings = declined(pod, self._rules, patch)
        hints += warnings
        try:
            return self._admit(pod, hints, patch)
        except RequestError as error:  # a warning may name the LimitRange that asks for the card
            return Answer(denied=str(error), warnings=tuple(hints))

    def _admit(self, pod: Pod, hints: list[str], patch: Patch) -> Answer:
        """`hints`, `patch`: earlier warnings about the pod, and earlier changes of the pod."""
        request = self._translate(pod)
        if request is None:
            checks.totals_are_ours(pod, ())
            return Answer(warnings=tuple(hints), patch=tuple(patch.operations))
        ours, settings = self._settings.scheduler_name, self._settings.scheduler
        try:
            checks.scheduled_by_us(pod, ours)
        except RequestError:
            if settings.foreign_scheduler == "deny":
                raise
            foreign = (
                f"spec.schedulerName is {pod.spec.schedulerName}: node agents give only cards that {ours} has chosen"
            )
            return Answer(warnings=(foreign, *hints), patch=tuple(patch.operations))
        checks.create(pod, request, settings)
        mutation = Mutation(pod, request, self._rules, ours, self._cards, patch)
        may_disable = self._settings.device_plugin.allowDisableControl
        effects = without_effect(pod, request, self._cards, self._rules, may_disable=may_disable)
        return Answer(warnings=(*mutation.warnings, *effects, *hints), patch=tuple(patch.operations))

    def _translate(self, pod: Pod) -> PodRequest | None:
        speaking = {name: dialect for name, dialect in dialects().items() if dialect.uses(pod, self._rules)}
        if not speaking:
            return None
        if len(speaking) > 1:
            families = ", ".join(speaking)
            raise RequestError("spec.containers", families, "a pod may use the GPU resource names of only one family")
        (dialect,) = speaking.values()
        return dialect.translate(pod, self._rules)

    def _debug(self, old: Pod, pod: Pod) -> Answer:
        """An ephemeral container joins a managed pod: it must see no card and must not be privileged."""
        # The old labels count: a request may omit them, and the pod keeps them.
        if (old.metadata.labels or {}).get(names.LABEL_MANAGED) != "true":
            return Answer()
        # The other containers passed when the pod was created; they cannot change any more.
        added = Pod(pod.metadata, msgspec.structs.replace(pod.spec, initContainers=None, containers=None))
        checks.not_privileged(added, self._settings.scheduler)
        checks.visible_devices_unset(added, None, self._settings.scheduler)
        patch = Patch()
        for group, index, container in checks.containers(added):
            hide_cards(patch, ("spec", group, index), container)
        return Answer(patch=tuple(patch.operations))


def _pod(raw: msgspec.Raw, field: str) -> Pod:
    if bytes(raw) == b"null":
        raise BadBody(f"the body is not AdmissionReview: request.{field} is missing")
    return parse(bytes(raw), Pod)
