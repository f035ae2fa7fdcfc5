"""What the scheduler watches: pods of earlier names, agents that leave or die; and how it queries the API server."""

import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kube_world import World
from scheduler_world import SECONDS, Scheduler, add_node, gpu_pod, record

from scheduler.agents import ABSENT, DELETED, ENDED, STARTING
from vgpu import names
from vgpu.kube import agentmark, writes
from vgpu.kube.client import MERGE_PATCH, KubeClient, Unreachable, Watch
from vgpu.standin.services import wait_for

AGENTS = ("kube-system", "app=agent")
BORN = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def start(world: World, tmp_path: Path) -> Iterator[Any]:
    """Starts schedulers that end with the test."""
    started: list[Scheduler] = []

    def begin(**more: Any) -> Scheduler:
        started.append(Scheduler(world, tmp_path, **more))
        started[-1].start()
        return started[-1]

    yield begin
    for one in started:
        one.close()


# Former names of the scheduler


@pytest.fixture
def renamed(world: World, start: Any) -> Scheduler:
    """A scheduler that had another name when it filled the only card."""
    add_node(world, "node-a", cards=1)
    before = start(name="vgpu-old")
    item = world.create(gpu_pod("old", 6000, scheduler="vgpu-old"))
    assert before.bind(item, "node-a") == ""
    before.close()
    found: Scheduler = start(name="vgpu-new")
    return found


def refused(world: World, scheduler: Scheduler, name: str) -> bool:
    item = world.create(gpu_pod(name, 6000, scheduler="vgpu-new"))
    return scheduler.filter(item, "node-a")["NodeNames"] == [] and "no room" in scheduler.bind(item, "node-a")


def test_what_was_placed_under_another_name_is_counted(world: World, renamed: Scheduler) -> None:
    assert refused(world, renamed, "new")
    assert renamed.state.slices() == 1
    writes.delete_pod(world.client, "default", "old", world.pod("old")["metadata"]["uid"], grace_seconds=0)
    wait_for("the old pod is gone", lambda: renamed.state.slices() == 0, SECONDS)
    assert renamed.bind(world.pod("new"), "node-a") == ""


def test_what_is_placed_under_another_name_meanwhile_is_counted(world: World, start: Any) -> None:
    """A replica from before the upgrade still binds."""
    add_node(world, "node-a", cards=1)
    old, new = start(name="vgpu-old"), start(name="vgpu-new")
    item = world.create(gpu_pod("old", 6000, scheduler="vgpu-old"))
    assert old.bind(item, "node-a") == ""
    wait_for("the other one knows", lambda: new.state.slices() == 1, SECONDS)
    assert refused(world, new, "new")
    assert new.feed.reconcile() == 0


