"""Requests that a real kube-scheduler sent, answered in the form that it reads."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.cluster import ClusterState, Holding
from scheduler.metrics import UNSCHEDULABLE
from scheduler.verbs import Recent, Verbs
from scheduler.wire import BadBody, ExtenderArgs, ExtenderBindingArgs, parse
from vgpu import names
from vgpu.allocation import Held
from vgpu.devices import Gpu, Inventory
from vgpu.resources import Rules

WIRE = Path(__file__).parents[1] / "data" / "wire"
BODIES = {path.stem: path.read_bytes() for path in WIRE.glob("*.json")}
MANAGED = {names.LABEL_MANAGED: "true"}
MODES = ("nodecache", "fullnodes")

# The captured pod asks for one card with 60,000 MiB ("60k" on the wire) and 50 % of its cores.


def cluster(**nodes: list[Gpu]) -> ClusterState:
    state = ClusterState()
    for name, cards in nodes.items():
        state.set_node(name.replace("_", "-"), Inventory(tuple(cards)))
    return state


def gpu(uuid: str, memory: int = 81920, **more: Any) -> Gpu:
    return Gpu(uuid, more.pop("index", 0), "NVIDIA H100 80GB HBM3", memory, **more)


def answer(state: ClusterState, stem: str, recent: Recent | None = None) -> Any:
    """The JSON of the answer, as kube-scheduler gets it."""
    verbs = Verbs(state, Rules(), recent or Recent())
    args = parse(admitted(BODIES[stem]), ExtenderArgs)
    reply = verbs.prioritize(args) if stem.startswith("prioritize") else verbs.filter(args)
    return json.loads(msgspec.json.encode(reply))


def admitted(body: bytes) -> bytes:
    """The captured pod with admission's label."""
    found = json.loads(body)
    found["Pod"]["metadata"]["labels"] = MANAGED
    return json.dumps(found).encode()


def fitting(reply: Any) -> list[str]:
    if reply["Nodes"] is None:
        names: list[str] = reply["NodeNames"]
        return names
    assert reply["NodeNames"] is None
    return [item["metadata"]["name"] for item in reply["Nodes"]["items"]]


@pytest.mark.parametrize("mode", MODES)
def test_filter_names_every_node_once(mode: str) -> None:
    state = cluster(node_a=[gpu("a")], node_b=[gpu("b")])
    state.hold("other", Holding("node-b", {"b": Held(1, 30000, 30000, 0)}))
    reply = answer(state, f"filter-{mode}")
    assert fitting(reply) == ["node-a"]
    assert reply["FailedNodes"] == {"node-b": "0 of 1 cards have 60000 MiB free, 1 needed"}
    assert reply["FailedAndUnresolvableNodes"] == {}
    assert reply["Error"] == ""


def test_whole_nodes_go_back_as_they_came() -> None:
    reply = answer(cluster(node_a=[gpu("a")], node_b=[gpu("b")]), "filter-fullnodes")
    assert reply["Nodes"]["items"] == json.loads(BODIES["filter-fullnodes"])["Nodes"]["items"]


@pytest.mark.parametrize(
    ("cards", "sentence"),
    [
        ([gpu("b", 40000)], "0 of 1 cards have 60000 MiB free, 1 needed"),
        ([gpu("b", healthy=False)], "0 of 1 cards are healthy, 1 needed"),
        ([], "the node has no cards"),
    ],
)
def test_where_no_eviction_helps_the_node_is_unresolvable(cards: list[Gpu], sentence: str) -> None:
    reply = answer(cluster(node_a=[gpu("a")], node_b=cards), "filter-nodecache")
    assert fitting(reply) == ["node-a"]
    assert reply["FailedAndUnresolvableNodes"] == {"node-b": sentence}


def test_filter_changes_nothing_and_remembers_what_the_pod_asks() -> None:
    state, recent = cluster(node_a=[gpu("a")], node_b=[gpu("b")]), Recent()
    first = answer(state, "filter-nodecache", recent)
    assert answer(state, "filter-nodecache", recent) == first
    assert state.slices() == 0
    known, request = recent.get(json.loads(BODIES["bind-nodecache"])["PodUID"])
    assert known
    assert request is not None
    assert [(each.name, each.gpu.memory, each.gpu.cores) for each in request.containers] == [("main", 60000, 50)]


