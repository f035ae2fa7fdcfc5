"""Objects in memory with one resourceVersion for all of them and a bounded history: the role of etcd for an API server.

A stored object never changes in place: a change stores a new dict. So callers may keep the objects that they get.
"""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

Object = dict[str, Any]
Key = tuple[str, str]  #: (namespace, name); the namespace is "" for an object without one


class Change(NamedTuple):
    version: int
    type: str  #: ADDED, MODIFIED or DELETED
    collection: str
    old: Object | None
    new: Object


class Expired(Exception):
    """The history no longer reaches back to the requested version."""


def key_of(item: Object) -> Key:
    meta = item["metadata"]
    return (meta.get("namespace", ""), meta["name"])


class Store:
    """Thread-safe. Hold `lock` (re-entrant) around a read and the write that depends on it."""

    def __init__(self, history: int = 8192) -> None:
        self.lock = threading.Condition(threading.RLock())
        self.version = 1
        self._oldest = 1  #: a watch may start after this version
        self._objects: dict[str, dict[Key, Object]] = {}
        self._reached: dict[str, int] = {}  # collection → version of its last change
        self._changes: deque[Change] = deque()
        self._history = history

    def get(self, collection: str, namespace: str, name: str) -> Object | None:
        with self.lock:
            return self._objects.get(collection, {}).get((namespace, name))

    def items(self, collection: str, namespace: str | None = None) -> tuple[list[Object], int]:
        """Objects in the order of their keys, and the version of this state; None: all namespaces."""
        with self.lock:
            found = self._objects.get(collection, {})
            keys = sorted(key for key in found if namespace is None or key[0] == namespace)
            return [found[key] for key in keys], self.version

    def reached(self, collection: str) -> int:
        """The version of a cache of this collection.

        This is the version of the collection's own last change, even when other objects changed later.
        """
        with self.lock:
            return self._reached.get(collection, 1)

    def put(self, collection: str, item: Object) -> Object:
        """Adds or replaces an object; the result has its new resourceVersion."""
        with self.lock:
            stored = self._objects.setdefault(collection, {})
            old = stored.get(key_of(item))
            new = self._record("ADDED" if old is None else "MODIFIED", collection, old, item)
            stored[key_of(item)] = new
            return new

    def remove(self, collection: str, item: Object) -> Object:
        """Removes the object; the result is its last state."""
        with self.lock:
            old = self._objects[collection].pop(key_of(item))
            return self._record("DELETED", collection, old, item)

    def _record(self, type_: str, collection: str, old: Object | None, item: Object) -> Object:
        self.version += 1
        new = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        self._reached[collection] = self.version
        self._changes.append(Change(self.version, type_, collection, old, new))
        while len(self._changes) > self._history:
            self._oldest = self._changes.popleft().version
        self.lock.notify_all()
        return new

    def compact(self) -> None:
        """Forgets the whole history: every watch from an older version gets 410 Gone."""
        with self.lock:
            self._changes.clear()
            self._oldest = self.version

    def changes(self, collection: str, since: int, wait: float) -> tuple[list[Change], int]:
        """Changes after `since` (waits up to `wait` seconds for the first) and the version that they reach.

        Raises Expired when some of them are forgotten, or when `since` is in the future of this store.
        """
        with self.lock:
            if since == self.version:
                self.lock.wait(wait)
            if since < min(self._oldest, self._reached.get(collection, 1)) or since > self.version:
                raise Expired
            return list(reversed(list(self._newer(collection, since)))), self.version

    def _newer(self, collection: str, since: int) -> Iterator[Change]:
        for change in reversed(self._changes):
            if change.version <= since:
                return
            if change.collection == collection:
                yield change
