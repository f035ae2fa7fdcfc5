"""Informers against a real socket: first list, changes, restarts of the API server, lost history, stop."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kube_world import SECONDS, World, connect, pod

from vgpu.kube import listing, writes
from vgpu.kube.client import Watch
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Pod, RawObject
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import wait_for


class Follower:
    """An informer and its reports."""

    def __init__(self, world: World, *, replace: bool = False, **params: str) -> None:
        self.told: list[tuple[str, str]] = []
        self.lists: list[list[str]] = []
        self.informer = Informer(
            world.client, "/api/v1/pods", Pod, params=params, on_change=self._changed,
            on_replace=self._replaced if replace else None,
        )  # fmt: skip

    def _changed(self, change: str, item: Pod) -> None:
        self.told.append((change, item.metadata.name))

    def _replaced(self, items: list[Pod]) -> None:
        self.lists.append([item.metadata.name for item in items])

    def start(self) -> "Follower":
        self.informer.start()
        assert self.informer.synced.wait(SECONDS)
        return self

    def wait(self, *told: tuple[str, str]) -> None:
        wait_for(f"{told}", lambda: self.told == list(told), SECONDS)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def follow(world: World) -> Iterator[Follower]:
    follower = Follower(world)
    yield follower
    follower.informer.stop()


def test_list_then_changes(world: World, follow: Follower) -> None:
    uid = world.create(pod("a"))["metadata"]["uid"]
    follow.start()
    assert follow.told == [("set", "a")]
    world.create(pod("b"))
    writes.bind(world.client, "default", "a", uid, "n1", {"note": "x"})
    writes.delete_pod(world.client, "default", "a", uid, grace_seconds=0)
    follow.wait(("set", "a"), ("set", "b"), ("set", "a"), ("gone", "a"))
    assert set(follow.informer.store) == {("default", "b")}
    assert follow.informer.version == str(world.server.store.version)


def test_selection(world: World) -> None:
    made = [world.create(pod(name, schedulerName=name))["metadata"] for name in ("s", "t")]
    follower = Follower(world, fieldSelector="spec.schedulerName=s").start()
    try:
        assert follower.told == [("set", "s")]
        writes.delete_pod(world.client, "default", "t", made[1]["uid"])
        writes.delete_pod(world.client, "default", "s", made[0]["uid"])
        follower.wait(("set", "s"), ("gone", "s"))
    finally:
        follower.informer.stop()


def test_resumes_after_a_restart_without_a_new_list(world: World) -> None:
    world.create(pod("a"))
    follower = Follower(world, replace=True).start()
    try:
        world.server.stop()
        server = ApiServer(world.server.port, store=world.server.store)
        world.server = server
        server.start()
        world.create(pod("b"))
        follower.wait(("set", "b"))
        assert follower.lists == [["a"]]
    finally:
        follower.informer.stop()


def test_what_happened_while_the_server_was_away_is_told(world: World, follow: Follower) -> None:
    world.create(pod("a"))
    follow.start()
    world.restart()
    world.create(pod("b"))
    world.restart()
    world.create(pod("c"))
    follow.wait(("set", "a"), ("set", "b"), ("set", "c"))


def lose_history(world: World) -> None:
    """A restart after which changes made in between are forgotten."""
    world.server.stop()
    store = world.server.store
    with store.lock:
        gone = store.get("/pods", "default", "a")
        assert gone is not None
        store.remove("/pods", gone)
        store.put("/pods", {**gone, "metadata": {**gone["metadata"], "name": "b"}})
        store.compact()
    world.server = ApiServer(world.server.port, store=store)
    world.server.start()


def test_lost_history_is_listed_again_and_told_as_differences(world: World, follow: Follower) -> None:
    world.create(pod("a"))
    world.create(pod("same"))
    follow.start()
    lose_history(world)
    follow.wait(("set", "a"), ("set", "same"), ("set", "b"), ("gone", "a"))
    assert set(follow.informer.store) == {("default", "b"), ("default", "same")}
    world.create(pod("c"))
    follow.wait(("set", "a"), ("set", "same"), ("set", "b"), ("gone", "a"), ("set", "c"))


def test_lost_history_is_told_as_a_whole_where_that_is_wanted(world: World) -> None:
    world.create(pod("a"))
    follower = Follower(world, replace=True).start()
    try:
        assert follower.lists == [["a"]]
        lose_history(world)
        wait_for("the second list", lambda: follower.lists == [["a"], ["b"]], SECONDS)
        world.create(pod("c"))
        follower.wait(("set", "c"))
    finally:
        follower.informer.stop()


def test_large_lists_are_decoded_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stateful set's templates look like the beginning of an object, and are none."""
    whole = Watch.chunks

    def crumbs(watch: Watch) -> Iterator[bytes]:
        text = b"".join(whole(watch))
        yield from (text[at : at + 90] for at in range(0, len(text), 90))

    monkeypatch.setattr(Watch, "chunks", crumbs)
    monkeypatch.setattr(listing, "BATCH", 300)
    inner = [{"metadata": {"name": "data"}}, {"metadata": {"name": 'x,{"metadata":{'}}]
    for number in range(8):
        more = {"volumeClaimTemplates": inner} if number % 3 == 0 else {}
        world.send("POST", "/apis/apps/v1/namespaces/default/statefulsets",
                   {"metadata": {"name": f"s{number}"}, "spec": more})  # fmt: skip
    path = "/apis/apps/v1/statefulsets"
    found: listing.Listing[RawObject] = listing.Listing(world.client, path, RawObject, {})
    parts = list(found)
    assert [item.metadata.name for part in parts for item in part] == [f"s{number}" for number in range(8)]
    assert len(parts) > 4
    assert found.version == str(world.server.store.version)
    assert listing.everything(listing.Listing(world.client, "/api/v1/nodes", RawObject, {})) == []