@pytest.mark.parametrize("reads", [True, False])
def test_a_pod_that_only_loses_its_label_stays_counted(
    world: World, renamed: Scheduler, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr("scheduler.feed.SECOND_LOOK", 0.01)
    asked = threading.Event()
    get = renamed.client.get

    def noted(path: str, **params: str) -> bytes:
        asked.set()
        if not reads:
            raise Unreachable("no answer")
        return get(path, **params)

    monkeypatch.setattr(renamed.client, "get", noted)
    gone = {"metadata": {"labels": {names.LABEL_MANAGED: None}}}
    world.send("PATCH", "/api/v1/namespaces/default/pods/old", gone, content_type=MERGE_PATCH)
    assert asked.wait(SECONDS), "it has left the selection"
    assert refused(world, renamed, "new")
    assert renamed.feed.reconcile() == 0
    assert renamed.state.slices() == 1
    monkeypatch.setattr(renamed.client, "get", get)
    writes.delete_pod(world.client, "default", "old", world.pod("old")["metadata"]["uid"], grace_seconds=0)
    renamed.feed.reconcile()
    assert renamed.state.slices() == 0


# Agents


def agent_pod(world: World, node: str = "node-a", *, name: str = "agent") -> str:
    """Path of a new agent's pod, about which the kubelet has reported nothing yet."""
    manifest = {
        "metadata": {"name": name, "namespace": AGENTS[0], "labels": {"app": "agent"}},
        "spec": {"nodeName": node, "containers": [{"name": "device-plugin", "image": "none"}]},
    }
    world.create(manifest)
    return f"/api/v1/namespaces/{AGENTS[0]}/pods/{name}"


def report(world: World, path: str, *, started: datetime | None, ready: bool = False) -> None:
    """Writes what the kubelet writes; `started` None: the container has ended."""
    state = {"running": {"startedAt": started.strftime("%Y-%m-%dT%H:%M:%SZ")}} if started else {"terminated": {}}
    status = {"containerStatuses": [{"name": "device-plugin", "ready": ready, "state": state}]}
    world.send("PATCH", f"{path}/status", {"status": status}, content_type=MERGE_PATCH)


def say(world: World, mark: str | None) -> None:
    writes.patch_node(world.client, "node-a", annotations={names.AGENT: mark})


def told(scheduler: Scheduler, item: Any) -> str:
    """Why the node accepts no pods; "" when it accepts them."""
    why: str = scheduler.filter(item, "node-a")["FailedAndUnresolvableNodes"].get("node-a", "")
    return why


def wait_told(scheduler: Scheduler, item: Any, why: str) -> None:
    wait_for(f"told {why!r}", lambda: told(scheduler, item) == why, SECONDS)


@pytest.mark.parametrize(
    ("mark", "why"),
    [
        (agentmark.leaving("it is being replaced"), "the node's agent is leaving (it is being replaced)"),
        ("leaving", "the node's agent is leaving"),
        ("on holiday", 'the node\'s agent reports "on holiday", a state that this scheduler does not support'),
    ],
)
def test_nothing_is_bound_where_the_agent_says_that_it_leaves(world: World, start: Any, mark: str, why: str) -> None:
    add_node(world, "node-a")
    scheduler = start()
    item = world.create(gpu_pod("p"))
    say(world, mark)
    wait_told(scheduler, item, why)
    assert scheduler.bind(item, "node-a") == f"node node-a takes no pods now: {why}"
    assert record(world, "p") is None
    assert scheduler.state.slices() == 0
    say(world, agentmark.serving(datetime.now(UTC)))
    wait_told(scheduler, item, "")
    assert scheduler.bind(item, "node-a") == ""


def test_other_nodes_go_on_while_an_agent_leaves(world: World, start: Any) -> None:
    for name in ("node-a", "node-b", "node-c"):
        add_node(world, name)
    scheduler = start()
    item = world.create(gpu_pod("p"))
    say(world, agentmark.leaving("upgrade"))
    wait_for("it is left out", lambda: told(scheduler, item) != "", SECONDS)
    answer = scheduler.filter(item, "node-c", "node-a", "node-x", "node-b")
    assert answer["NodeNames"] == ["node-c", "node-b"]
    assert answer["FailedAndUnresolvableNodes"]["node-x"] == "the node has no cards"
    containers = [{"name": n, "resources": {"limits": {"nvidia.com/gpumem": "5000"}}} for n in "abc"]
    several = {**item, "spec": {**item["spec"], "containers": containers}}
    answer = scheduler.filter(several, "node-a", "node-b")
    assert "leaving" in answer["FailedAndUnresolvableNodes"]["node-a"]
    assert "container c: 0 of 2 cards" in answer["FailedAndUnresolvableNodes"]["node-b"]


def test_an_agent_that_was_killed_is_missed_until_the_next_one_serves(world: World, start: Any) -> None:
    add_node(world, "node-a")
    scheduler = start(agents=AGENTS)
    item = world.create(gpu_pod("p"))
    assert told(scheduler, item) == ABSENT
    path = agent_pod(world)
    wait_told(scheduler, item, ENDED)
    report(world, path, started=BORN)
    wait_told(scheduler, item, STARTING)
    say(world, agentmark.serving(BORN))
    wait_told(scheduler, item, "")
    report(world, path, started=None)
    wait_told(scheduler, item, ENDED)
    assert scheduler.bind(item, "node-a") == f"node node-a takes no pods now: {ENDED}"
    report(world, path, started=BORN + timedelta(seconds=9))
    wait_told(scheduler, item, STARTING)
    say(world, agentmark.serving(BORN + timedelta(seconds=10)))
    wait_told(scheduler, item, "")
    writes.delete_pod(world.client, AGENTS[0], "agent", world.get(path)["metadata"]["uid"], grace_seconds=30)
    wait_told(scheduler, item, DELETED)
    report(world, agent_pod(world, name="next"), started=BORN + timedelta(seconds=20), ready=True)
    wait_told(scheduler, item, "")
    world.client.request("DELETE", path, body={"gracePeriodSeconds": 0})
    world.client.request("DELETE", path.replace("agent", "next"), body={"gracePeriodSeconds": 0})
    wait_told(scheduler, item, ABSENT)


@pytest.mark.parametrize("mark", [None, agentmark.serving(BORN - timedelta(days=1)), "serving since yesterday"])
def test_where_its_times_say_nothing_the_kubelet_says_whether_it_serves(
    world: World, start: Any, mark: str | None
) -> None:
    """An agent from before the annotation; a clock that was set back; an annotation written by hand."""
    add_node(world, "node-a")
    scheduler = start(agents=AGENTS)
    item = world.create(gpu_pod("p"))
    say(world, mark)
    path = agent_pod(world)
    report(world, path, started=BORN)
    wait_told(scheduler, item, STARTING)
    report(world, path, started=BORN, ready=True)
    wait_told(scheduler, item, "")


# What is asked of the API server


def watched(client: KubeClient, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, str]]]:
    """(path, parameters) of every list and watch from now on."""
    asked: list[tuple[str, dict[str, str]]] = []
    stream = client.stream

    def noted(path: str, params: Mapping[str, str], **more: Any) -> Watch:
        asked.append((path, dict(params)))
        return stream(path, params, **more)

    monkeypatch.setattr(client, "stream", noted)
    return asked


