"""The store behind the in-memory API server."""

import pytest

from vgpu.standin.apiserver.store import Expired, Object, Store


def item(name: str, namespace: str = "n", **more: object) -> Object:
    return {"metadata": {"name": name, "namespace": namespace}, **more}


def test_versions_grow_over_all_collections() -> None:
    store = Store()
    first = store.put("/pods", item("a"))
    second = store.put("/nodes", item("b", ""))
    assert int(second["metadata"]["resourceVersion"]) == int(first["metadata"]["resourceVersion"]) + 1
    assert store.items("/pods") == ([first], store.version)
    assert store.items("/pods", "other")[0] == []


def test_changes_since() -> None:
    store = Store()
    since = store.version
    store.put("/pods", item("a"))
    store.put("/nodes", item("x", ""))
    store.put("/pods", item("a", spec=1))
    store.remove("/pods", item("a", spec=1))
    changes, reached = store.changes("/pods", since, 0)
    assert [change.type for change in changes] == ["ADDED", "MODIFIED", "DELETED"]
    assert reached == store.version
    assert changes[2].new["metadata"]["resourceVersion"] == str(store.version)
    assert store.changes("/pods", reached, 0) == ([], reached)


def test_history_is_bounded() -> None:
    store = Store(history=3)
    versions = [store.put("/pods", item(str(number))) for number in range(5)]
    oldest = int(versions[1]["metadata"]["resourceVersion"])
    assert len(store.changes("/pods", oldest, 0)[0]) == 3
    with pytest.raises(Expired):
        store.changes("/pods", oldest - 1, 0)


def test_compaction_and_the_future() -> None:
    store = Store()
    since = store.version
    store.put("/pods", item("a"))
    store.compact()
    with pytest.raises(Expired):
        store.changes("/pods", since, 0)
    assert store.changes("/pods", store.version, 0) == ([], store.version)
    with pytest.raises(Expired):
        store.changes("/pods", store.version + 1, 0)
