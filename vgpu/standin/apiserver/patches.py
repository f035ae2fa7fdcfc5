"""The three patch formats of the Kubernetes API, as pure functions from an object to a new one."""

import copy
from collections.abc import Sequence
from typing import Any

Json = Any

#: Lists that a strategic merge patch merges by a key; it replaces other lists. Source: patchMergeKey in
#: k8s.io/api/core.
_MERGE_KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "ownerReferences": "uid",
    "addresses": "type",
}


class PatchError(ValueError):
    """The patch does not fit the object; the text says where."""


def merge(target: Json, patch: Json) -> Json:
    """JSON merge patch, RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def strategic(target: Json, patch: Json) -> Json:
    """Strategic merge patch: a merge patch that merges well-known lists by key, with `$patch: delete` for an item."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            result[key] = _merge_list(result.get(key) or [], value, _MERGE_KEYS[key])
        else:
            result[key] = strategic(result.get(key), value)
    return result


def _merge_list(target: list[Json], patch: list[Json], key: str) -> list[Json]:
    result = list(target)
    for item in patch:
        if not isinstance(item, dict) or key not in item:
            raise PatchError(f"an item of the list lacks its merge key {key}")
        at = next((index for index, old in enumerate(result) if old.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategic({}, item))
        else:
            result[at] = strategic(result[at], item)
    return result


def _tokens(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise PatchError(f'path "{pointer}" does not start with /')
    return [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]


def _index(token: str, length: int) -> int:
    if not token.isdecimal() or (len(token) > 1 and token[0] == "0") or int(token) >= length:
        raise PatchError(f'"{token}" is no index of a list of {length}')
    return int(token)


def _resolve(document: Json, tokens: Sequence[str]) -> Json:
    for token in tokens:
        if isinstance(document, list):
            document = document[_index(token, len(document))]
        elif isinstance(document, dict) and token in document:
            document = document[token]
        else:
            raise PatchError(f'there is no "{token}" in the path /{"/".join(tokens)}')
    return document


def _add(document: Json, pointer: str, value: Json) -> Json:
    tokens = _tokens(pointer)
    if not tokens:
        return value
    parent = _resolve(document, tokens[:-1])
    last = tokens[-1]
    if isinstance(parent, list):
        parent.insert(len(parent) if last == "-" else _index(last, len(parent) + 1), value)
    elif isinstance(parent, dict):
        parent[last] = value
    else:
        raise PatchError(f"the parent of {pointer} is neither an object nor a list")
    return document


def _remove(document: Json, pointer: str) -> Json:
    tokens = _tokens(pointer)
    if not tokens:
        return None
    value = _resolve(document, tokens)
    parent = _resolve(document, tokens[:-1])
    del parent[_index(tokens[-1], len(parent)) if isinstance(parent, list) else tokens[-1]]
    return value


def json_patch(target: Json, operations: Json) -> Json:
    """JSON patch, RFC 6902. Raises PatchError naming the operation that fails."""
    if not isinstance(operations, list):
        raise PatchError("a JSON patch is a list of operations")
    document = copy.deepcopy(target)
    for number, operation in enumerate(operations):
        try:
            document = _apply(document, operation)
        except PatchError as error:
            raise PatchError(f"operation {number}: {error}") from None
        except (KeyError, TypeError) as error:
            raise PatchError(f"operation {number}: malformed: {error!r}") from None
    return document


def _apply(document: Json, operation: Json) -> Json:
    verb, path = operation["op"], operation["path"]
    if verb == "add":
        return _add(document, path, copy.deepcopy(operation["value"]))
    if verb == "test":
        if _resolve(document, _tokens(path)) != operation["value"]:
            raise PatchError(f"test failed at {path}")
        return document
    if verb == "remove":
        _remove(document, path)
        return document
    if verb == "replace":
        if not _tokens(path):
            return copy.deepcopy(operation["value"])
        _remove(document, path)
        return _add(document, path, copy.deepcopy(operation["value"]))
    if verb == "move":
        return _add(document, path, _remove(document, operation["from"]))
    if verb == "copy":
        return _add(document, path, copy.deepcopy(_resolve(document, _tokens(operation["from"]))))
    raise PatchError(f'op "{verb}" is not one of add, remove, replace, move, copy, test')
