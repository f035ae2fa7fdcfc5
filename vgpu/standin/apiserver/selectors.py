"""Label and field selectors of list and watch requests."""

import re
from collections.abc import Callable, Mapping
from typing import Any

Match = Callable[[Mapping[str, Any]], bool]

_FIELDS = {
    "pods": ("spec.nodeName", "spec.schedulerName", "spec.restartPolicy", "status.phase"),
    "nodes": ("spec.unschedulable",),
    "events": ("involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid",
               "reason", "type"),
}  # fmt: skip
_SET = re.compile(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)")


class SelectorError(ValueError):
    """The selector is malformed, or names a field that selectors do not support."""


def _split(text: str) -> list[str]:
    """Splits the text at the commas outside parentheses."""
    return [part.strip() for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _comparison(part: str) -> tuple[str, bool, str] | None:
    for operator, equal in (("!=", False), ("==", True), ("=", True)):
        if operator in part:
            key, value = part.split(operator, 1)
            return key.strip(), equal, value.strip()
    return None


def _field(item: Mapping[str, Any], path: str) -> str:
    value: Any = item
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return str(value).lower() if isinstance(value, bool) else str(value or "")


def field_selector(text: str, resource: str) -> Match:
    """Equality on the fields that the real API server indexes for this resource. Raises SelectorError."""
    allowed = ("metadata.name", "metadata.namespace", *_FIELDS.get(resource, ()))
    terms = []
    for part in _split(text):
        term = _comparison(part)
        if term is None:
            raise SelectorError(f'field selector "{part}" is not FIELD=VALUE')
        if term[0] not in allowed:
            raise SelectorError(f"field label not supported: {term[0]}; {', '.join(allowed)} are")
        terms.append(term)
    return lambda item: all((_field(item, path) == value) is equal for path, equal, value in terms)


def _labels(item: Mapping[str, Any]) -> Mapping[str, str]:
    return (item.get("metadata") or {}).get("labels") or {}


def _label_term(part: str) -> Callable[[Mapping[str, str]], bool]:
    found = _SET.fullmatch(part)
    if found:
        key, operator = found[1], found[2]
        values = {value.strip() for value in found[3].split(",")}
        return lambda labels: (labels.get(key) in values) is (operator == "in")
    term = _comparison(part)
    if term is not None:
        return lambda labels: (labels.get(term[0]) == term[2]) is term[1]
    if part.startswith("!"):
        return lambda labels: part[1:].strip() not in labels
    if " " in part:
        raise SelectorError(f'label selector "{part}" is not understood')
    return lambda labels: part in labels


def label_selector(text: str) -> Match:
    """`a=b`, `a!=b`, `a`, `!a`, `a in (b,c)`, `a notin (b,c)`, joined by commas. Raises SelectorError."""
    terms = [_label_term(part) for part in _split(text)]
    return lambda item: all(term(_labels(item)) for term in terms)


def selector_object(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector object (matchLabels, matchExpressions) selects these labels.

    An empty selector selects everything.
    """
    selector = selector or {}
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for term in selector.get("matchExpressions") or ():
        key, operator, values = term["key"], term["operator"], term.get("values") or ()
        holds = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }.get(operator)
        if holds is None:
            raise SelectorError(f'operator "{operator}" is not one of In, NotIn, Exists, DoesNotExist')
        if not holds:
            return False
    return True
