"""Patch formats of the Kubernetes API."""

from typing import Any

import pytest

from vgpu.standin.apiserver.patches import PatchError, json_patch, merge, strategic


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [  # RFC 7386, appendix A
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
    ],
)
def test_merge_patch(target: Any, patch: Any, result: Any) -> None:
    assert merge(target, patch) == result


def test_patches_leave_the_target_alone() -> None:
    target = {"a": {"b": [1, 2]}}
    merge(target, {"a": {"b": None, "c": 1}})
    strategic(target, {"a": {"c": 1}})
    json_patch(target, [{"op": "add", "path": "/a/b/-", "value": 3}])
    assert target == {"a": {"b": [1, 2]}}


def test_strategic_patch_merges_conditions_by_type() -> None:
    old = {"status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]}}
    new = strategic(old, {"status": {"conditions": [{"type": "Other", "status": "True"}, {"type": "New"}]}})
    assert new["status"]["conditions"] == [
        {"type": "Ready", "status": "True"},
        {"type": "Other", "status": "True"},
        {"type": "New"},
    ]
    gone = strategic(old, {"status": {"conditions": [{"type": "Ready", "$patch": "delete"}]}})
    assert gone["status"]["conditions"] == [{"type": "Other", "status": "False"}]


@pytest.mark.parametrize(
    ("target", "operations", "result"),
    [
        ({"a": 1}, [{"op": "add", "path": "/b", "value": 2}], {"a": 1, "b": 2}),
        ({"a": [1, 3]}, [{"op": "add", "path": "/a/1", "value": 2}], {"a": [1, 2, 3]}),
        ({"a": [1]}, [{"op": "add", "path": "/a/-", "value": 2}], {"a": [1, 2]}),
        ({"a": {"x/y": 1}}, [{"op": "replace", "path": "/a/x~1y", "value": 2}], {"a": {"x/y": 2}}),
        ({"a~b": 1}, [{"op": "remove", "path": "/a~0b"}], {}),
        ({"a": [1, 2]}, [{"op": "remove", "path": "/a/0"}], {"a": [2]}),
        ({"a": 1, "b": {}}, [{"op": "move", "from": "/a", "path": "/b/c"}], {"b": {"c": 1}}),
        ({"a": {"x": 1}}, [{"op": "copy", "from": "/a", "path": "/b"}], {"a": {"x": 1}, "b": {"x": 1}}),
        ({"a": 1}, [{"op": "test", "path": "/a", "value": 1}], {"a": 1}),
        ({"a": 1}, [{"op": "replace", "path": "", "value": {"b": 1}}], {"b": 1}),
    ],
)
def test_json_patch(target: Any, operations: Any, result: Any) -> None:
    assert json_patch(target, operations) == result


@pytest.mark.parametrize(
    ("operations", "said"),
    [
        ([{"op": "test", "path": "/a", "value": 2}], "operation 0: test failed at /a"),
        ([{"op": "add", "path": "/x/y", "value": 2}], 'there is no "x"'),
        ([{"op": "remove", "path": "/b"}], 'there is no "b"'),
        ([{"op": "add", "path": "/a", "value": 1}, {"op": "fly", "path": "/a"}], 'operation 1: op "fly"'),
        ([{"op": "add", "path": "/l/7", "value": 1}], '"7" is no index of a list of 2'),
        ([{"op": "add", "path": "/l/01", "value": 1}], '"01" is no index'),
        ([{"op": "add", "path": "a", "value": 1}], "does not start with /"),
        ([{"op": "add", "path": "/a"}], "malformed"),
        ({"op": "add"}, "list of operations"),
    ],
)
def test_json_patch_that_does_not_fit(operations: Any, said: str) -> None:
    with pytest.raises(PatchError, match=said):
        json_patch({"a": 1, "l": [1]}, operations)
