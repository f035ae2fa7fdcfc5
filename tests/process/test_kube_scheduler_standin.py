"""The kube-scheduler stand-in with an extender of the test: wire shapes, sums, reasons, a dead extender."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cheroot import wsgi
from flask import Flask, Response, request
from kube_world import SECONDS, World, pod

from vgpu.kube import writes
from vgpu.kube.client import MERGE_PATCH, ApiError
from vgpu.standin.kubescheduler import KubeScheduler
from vgpu.standin.services import free_port, wait_for

SCHEDULER = "vgpu-scheduler"
CARD = "nvidia.com/gpu"


class Extender:
    """Accepts all nodes, prefers the last, binds by itself; a test may replace each verb."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[tuple[str, Any]] = []
        self.port = free_port()
        self.replies: dict[str, Any] = {}
        self.scheduler = KubeScheduler(world.client, f"http://127.0.0.1:{self.port}", SCHEDULER)
        self._server: wsgi.Server | None = None

    def start(self) -> None:
        app = Flask("extender")
        app.add_url_rule("/<verb>", "verb", self._serve, methods=["POST"])
        self._server = wsgi.Server(("127.0.0.1", self.port), app, numthreads=8)
        self._server.expiration_interval = 0.1
        self._server.prepare()
        threading.Thread(target=self._server.serve, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _serve(self, verb: str) -> Response:
        body = msgspec.json.decode(request.get_data())
        self.calls.append((verb, body))
        reply = self.replies.get(verb)
        answer = reply(body) if reply else getattr(self, verb)(body)
        return Response(msgspec.json.encode(answer), mimetype="application/json")

    def filter(self, body: Any) -> Any:
        return {"NodeNames": body["NodeNames"], "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""}

    def prioritize(self, body: Any) -> Any:
        return [{"Host": name, "Score": index} for index, name in enumerate(body["NodeNames"])]

    def bind(self, body: Any) -> Any:
        try:
            writes.bind(
                self.world.client, body["PodNamespace"], body["PodName"], body["PodUID"], body["Node"],
                {"vgpu.io/allocation": "{}"},
            )  # fmt: skip
        except ApiError as error:
            return {"Error": str(error)}
        return {}

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def extender(world: World) -> Iterator[Extender]:
    extender = Extender(world)
    extender.start()
    extender.scheduler.start()
    yield extender
    extender.scheduler.stop()
    extender.stop()


def add_node(world: World, name: str, *, memory: int = 100_000) -> None:
    offered = {CARD: "10", "vgpu.io/memory": str(memory), "vgpu.io/cores": "200"}
    ready = [{"type": "Ready", "status": "True"}]
    body = {"metadata": {"name": name}, "status": {"capacity": offered, "allocatable": offered, "conditions": ready}}
    world.send("POST", "/api/v1/nodes", body)


def wait_seen(world: World, extender: Extender) -> None:
    """Waits until the stand-in knows all nodes: otherwise it would judge a pod by the first node alone."""
    newest = max(int(one["metadata"]["resourceVersion"]) for one in world.get("/api/v1/nodes")["items"])
    wait_for("the nodes", lambda: int(extender.scheduler.nodes_version or 0) >= newest, SECONDS)


def card_pod(name: str, memory: int = 3000, **more: Any) -> dict[str, Any]:
    limits = {CARD: 1, "nvidia.com/gpumem": memory, "vgpu.io/memory": memory}
    return pod(name, limits=limits, schedulerName=SCHEDULER, **more)


def wait_node(world: World, name: str) -> str:
    wait_for(f"pod {name} bound", lambda: world.pod(name)["spec"].get("nodeName"), SECONDS)
    node: str = world.pod(name)["spec"]["nodeName"]
    return node


def reason(world: World, name: str) -> tuple[str, str]:
    """(reason, message) of PodScheduled=False."""
    for one in world.pod(name).get("status", {}).get("conditions", ()):
        if (one["type"], one["status"]) == ("PodScheduled", "False"):
            return one["reason"], one["message"]
    return "", ""


def test_verbs_have_the_shape_of_the_stock_scheduler(world: World, extender: Extender) -> None:
    add_node(world, "node-a")
    add_node(world, "node-b")
    wait_seen(world, extender)
    made = world.create(card_pod("a"))
    assert wait_node(world, "a") == "node-b"
    assert world.pod("a")["metadata"]["annotations"] == {"vgpu.io/allocation": "{}"}
    assert extender.verbs() == ["filter", "prioritize", "bind"]
    for _, body in extender.calls[:2]:
        assert set(body) == {"Pod", "Nodes", "NodeNames"}
        assert (body["Nodes"], body["NodeNames"]) == (None, ["node-a", "node-b"])
        assert body["Pod"]["metadata"]["uid"] == made["metadata"]["uid"]
        assert body["Pod"]["spec"] == made["spec"]
    assert extender.calls[2][1] == {
        "PodName": "a", "PodNamespace": "default", "PodUID": made["metadata"]["uid"], "Node": "node-b",
    }  # fmt: skip
    wait_for("the event", lambda: [one for one, _ in world.events("a")] == ["Scheduled"], SECONDS)


def test_sums_are_checked_before_the_extender_is_asked(world: World, extender: Extender) -> None:
    add_node(world, "node-a", memory=5000)
    world.create(card_pod("a", 3000))
    wait_node(world, "a")
    world.create(card_pod("b", 3000))
    wait_for("the reason", lambda: reason(world, "b")[0], SECONDS)
    assert reason(world, "b") == ("Unschedulable", "0/1 nodes are available: 1 Insufficient vgpu.io/memory.")
    assert extender.verbs() == ["filter", "bind"]
    change = {"status": {"phase": "Succeeded"}}
    world.send("PATCH", "/api/v1/namespaces/default/pods/a/status", change, content_type=MERGE_PATCH)
    assert wait_node(world, "b") == "node-a"


def test_reasons_of_the_extender_are_told(world: World, extender: Extender) -> None:
    add_node(world, "node-a")
    add_node(world, "node-b")
    wait_seen(world, extender)
    extender.replies["filter"] = lambda _: {
        "nodenames": [],
        "failedNodes": {"node-a": "2 of 8 cards have 3000 MiB free, 4 needed"},
        "failedAndUnresolvableNodes": {"node-b": "no card of model A100"},
    }
    world.create(card_pod("a"))
    wait_for("the reason", lambda: reason(world, "a")[0], SECONDS)
    sentence = "0/2 nodes are available: 1 2 of 8 cards have 3000 MiB free, 4 needed, 1 no card of model A100."
    assert reason(world, "a") == ("Unschedulable", sentence)
    wait_for("the event", lambda: world.events("a") == [("FailedScheduling", sentence)], SECONDS)
    extender.replies.clear()
    wait_node(world, "a")


def test_refused_bind_is_tried_again(world: World, extender: Extender) -> None:
    add_node(world, "node-a")
    answers = iter([{"Error": "card GPU-0 was taken meanwhile"}])
    extender.replies["bind"] = lambda body: next(answers, None) or extender.bind(body)
    world.create(card_pod("a"))
    assert wait_node(world, "a") == "node-a"
    assert extender.verbs() == ["filter", "bind", "filter", "bind"]


def test_a_dead_extender_is_waited_for(world: World, extender: Extender) -> None:
    add_node(world, "node-a")
    extender.stop()
    world.create(card_pod("a"))
    wait_for("the reason", lambda: reason(world, "a")[0] == "SchedulerError", SECONDS)
    extender.start()
    wait_node(world, "a")


def test_pods_without_cards_do_not_need_the_extender(world: World, extender: Extender) -> None:
    add_node(world, "node-a")
    world.create(pod("a", schedulerName=SCHEDULER))
    wait_node(world, "a")
    world.create(pod("b"))  # a pod of another scheduler
    world.create(card_pod("c"))
    wait_node(world, "c")
    assert world.pod("b")["spec"].get("nodeName") is None
    assert [body["Pod"]["metadata"]["name"] for verb, body in extender.calls if verb == "filter"] == ["c"]


@pytest.mark.usefixtures("extender")
def test_higher_priority_goes_first(world: World) -> None:
    world.create(card_pod("low", priority=1))
    world.create(card_pod("high", priority=9))
    wait_for("both to wait", lambda: all(reason(world, name)[0] for name in ("low", "high")), SECONDS)
    add_node(world, "node-a", memory=4000)
    assert wait_node(world, "high") == "node-a"
    wait_for("the reason", lambda: "Insufficient vgpu.io/memory" in reason(world, "low")[1], SECONDS)


def test_unready_and_cordoned_nodes_are_left_out(world: World, extender: Extender) -> None:
    add_node(world, "node-a")
    add_node(world, "node-b")
    world.send("PATCH", "/api/v1/nodes/node-a", {"spec": {"unschedulable": True}}, content_type=MERGE_PATCH)
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    world.send("PATCH", "/api/v1/nodes/node-b/status", unready, content_type=MERGE_PATCH)
    wait_seen(world, extender)
    world.create(card_pod("a"))
    wait_for("the reason", lambda: reason(world, "a")[0], SECONDS)
    assert reason(world, "a")[1] == ("0/2 nodes are available: 1 node(s) were not ready, 1 node(s) were unschedulable.")
    assert not extender.calls


def test_many_pods_bind_beside_each_other(world: World, extender: Extender) -> None:
    """A bind that waits, such as that of a group, does not delay other binds."""
    add_node(world, "node-a")
    together = threading.Barrier(4)

    def bind(body: Any) -> Any:
        together.wait(SECONDS)
        return extender.bind(body)

    extender.replies["bind"] = bind
    for number in range(4):
        world.create(card_pod(f"p{number}"))
    for number in range(4):
        wait_node(world, f"p{number}")
