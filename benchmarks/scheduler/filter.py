"""How long do filter and prioritize take in a large cluster?

    python benchmarks/scheduler/filter.py [--nodes 5000] [--cards 8] [--pods 40000] [--rounds 300]

Prints p50 and p99 in milliseconds: of the verb alone (body in, body out) by the clock and in processor time, which less
depends on other work on the machine; of the whole HTTP request on the loopback address; and the memory of the process.
Bodies name all nodes, as a kube-scheduler with nodeCacheCapable sends them.
"""

import argparse
import http.client
import json
import random
import resource
import time
from collections.abc import Callable

import msgspec

from scheduler.app import MAX_VERB_BODY, extender_app
from scheduler.binder import Binder
from scheduler.cluster import ClusterState, Holding
from scheduler.leader_check import Fence
from scheduler.verbs import Recent, Verbs
from scheduler.wire import ExtenderArgs, parse
from vgpu import names
from vgpu.allocation import Held
from vgpu.devices import Gpu, Inventory
from vgpu.listener import Listener
from vgpu.resources import Rules
from vgpu.standin.services import free_port

MEMORY = 81920


def fill(state: ClusterState, nodes: int, cards: int, pods: int) -> None:
    draw = random.Random(1)
    for number in range(nodes):
        state.set_node(
            f"node-{number:05d}",
            Inventory(
                tuple(
                    Gpu(f"GPU-{number:05d}-{card}", card, "NVIDIA H100 80GB HBM3", MEMORY, numa=card // 4)
                    for card in range(cards)
                )
            ),
        )
    for number in range(pods):
        node = number % nodes
        memory = draw.choice((2000, 4000, 8000, 16000))
        card = draw.randrange(cards)
        held = Held(1, memory, memory, draw.choice((0, 5, 10)))
        state.hold(f"uid-{number}", Holding(f"node-{node:05d}", {f"GPU-{node:05d}-{card}": held}))


def body(nodes: int, containers: list[dict[str, object]], annotations: dict[str, str] | None = None) -> bytes:
    listed = [
        {
            "name": f"c{number}",
            "resources": {"limits": {f"nvidia.com/{key}": str(value) for key, value in each.items()}},
        }
        for number, each in enumerate(containers)
    ]
    labels = {names.LABEL_MANAGED: "true"}
    pod = {
        "metadata": {
            "name": "p",
            "namespace": "default",
            "uid": "bench",
            "annotations": annotations or {},
            "labels": labels,
        },
        "spec": {"containers": listed},
    }
    return json.dumps({"Pod": pod, "Nodes": None, "NodeNames": [f"node-{n:05d}" for n in range(nodes)]}).encode()


def percentiles(times: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    times.sort()
    return times[len(times) // 2] * 1e3, times[int(len(times) * 0.99)] * 1e3


def measure(call: Callable[[], object], rounds: int) -> tuple[float, ...]:
    """p50 and p99 by the clock, and the same in processor time of this thread."""
    for _ in range(5):
        call()
    clock, processor = [], []
    for _ in range(rounds):
        start, used = time.perf_counter(), time.thread_time()
        call()
        clock.append(time.perf_counter() - start)
        processor.append(time.thread_time() - used)
    return *percentiles(clock), *percentiles(processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 5000), ("cards", 8), ("pods", 40_000), ("rounds", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    state, recent = ClusterState(), Recent()
    start = time.perf_counter()
    fill(state, args.nodes, args.cards, args.pods)
    print(f"{args.nodes} nodes x {args.cards} cards, {args.pods} pods: filled in {time.perf_counter() - start:.1f} s")
    verbs = Verbs(state, Rules(), recent)
    client = None  # the benchmark makes no bind
    fence = Fence(lambda: None, lambda: "alone")
    binder = Binder(client, state, Rules(), recent, fence.pass_)  # type: ignore[arg-type]  # it never binds
    app = extender_app(verbs, binder, lambda: True, fence)
    port = free_port()
    listener = Listener("extender", app, "127.0.0.1", port, threads=4, max_body=MAX_VERB_BODY)
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(path: str, data: bytes) -> bytes:
        connection.request("POST", path, data)
        return connection.getresponse().read()

    def over_http(path: str, data: bytes) -> tuple[float, ...]:
        connection.close()  # the listener has closed idle connections
        return measure(lambda: post(path, data), args.rounds)[:2]

    cases = {
        "1 container, most nodes fit": body(args.nodes, [{"gpumem": 3000, "gpucores": 30}]),
        "1 container, some nodes fit": body(args.nodes, [{"gpu": 7, "gpumem": 74000}]),
        "1 container, no node fits": body(args.nodes, [{"gpu": 8, "gpumem": 90000}]),
        "4 cards of one NUMA node": body(args.nodes, [{"gpu": 4, "gpumem": 60000}], {"nvidia.com/numa-bind": "true"}),
        "2 containers that compete": body(args.nodes, [{"gpumem": 80000}, {"gpumem": 80000}]),
        "3 containers": body(args.nodes, [{"gpumem": 3000}, {"gpumem": 8000}, {"gpumem": 16000, "gpucores": 50}]),
    }
    heads = ("p50 ms", "p99 ms", "CPU p50", "CPU p99", "HTTP p50", "HTTP p99")
    print(f"{'case':30} {'verb':11} " + " ".join(f"{head:>8}" for head in heads))
    for case, data in cases.items():
        verb_calls: dict[str, Callable[[], object]] = {
            "filter": lambda data=data: msgspec.json.encode(verbs.filter(parse(data, ExtenderArgs))),
            "prioritize": lambda data=data: msgspec.json.encode(verbs.prioritize(parse(data, ExtenderArgs))),
        }
        for verb, call in verb_calls.items():
            figures = (*measure(call, args.rounds), *over_http(f"/{verb}", data))
            print(f"{case:30} {verb:11} " + " ".join(f"{figure:8.2f}" for figure in figures), flush=True)
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    connection.close()
    listener.stop()


if __name__ == "__main__":
    main()
