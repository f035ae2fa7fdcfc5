"""Builds a JSON Patch (RFC 6902) from an object and the wanted values; no difference gives no operation."""

from collections.abc import Callable, Mapping
from typing import Any


def pointer(*parts: str | int) -> str:
    """JSON pointer (RFC 6901): "~" and "/" within a part are escaped."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _same(left: Any, right: Any) -> bool:
    return bool(left == right)


class Patch:
    """Operations in the order in which they must be applied."""

    def __init__(self) -> None:
        self.operations: list[dict[str, Any]] = []

    def add(self, path: tuple[str | int, ...], value: Any) -> None:
        """Adds a value, or replaces the existing one; in a list it inserts ("-": at the end)."""
        self.operations.append({"op": "add", "path": pointer(*path), "value": value})

    def replace(self, path: tuple[str | int, ...], value: Any) -> None:
        self.operations.append({"op": "replace", "path": pointer(*path), "value": value})

    def remove(self, path: tuple[str | int, ...]) -> None:
        self.operations.append({"op": "remove", "path": pointer(*path)})

    def merge(
        self,
        path: tuple[str | int, ...],
        current: Mapping[str, Any] | None,
        wanted: Mapping[str, Any],
        same: Callable[[Any, Any], bool] = _same,
    ) -> None:
        """Gives a map the wanted values (None: no such key) and leaves its other keys unchanged."""
        if current is None:
            added = {key: value for key, value in wanted.items() if value is not None}
            if added:
                self.add(path, added)
            return
        for key, value in wanted.items():
            if value is None:
                if key in current:
                    self.remove((*path, key))
            elif key not in current or not same(current[key], value):
                self.add((*path, key), value)
