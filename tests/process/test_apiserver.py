"""The in-memory API server over real sockets: verbs, conflicts, binding, deletion, selectors, watches."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kube_world import SECONDS, World, connect, pod

from vgpu.kube import writes
from vgpu.kube.client import JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, ApiError, KubeClient, Unreachable
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import wait_for

PODS = "/api/v1/namespaces/default/pods"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def refused(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str]:
    return error.value.status, error.value.reason


def test_create_fills_in_what_the_server_owns(world: World) -> None:
    made = world.create(pod("a", limits={"nvidia.com/gpumem": 60000}))
    assert made["metadata"]["uid"]
    assert made["metadata"]["resourceVersion"].isdecimal()
    assert made["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpumem": "60k"}
    assert made["status"]["phase"] == "Pending"
    assert world.pod("a") == made
    with pytest.raises(ApiError, match='pods "a" already exists') as error:
        world.create(pod("a"))
    assert refused(error) == (409, "AlreadyExists")


def test_generated_names_differ(world: World) -> None:
    manifest = pod("x")
    del manifest["metadata"]["name"]
    manifest["metadata"]["generateName"] = "job-"
    names = {world.create(manifest)["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("job-") for name in names)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "not a Kubernetes object"),
        (b"{}", 422, "metadata.name: Required"),
        (b'{"metadata":{"name":"a"}}', 422, "spec.containers: Required"),
        (b'{"metadata":{"name":"a","namespace":"other"},"spec":{"containers":[{"name":"m"}]}}', 400, "does not match"),
        (b'{"apiVersion":"v2","metadata":{"name":"a"}}', 400, r"API version in the data \(v2\)"),
    ],
)
def test_bad_bodies_get_a_status(world: World, body: bytes, status: int, said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        world.client.request("POST", PODS, body=body)
    assert error.value.status == status


def test_unknown_places(world: World) -> None:
    for path, said in (
        (f"{PODS}/none", 'pods "none" not found'),
        ("/apis/apps/v1/namespaces/default/daemonsets/x", r'daemonsets\.apps "x" not found'),
        ("/nonsense", "could not find the requested resource"),
        (f"{PODS}/a/exec", "pods/exec is not served"),
    ):
        with pytest.raises(ApiError, match=said) as error:
            world.client.get(path)
        assert refused(error) == (404, "NotFound")
    with pytest.raises(ApiError, match='namespaces "nowhere" not found'):
        world.create(pod("a", metadata={"namespace": "nowhere"}))


def test_update_conflicts_with_a_newer_version(world: World) -> None:
    old = world.create(pod("a"))
    new = world.send("PUT", f"{PODS}/a", {**old, "metadata": {**old["metadata"], "labels": {"x": "1"}}})
    assert new["metadata"]["labels"] == {"x": "1"}
    assert new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
    with pytest.raises(ApiError, match="the object has been modified") as error:
        world.send("PUT", f"{PODS}/a", old)
    assert refused(error) == (409, "Conflict")
    same = world.send("PUT", f"{PODS}/a", new)
    assert same["metadata"]["resourceVersion"] == new["metadata"]["resourceVersion"]


def test_patch_formats(world: World) -> None:
    made = world.create(pod("a", metadata={"annotations": {"keep": "1", "drop": "1"}}))
    path = f"{PODS}/a"
    world.send("PATCH", path, {"metadata": {"annotations": {"drop": None, "add": "1"}}}, content_type=MERGE_PATCH)
    operation = [{"op": "add", "path": "/metadata/annotations/x~1y", "value": "2"}]
    world.send("PATCH", path, operation, content_type=JSON_PATCH)
    assert world.pod("a")["metadata"]["annotations"] == {"keep": "1", "add": "1", "x/y": "2"}
    for number in ("1", "2"):
        condition = {"status": {"conditions": [{"type": number, "status": "True"}]}}
        world.send("PATCH", f"{path}/status", condition, content_type=STRATEGIC_PATCH)
    assert [one["type"] for one in world.pod("a")["status"]["conditions"]] == ["1", "2"]
    with pytest.raises(ApiError, match="UID in precondition") as error:
        writes.patch_pod(world.client, "default", "a", {"labels": {"x": "1"}}, uid="other")
    assert refused(error) == (409, "Conflict")
    writes.patch_pod(world.client, "default", "a", {"labels": {"x": "1"}}, uid=made["metadata"]["uid"])
    assert world.pod("a")["metadata"]["labels"] == {"x": "1"}
    with pytest.raises(ApiError, match="unknown format: text/plain") as error:
        world.send("PATCH", path, {}, content_type="text/plain")
    assert error.value.status == 415


def test_status_and_spec_are_written_apart(world: World) -> None:
    world.create(pod("a"))
    world.send("PATCH", f"{PODS}/a", {"status": {"phase": "Failed"}}, content_type=MERGE_PATCH)
    assert world.phase("a") == "Pending"
    change = {"status": {"phase": "Running"}, "spec": {"nodeName": "n"}}
    world.send("PATCH", f"{PODS}/a/status", change, content_type=MERGE_PATCH)
    assert world.phase("a") == "Running"
    assert "nodeName" not in world.pod("a")["spec"]
    with pytest.raises(ApiError, match="pod updates may not change fields other than"):
        world.send("PATCH", f"{PODS}/a", {"spec": {"nodeName": "n"}}, content_type=MERGE_PATCH)


def test_quantities_of_nodes_are_canonical(world: World) -> None:
    world.send("POST", "/api/v1/nodes", {"metadata": {"name": "n"}, "status": {"capacity": {"memory": "1024Ki"}}})
    writes.patch_node_capacity(world.client, "n", {"vgpu.io/memory": "60000"})
    assert world.node("n")["status"]["capacity"] == {"memory": "1Mi", "vgpu.io/memory": "60k"}
    with pytest.raises(ApiError, match=r"status\.capacity"):
        writes.patch_node_capacity(world.client, "n", {"vgpu.io/memory": "much"})
    writes.patch_node(world.client, "n", annotations={"a": "1"}, labels={"l": "1"})
    writes.patch_node(world.client, "n", annotations={"a": None})
    meta = world.node("n")["metadata"]
    assert (meta["annotations"], meta["labels"]) == ({}, {"l": "1"})


def test_concurrent_patches_all_arrive(world: World) -> None:
    world.create(pod("a"))
    failures = []

    def annotate(number: int) -> None:
        try:
            for step in range(5):
                writes.patch_pod(world.client, "default", "a", {"annotations": {f"{number}-{step}": "1"}})
        except ApiError as error:
            failures.append(error)

    threads = [threading.Thread(target=annotate, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(world.pod("a")["metadata"]["annotations"]) == 30


def test_binding_merges_its_annotations(world: World) -> None:
    made = world.create(pod("a", metadata={"annotations": {"mine": "1"}}))
    uid = made["metadata"]["uid"]
    with pytest.raises(ApiError, match="UID in precondition") as error:
        writes.bind(world.client, "default", "a", "other", "n1", {})
    assert refused(error) == (409, "Conflict")
    writes.bind(world.client, "default", "a", uid, "n1", {"vgpu.io/allocation": "{}"})
    bound = world.pod("a")
    assert bound["spec"]["nodeName"] == "n1"
    assert bound["metadata"]["annotations"] == {"mine": "1", "vgpu.io/allocation": "{}"}
    assert [(one["type"], one["status"]) for one in bound["status"]["conditions"]] == [("PodScheduled", "True")]
    with pytest.raises(ApiError, match='already assigned to node "n1"') as error:
        writes.bind(world.client, "default", "a", uid, "n2", {"vgpu.io/allocation": "other"})
    assert refused(error) == (409, "Conflict")
    assert world.pod("a") == bound


def test_only_one_of_many_binds_wins(world: World) -> None:
    uid = world.create(pod("a"))["metadata"]["uid"]
    won: list[str] = []
    lost: list[int] = []

    def bind(node: str) -> None:
        try:
            writes.bind(world.client, "default", "a", uid, node, {"node": node})
            won.append(node)
        except ApiError as error:
            lost.append(error.status)

    threads = [threading.Thread(target=bind, args=(f"n{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert lost == [409] * 7
    bound = world.pod("a")
    assert bound["spec"]["nodeName"] == bound["metadata"]["annotations"]["node"] == won[0]


def test_a_running_pod_is_deleted_in_two_steps(world: World) -> None:
    uid = world.create(pod("a", terminationGracePeriodSeconds=7))["metadata"]["uid"]
    writes.bind(world.client, "default", "a", uid, "n1")
    with pytest.raises(ApiError, match="UID in precondition"):
        writes.delete_pod(world.client, "default", "a", "other")
    writes.delete_pod(world.client, "default", "a", uid)
    marked = world.pod("a")["metadata"]
    assert marked["deletionTimestamp"]
    assert marked["deletionGracePeriodSeconds"] == 7
    with pytest.raises(ApiError, match="is being deleted, cannot be assigned"):
        writes.bind(world.client, "default", "a", uid, "n2")
    writes.delete_pod(world.client, "default", "a", uid, grace_seconds=0)
    assert world.pod("a") == {}


def test_a_pod_without_a_kubelet_goes_at_once(world: World) -> None:
    pending = world.create(pod("a"))["metadata"]["uid"]
    writes.delete_pod(world.client, "default", "a", pending)
    assert world.pod("a") == {}
    ended = world.create(pod("b"))["metadata"]["uid"]
    writes.bind(world.client, "default", "b", ended, "n1")
    world.send("PATCH", f"{PODS}/b/status", {"status": {"phase": "Succeeded"}}, content_type=MERGE_PATCH)
    writes.evict(world.client, "default", "b", ended)
    assert world.pod("b") == {}


def test_dry_run_changes_nothing(world: World) -> None:
    made = world.send("POST", PODS, pod("a"), params={"dryRun": "All"})
    assert made["metadata"]["uid"]
    assert world.pod("a") == {}


def test_selectors_and_pages(world: World) -> None:
    for number in range(7):
        made = world.create(pod(f"p{number}", metadata={"labels": {"odd": str(number % 2)}}))
        if number > 4:
            writes.bind(world.client, "default", made["metadata"]["name"], made["metadata"]["uid"], "n1")

    def named(**params: str) -> list[str]:
        return [item["metadata"]["name"] for item in world.get("/api/v1/pods", **params)["items"]]

    assert named(labelSelector="odd=1") == ["p1", "p3", "p5"]
    assert named(fieldSelector="spec.nodeName=n1") == ["p5", "p6"]
    assert named(fieldSelector="spec.nodeName=,metadata.name!=p0", labelSelector="odd in (0)") == ["p2", "p4"]
    with pytest.raises(ApiError, match="field label not supported"):
        named(fieldSelector="spec.hostname=x")
    seen: list[str] = []
    token: dict[str, str] = {}
    while True:
        page = world.get("/api/v1/pods", limit="3", **token)
        seen += [item["metadata"]["name"] for item in page["items"]]
        if "continue" not in page["metadata"]:
            break
        token = {"continue": page["metadata"]["continue"]}
    assert seen == [f"p{number}" for number in range(7)]
    assert page["kind"] == "PodList"


def watch(world: World, start: str, count: int, **params: str) -> list[tuple[str, str]]:
    """(type, name) of the first `count` events."""
    stream = world.client.stream("/api/v1/pods", {"watch": "true", "resourceVersion": start, **params})
    seen: list[tuple[str, str]] = []
    timer = threading.Timer(SECONDS, stream.close)
    timer.start()
    try:
        for line in stream:
            event = json.loads(line)
            seen.append((event["type"], event["object"].get("metadata", {}).get("name", "")))
            if len(seen) == count:
                break
    finally:
        timer.cancel()
        stream.close()
    return seen


def test_watch_tells_what_enters_and_leaves_a_selection(world: World) -> None:
    start = world.get("/api/v1/pods")["metadata"]["resourceVersion"]
    uid = world.create(pod("a"))["metadata"]["uid"]
    world.create(pod("b"))
    writes.bind(world.client, "default", "a", uid, "n1")
    writes.patch_pod(world.client, "default", "a", {"labels": {"x": "1"}})
    writes.delete_pod(world.client, "default", "a", uid, grace_seconds=0)
    assert watch(world, start, 3, fieldSelector="spec.nodeName=n1") == [
        ("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a"),
    ]  # fmt: skip
    assert watch(world, start, 3, fieldSelector="spec.nodeName=") == [
        ("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a"),
    ]  # fmt: skip


def test_watch_without_a_version_starts_with_what_is_there(world: World) -> None:
    world.create(pod("a"))
    world.create(pod("b"))
    assert watch(world, "", 2) == [("ADDED", "a"), ("ADDED", "b")]


def test_watch_from_forgotten_history_is_gone(world: World) -> None:
    start = world.get("/api/v1/pods")["metadata"]["resourceVersion"]
    world.create(pod("a"))
    world.server.store.compact()
    stream = world.client.stream("/api/v1/pods", {"watch": "true", "resourceVersion": start})
    event = json.loads(next(iter(stream)))
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


def test_watch_ends_in_time_and_sends_bookmarks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vgpu.standin.apiserver.server.BOOKMARK_SECONDS", 0.0)
    stream = world.client.stream(
        "/api/v1/pods",
        {"watch": "true", "resourceVersion": "1", "allowWatchBookmarks": "true", "timeoutSeconds": "1"},
    )
    events = [json.loads(line) for line in stream]
    assert {event["type"] for event in events} == {"BOOKMARK"}
    assert events[0]["object"]["metadata"]["resourceVersion"] == str(world.server.store.version)


def test_other_resources_need_no_table(world: World) -> None:
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"
    made = world.send("POST", leases, {"metadata": {"name": "l"}, "spec": {"holderIdentity": "me"}})
    assert (made["kind"], made["apiVersion"]) == ("Lease", "coordination.k8s.io/v1")
    made["spec"]["holderIdentity"] = "you"
    assert world.send("PUT", f"{leases}/l", made)["spec"] == {"holderIdentity": "you"}
    assert world.get(leases)["kind"] == "LeaseList"
    world.send("DELETE", f"{leases}/l")
    assert world.get(leases)["items"] == []


def test_priority_class_sets_the_priority(world: World) -> None:
    with pytest.raises(ApiError, match="no PriorityClass with name high") as error:
        world.create(pod("a", priorityClassName="high"))
    assert error.value.status == 403
    world.send("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": "high"}, "value": 1000})
    assert world.create(pod("a", priorityClassName="high"))["spec"]["priority"] == 1000


def test_finalizers_hold_an_object(world: World) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    world.send("POST", path, {"metadata": {"name": "c", "finalizers": ["x/y"]}})
    world.send("DELETE", f"{path}/c")
    assert world.get(f"{path}/c")["metadata"]["deletionTimestamp"]
    world.send("PATCH", f"{path}/c", {"metadata": {"finalizers": None}}, content_type=MERGE_PATCH)
    assert world.get(path)["items"] == []


def test_events_are_counted_and_never_fatal(world: World) -> None:
    about = writes.pod_reference("default", "a", "uid-a")
    for _ in range(3):
        writes.emit_event(world.client, about, "VgpuMismatch", "two cards, one asked")
    writes.emit_event(world.client, about, "VgpuMismatch", "another text")
    found = world.get("/api/v1/namespaces/default/events", fieldSelector="involvedObject.uid=uid-a")["items"]
    assert sorted((event["message"], event["count"]) for event in found) == [
        ("another text", 1), ("two cards, one asked", 3),
    ]  # fmt: skip
    writes.emit_event(world.client, writes.pod_reference("nowhere", "a", "u"), "X", "its namespace is gone")


def test_connection_trouble_is_unreachable(tmp_path: Path) -> None:
    server = ApiServer()
    server.start()
    client = connect(server, tmp_path)
    server.stop()
    with pytest.raises(Unreachable, match="GET /api/v1/pods"):
        client.get("/api/v1/pods")


@pytest.mark.parametrize("text", [None, "nonsense: [", "kind: Config"])
def test_a_bad_kubeconfig_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"cannot connect to a cluster: {path}"):
        KubeClient.connect(path)


def test_failure_policy_of_a_webhook_that_is_not_there(world: World) -> None:
    hook: dict[str, Any] = {
        "metadata": {"name": "h"},
        "webhooks": [
            {
                "name": "x.y.z",
                "rules": [{"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["pods"]}],
                "clientConfig": {"service": {"namespace": "default", "name": "absent"}},
            }
        ],
    }
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    world.send("POST", path, hook)
    with pytest.raises(ApiError, match=r'failed calling webhook "x\.y\.z": service "absent"') as error:
        world.create(pod("a"))
    assert refused(error) == (500, "InternalError")
    world.send("PATCH", f"{path}/h", {"webhooks": [{**hook["webhooks"][0], "failurePolicy": "Ignore"}]},
               content_type=MERGE_PATCH)  # fmt: skip
    world.create(pod("a"))


def test_stop_ends_open_watches(world: World) -> None:
    ended = threading.Event()

    def follow() -> None:
        try:
            for _ in world.client.stream("/api/v1/pods", {"watch": "true", "resourceVersion": "1"}):
                pass
        except Unreachable:
            pass
        ended.set()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    world.restart()
    wait_for("the watch to end", ended.is_set, SECONDS)
    assert msgspec.json.decode(world.client.get("/version"))["major"] == "1"
