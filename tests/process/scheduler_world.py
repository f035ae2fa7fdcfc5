"""Shared by the tests of the scheduler: an API server, the scheduler's parts on it, and requests of kube-scheduler."""

import http.client
import json
from pathlib import Path
from typing import Any

import msgspec
from kube_world import World, connect, pod

from scheduler.app import MAX_VERB_BODY, extender_app
from scheduler.binder import Binder
from scheduler.cluster import ClusterState
from scheduler.feed import Feed
from scheduler.leader_check import IDLE_SECONDS, Fence, term_in
from scheduler.verbs import Recent, Verbs
from vgpu import names
from vgpu.devices import Gpu, Inventory, encode_inventory
from vgpu.listener import Listener
from vgpu.resources import Rules
from vgpu.standin.services import free_port, wait_for

SECONDS = 20.0
LEASE = "vgpu-scheduler"
MODEL = "NVIDIA H100 80GB HBM3"


def inventory(node: str, cards: int = 2, memory: int = 8000, physical: int = 0) -> str:
    return encode_inventory(Inventory(tuple(Gpu(f"GPU-{node}-{n}", n, MODEL, memory, physical) for n in range(cards))))


def add_node(world: World, name: str, **more: int) -> None:
    notes = {"vgpu.io/devices": inventory(name, **more)}
    world.send("POST", "/api/v1/nodes", {"metadata": {"name": name, "annotations": notes}})


def gpu_pod(name: str, memory: int = 3000, *, scheduler: str = "vgpu-scheduler", **more: Any) -> dict[str, Any]:
    """A pod after admission."""
    more["metadata"] = {"labels": {names.LABEL_MANAGED: "true"}, **more.get("metadata", {})}
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory)}
    return pod(name, limits=limits, schedulerName=scheduler, **more)


class Scheduler:
    """Feed, verbs and binder in this process, the extender on a real port; `client_world` may be another API server."""

    def __init__(
        self,
        world: World,
        folder: Path,
        *,
        holder: str = "a",
        name: str = "vgpu-scheduler",
        agents: tuple[str, str] | None = None,
        agent_port: int = 1,
        reconcile_seconds: float = 3600,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`holder`: the Lease's holder while this replica leads; `name`: schedulerName; `agents…`: as of Feed."""
        self.client = connect(world.server, folder)
        self.state, self.recent = ClusterState(), Recent()
        self.feed = Feed(self.client, self.state, name, reconcile_seconds, agents=agents, agent_port=agent_port)
        term = term_in(self.client, "kube-system", LEASE)
        fence = Fence(self.feed.catch_up, term, idle_seconds, own=lambda term: term.startswith(f"{holder} "))
        self.binder = Binder(self.client, self.state, Rules(), self.recent, fence.pass_)
        self.port = free_port()
        verbs = Verbs(self.state, Rules(), self.recent)
        app = extender_app(verbs, self.binder, lambda: self.feed.ready, fence)
        self.listener = Listener("extender", app, "127.0.0.1", self.port, threads=48, max_body=MAX_VERB_BODY)

    def start(self) -> None:
        self.feed.start()
        wait_for("both informers synced", lambda: self.feed.ready, SECONDS)

    def close(self) -> None:
        self.binder.stop()
        self.listener.stop()
        self.feed.stop()
        self.client.close()

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and decoded body (text where it is no JSON)."""
        return post(self.port, path, body)

    def filter(self, item: dict[str, Any], *nodes: str) -> Any:
        return self.post("/filter", {"Pod": item, "NodeNames": list(nodes)})[1]

    def bind(self, item: dict[str, Any], node: str) -> str:
        """The error of the bind, "" when the pod is bound."""
        meta = item["metadata"]
        args = {"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node}
        error: str = self.post("/bind", args)[1]["Error"]
        return error


def post(port: int, path: str, body: object, method: str = "POST") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else msgspec.json.encode(body))
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, json.loads(text) if answer.headers[
            "Content-Type"
        ] == "application/json" else text.decode()
    finally:
        connection.close()


def record(world: World, name: str) -> Any:
    """The allocation annotation of a pod, decoded; None when there is none."""
    text = world.pod(name).get("metadata", {}).get("annotations", {}).get("vgpu.io/allocation")
    return None if text is None else json.loads(text)