def test_no_node_at_all_is_counted_by_reason() -> None:
    state = cluster(node_a=[gpu("a", 40000)], node_b=[gpu("b", healthy=False)])
    before = {reason: UNSCHEDULABLE.labels(reason)._value.get() for reason in ("memory", "health")}
    assert fitting(answer(state, "filter-nodecache")) == []
    for reason, count in before.items():
        assert UNSCHEDULABLE.labels(reason)._value.get() == count + 1


class Late(ClusterState):
    """Learns that a pod is gone only when the caller waits for it."""

    def __init__(self, gone: str) -> None:
        super().__init__()
        self.gone = gone
        self.waits = 0

    def news(self, mark: int, seconds: float) -> bool:
        self.waits += 1
        if self.waits == 1:
            self.set_node("elsewhere", Inventory((gpu("e", 1000),)))
        elif self.gone:
            self.release(self.gone)
        return super().news(mark, min(seconds, 0))


@pytest.mark.parametrize("gone", ["other", ""])
def test_news_that_kube_scheduler_has_already_is_waited_for_now_and_then(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("PATIENCE", "PATIENT_EVERY"):
        monkeypatch.setattr(f"scheduler.verbs.{pause}", 3600.0)
    state = Late(gone)
    state.set_node("a", Inventory((gpu("a"),)))
    state.hold("other", Holding("a", {"a": Held(1, 81000, 81000, 0)}))
    args = request({"containers": [limits("main", gpumem=1000)]}, ["a"])
    verbs = Verbs(state, Rules(), Recent())
    before = UNSCHEDULABLE.labels("memory")._value.get()
    assert verbs.filter(args).NodeNames == (["a"] if gone else [])
    assert state.waits == 2, "for what changes nothing, and for what does"
    assert UNSCHEDULABLE.labels("memory")._value.get() == before + (not gone)
    state.hold("other", Holding("a", {"a": Held(1, 81000, 81000, 0)}))
    assert verbs.filter(args).NodeNames == []
    assert state.waits == 2, "not for each of many pods that are waiting"


def test_prioritize_gives_ten_to_one_node_the_least_loaded() -> None:
    state = cluster(node_a=[gpu("a")], node_b=[gpu("b")])
    state.hold("other", Holding("node-a", {"a": Held(1, 20000, 20000, 0)}))
    assert answer(state, "prioritize-nodecache") == [{"Host": "node-a", "Score": 0}, {"Host": "node-b", "Score": 10}]


def test_among_equal_nodes_the_first_by_name_is_the_best() -> None:
    state = cluster(node_b=[gpu("b")], node_a=[gpu("a")])
    assert answer(state, "prioritize-nodecache") == [{"Host": "node-a", "Score": 10}, {"Host": "node-b", "Score": 9}]


def test_a_node_without_cards_scores_nothing() -> None:
    assert answer(cluster(node_b=[gpu("b")]), "prioritize-nodecache") == [
        {"Host": "node-a", "Score": 0},
        {"Host": "node-b", "Score": 10},
    ]


def request(pod_spec: dict[str, Any], nodes: list[str], **metadata: Any) -> ExtenderArgs:
    body = {
        "Pod": {"metadata": {"name": "p", "uid": "u", "labels": MANAGED, **metadata}, "spec": pod_spec},
        "NodeNames": nodes,
    }
    return parse(json.dumps(body).encode(), ExtenderArgs)


def limits(name: str, **resources: int) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": {f"nvidia.com/{key}": value for key, value in resources.items()}}}


def test_several_containers_are_fitted_together() -> None:
    state = cluster(
        one=[gpu("a", 8000)],
        two=[gpu("b", 8000, index=0), gpu("c", 4000, index=1)],
        small=[gpu("d", 4000)],
        used=[gpu("e", 8000), gpu("f", 4000, index=1)],
        busy=[gpu("g", 8000), gpu("h", 4000, index=1)],
    )
    state.hold("y", Holding("busy", {"h": Held(1, 2000, 2000, 0)}))
    state.hold("x", Holding("used", {"e": Held(1, 1, 1, 0)}))
    # On "two", the policy's first choice (the empty larger card for the small container) must be revised.
    args = request(
        {"containers": [limits("small", gpumem=3000), limits("large", gpumem=8000)]},
        ["one", "two", "small", "used", "busy"],
    )
    reply = Verbs(state, Rules(), Recent()).filter(args)
    assert reply.NodeNames == ["two"]
    told = "container large: 0 of 2 cards have 8000 MiB free, 1 needed"
    assert reply.FailedNodes == {"used": told, "busy": told}
    assert reply.FailedAndUnresolvableNodes == {
        "one": "container large: 0 of 1 cards have 8000 MiB free, 1 needed",
        "small": "container large: 0 of 1 cards have 8000 MiB free, 1 needed",
    }


def test_a_pod_without_gpu_fits_everywhere() -> None:
    reply = Verbs(ClusterState(), Rules(), Recent()).filter(request({"containers": [{"name": "c"}]}, ["a", "b"]))
    assert reply.NodeNames == ["a", "b"]


@pytest.mark.parametrize("labels", [{}, {names.LABEL_MANAGED: "no"}, {names.WEBHOOK_LABELS[0]: names.WEBHOOK_IGNORE}])
def test_a_gpu_pod_that_admission_has_not_seen_is_not_placed(labels: dict[str, str]) -> None:
    state, recent = cluster(a=[gpu("a")]), Recent()
    args = request({"containers": [limits("main", gpumem=1000)]}, ["a"], labels=labels)
    reply = Verbs(state, Rules(), recent).filter(args)
    assert (reply.NodeNames, reply.FailedNodes) == ([], {})
    assert "admission sets it to true, but has not processed this pod" in reply.FailedAndUnresolvableNodes["a"]
    assert recent.get("u") == (False, None)
    plain = request({"containers": [{"name": "main"}]}, ["a"], labels=labels)
    assert Verbs(state, Rules(), recent).filter(plain).NodeNames == ["a"]


def test_a_pod_that_admission_would_have_denied_is_told_why() -> None:
    args = request({"containers": [limits("main", gpumem=0)]}, ["a"])
    reply = Verbs(cluster(a=[gpu("a")]), Rules(), Recent()).filter(args)
    assert reply.NodeNames == []
    assert reply.FailedAndUnresolvableNodes["a"].startswith(
        "cannot place the pod: spec.containers[main].resources.limits[nvidia.com/gpumem] is 0: "
    )
    assert [each.Score for each in Verbs(cluster(a=[gpu("a")]), Rules(), Recent()).prioritize(args)] == [0]


def test_bind_arguments_are_read() -> None:
    args = parse(BODIES["bind-nodecache"], ExtenderBindingArgs)
    assert (args.PodNamespace, args.PodName, args.Node) == ("default", "low", "node-b")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b'{"x":' + b"[" * 100_000, "the body is not JSON"),
        (b'{"Pod":{"spec":{"containers":[{"name":"c","env":[{"name":"e","valueFrom":' + b'{"a":' * 99_999, "JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `Pod`"),
        (b'{"Pod":{"metadata":{"name":5}},"NodeNames":[]}', "$.Pod.metadata.name"),
        (
            b'{"Pod":{"spec":{"containers":[{"name":"c","resources":{"limits":[]}}]}}}',
            "$.Pod.spec.containers[0].resources.limits",
        ),
        (b'{"Pod":{},"NodeNames":"a"}', "$.NodeNames"),
        (b'{"Pod":{}}', "it needs NodeNames or Nodes"),
        (b'{"Pod":{},"Nodes":{"items":[{}]}}', "missing required field `metadata`"),
    ],
)
def test_a_bad_body_is_told_in_one_sentence(body: bytes, said: str) -> None:
    with pytest.raises(BadBody) as found:
        Verbs(ClusterState(), Rules(), Recent()).filter(parse(body, ExtenderArgs))
    assert said in str(found.value)
    assert "\n" not in str(found.value)