def test_lists_are_answered_from_the_cache_of_the_api_server(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except when the leader changes: a list of one object of each kind gives the newest version, and late informers
    list all.
    """
    monkeypatch.setattr("scheduler.feed.CATCH_UP_SECONDS", 0.05)
    monkeypatch.setattr("scheduler.feed.SECOND_LOOK", 0.01)
    add_node(world, "node-a")
    world.create(gpu_pod("p"))
    scheduler = Scheduler(world, tmp_path, agents=AGENTS)
    asked = watched(scheduler.client, monkeypatch)
    try:
        scheduler.start()
        scheduler.feed.catch_up()
        scheduler.feed.reconcile()
    finally:
        scheduler.close()
    lists = [(path, params) for path, params in asked if "watch" not in params]
    etcd = [(path, params) for path, params in lists if "resourceVersion" not in params]
    assert etcd[:2] == [("/api/v1/nodes", {"limit": "1"}), ("/api/v1/pods", {"limit": "1"})]
    assert all("limit" not in params for _, params in etcd[2:])
    assert len(etcd) <= 5
    assert len(lists) > len(etcd) + 6
    assert not [params for _, params in lists if "limit" in params and "resourceVersion" in params]
    for path, params in asked:
        if path == "/api/v1/pods" and params != {"limit": "1"}:
            assert "spec.schedulerName" in params["fieldSelector"], "never the pods of a whole cluster"


def test_only_the_leader_compares(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_node(world, "node-a")
    scheduler = Scheduler(world, tmp_path, reconcile_seconds=0.02)
    turns: list[bool] = []
    compared: list[bool] = []
    leads = threading.Event()

    def noted() -> bool:
        turns.append(leads.is_set())
        return leads.is_set()

    monkeypatch.setattr(scheduler.feed, "reconcile", lambda: compared.append(leads.is_set()))
    scheduler.feed.start(noted)
    try:
        wait_for("turns of one that does not lead", lambda: len(turns) > 5, SECONDS)
        assert compared == []
        leads.set()
        wait_for("it leads", lambda: len(compared) > 1, SECONDS)
        assert all(compared)
    finally:
        scheduler.close()


def test_a_comparison_reads_only_what_differs(world: World, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.feed.SECOND_LOOK", 0.01)
    add_node(world, "node-a", cards=4)
    scheduler = start()
    items = [world.create(gpu_pod(f"p{n}")) for n in range(4)]
    for item in items[:3]:
        assert scheduler.bind(item, "node-a") == ""
    wait_for("confirmed", lambda: len(scheduler.state.pod_versions()) == 3, SECONDS)
    read: list[str] = []
    get = scheduler.client.get

    def noted(path: str, **params: str) -> bytes:
        read.append(path)
        return get(path, **params)

    monkeypatch.setattr(scheduler.client, "get", noted)
    assert scheduler.feed.reconcile() == 0
    assert read == []
    scheduler.state.release(items[1]["metadata"]["uid"])
    assert scheduler.feed.reconcile() == 1
    assert read == ["/api/v1/namespaces/default/pods/p1"]
    assert scheduler.state.slices() == 3


def test_more_that_differs_than_is_worth_reading_singly_is_listed(
    world: World, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.feed.SECOND_LOOK", 0.01)
    monkeypatch.setattr("scheduler.feed.SINGLE_READS", 1)
    add_node(world, "node-a", cards=4)
    add_node(world, "node-b")
    scheduler = start()
    uids = []
    for n in range(3):
        item = world.create(gpu_pod(f"p{n}"))
        uids.append(item["metadata"]["uid"])
        assert scheduler.bind(item, "node-a") == ""
    wait_for("confirmed", lambda: len(scheduler.state.pod_versions()) == 3, SECONDS)
    for uid in uids:
        scheduler.state.release(uid)
    for name in ("node-a", "node-b"):
        scheduler.state.remove_node(name)
    assert scheduler.feed.reconcile() == 3
    assert scheduler.state.slices() == 3
    assert scheduler.state.node_names() == {"node-a", "node-b"}