def test_a_list_that_breaks_off_is_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.create(pod("a"))
    world.create(pod("b"))
    whole = Watch.chunks

    def cut(watch: Watch) -> Iterator[bytes]:
        yield b"".join(whole(watch))[:-20]

    monkeypatch.setattr(Watch, "chunks", cut)
    with pytest.raises(msgspec.MsgspecError):
        listing.everything(listing.Listing(world.client, "/api/v1/pods", RawObject, {}))


class Half:
    """Passes bytes on until it is `shut`; then it swallows everything and keeps the connections open."""

    def __init__(self, port: int) -> None:
        self.shut = threading.Event()
        self._target = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                late = self.shut.is_set()  # connections after the break work
                for one, two in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(one, two, late), daemon=True).start()

    def _pass(self, one: socket.socket, two: socket.socket, late: bool) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if late or not self.shut.is_set():
                    two.sendall(data)
            if late or not self.shut.is_set():
                two.close()

    def close(self) -> None:
        self._socket.close()


def test_a_connection_that_is_open_on_this_side_only_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgpu.kube.informer.SILENCE_SECONDS", 0.5)
    half = Half(world.server.port)
    server = ApiServer(half.port, store=world.server.store)
    client = connect(server, tmp_path)
    told: list[str] = []
    informer = Informer(client, "/api/v1/pods", Pod, on_change=lambda _, item: told.append(item.metadata.name))
    try:
        world.create(pod("before"))
        informer.start()
        wait_for("the first", lambda: told == ["before"], SECONDS)
        half.shut.set()
        world.create(pod("after"))
        wait_for("what came after the break", lambda: told == ["before", "after"], SECONDS)
    finally:
        half.shut.set()
        informer.stop()
        half.close()


def test_no_list_and_no_watch_is_answered_by_etcd(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a `resourceVersion` and no `limit`, because a cache does not answer a `limit` without a version."""
    asked: list[dict[str, str]] = []
    stream = world.client.stream

    def noted(path: str, params: Mapping[str, str], **more: Any) -> Watch:
        asked.append(dict(params))
        return stream(path, params, **more)

    monkeypatch.setattr(world.client, "stream", noted)
    monkeypatch.setattr("vgpu.kube.informer.SPREAD_SECONDS", 0.01)
    world.create(pod("a"))
    follower = Follower(world).start()
    try:
        known = follower.informer.version
        lose_history(world)
        follower.wait(("set", "a"), ("set", "b"), ("gone", "a"))
    finally:
        follower.informer.stop()
    lists = [params for params in asked if "watch" not in params]
    assert [params["resourceVersion"] for params in lists] == ["0", known]
    assert all(params["resourceVersion"] and "limit" not in params for params in asked)


def test_a_server_that_has_gone_back_in_time_is_listed_as_it_is(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database restored from a copy: versions that the informer knows do not exist yet."""
    monkeypatch.setattr("vgpu.kube.informer.SPREAD_SECONDS", 0.01)
    world.create(pod("a"))
    world.create(pod("b"))
    follower = Follower(world, replace=True).start()
    try:
        world.server.stop()
        world.server = ApiServer(world.server.port)
        world.server.start()
        world.create(pod("c"))
        wait_for("the list of now", lambda: follower.lists[1:] == [["c"]], SECONDS)
    finally:
        follower.informer.stop()


def test_waits_for_a_server_that_is_not_there_yet(world: World, follow: Follower) -> None:
    world.server.stop()
    follow.informer.start()
    world.restart()
    assert follow.informer.synced.wait(SECONDS)


@pytest.mark.parametrize("replace", [True, False])
def test_a_version_is_reached_once_its_objects_were_told(world: World, replace: bool) -> None:
    """A caller that waits for a version relies on what its listener then knows."""
    early: list[tuple[str, str]] = []

    def told(_change: str, item: Pod) -> None:
        if int(informer.version or 0) >= int(item.metadata.resourceVersion):
            early.append((item.metadata.name, informer.version))

    def listed(items: list[Pod]) -> None:
        for item in items:
            told("set", item)

    world.create(pod("a"))
    informer = Informer(world.client, "/api/v1/pods", Pod, on_change=told, on_replace=listed if replace else None)
    informer.start()
    try:
        assert informer.synced.wait(SECONDS)
        version = int(world.create(pod("b"))["metadata"]["resourceVersion"])
        wait_for("b", lambda: int(informer.version) >= version, SECONDS)
    finally:
        informer.stop()
    assert early == []


def test_an_exception_of_the_listener_does_not_end_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def fail(_: str, item: Pod) -> None:
        told.append(item.metadata.name)
        raise RuntimeError("a bug")

    informer = Informer(world.client, "/api/v1/pods", Pod, on_change=fail)
    informer.start()
    try:
        world.create(pod("a"))
        world.create(pod("b"))
        wait_for("both", lambda: told == ["a", "b"], SECONDS)
    finally:
        informer.stop()
    assert "cannot handle the change of default/a" in caplog.text


def test_stop_ends_a_silent_watch_at_once(world: World, follow: Follower) -> None:
    follow.start()
    stopper = threading.Thread(target=follow.informer.stop)
    stopper.start()
    stopper.join(SECONDS)
    assert not stopper.is_alive()
    world.create(pod("a"))
    assert follow.told == []


def test_stop_while_the_server_is_away(world: World, follow: Follower) -> None:
    follow.start()
    world.server.stop()
    follow.informer.stop()
    world.restart()
