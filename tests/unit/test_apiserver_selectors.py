"""Label and field selectors."""

from typing import Any

import pytest

from vgpu.standin.apiserver.selectors import SelectorError, field_selector, label_selector, selector_object

POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "n", "labels": {"app": "web", "tier": "front"}},
    "spec": {"nodeName": "a", "schedulerName": "s"},
    "status": {"phase": "Running"},
}


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", True),
        ("app=web", True),
        ("app==web,tier=front", True),
        ("app=db", False),
        ("app!=db", True),
        ("other!=x", True),
        ("app", True),
        ("other", False),
        ("!other", True),
        ("!app", False),
        ("app in (db,web),tier", True),
        ("app notin (db, web)", False),
        ("other notin (x)", True),
    ],
)
def test_labels(text: str, selected: bool) -> None:
    assert label_selector(text)(POD) is selected


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("", True),
        ("metadata.name=p,metadata.namespace=n", True),
        ("spec.nodeName=a", True),
        ("spec.nodeName=", False),
        ("spec.nodeName!=a", False),
        ("spec.schedulerName==s,status.phase!=Failed", True),
        ("status.phase=Pending", False),
    ],
)
def test_fields(text: str, selected: bool) -> None:
    assert field_selector(text, "pods")(POD) is selected


def test_fields_that_are_not_indexed_are_refused() -> None:
    with pytest.raises(SelectorError, match=r"not supported: spec\.hostNetwork"):
        field_selector("spec.hostNetwork=true", "pods")
    with pytest.raises(SelectorError, match="FIELD=VALUE"):
        field_selector("spec.nodeName", "pods")


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        (None, True),
        ({}, True),
        ({"matchLabels": {"app": "web"}}, True),
        ({"matchLabels": {"app": "db"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "In", "values": ["web"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, False),
        ({"matchExpressions": [{"key": "other", "operator": "NotIn", "values": ["x"]}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_selector_objects(selector: Any, selected: bool) -> None:
    assert selector_object(selector, POD["metadata"]["labels"]) is selected
