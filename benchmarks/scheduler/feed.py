"""What does the whole scheduler cost while the cluster lives: its informers, comparisons, pods that are hard to place?

    python benchmarks/scheduler/feed.py [--nodes 5000] [--cards 8] [--pods 40000] [--events 200] [--seconds 20]
        [--cases quiet nine]

Starts the scheduler's own parts (informers, verbs, listener) in a process of their own, against an API server that
plays back a cluster: pods and nodes as large as real ones (managedFields, images, conditions), and so many changes of
pods per second. Another process asks /filter, one pod after the other, as kube-scheduler does, and prints in
milliseconds p50 and p99 of the whole request:

    quiet       nothing happens
    events      pods change, `--events` of them per second
    reconcile   the same, while the scheduler compares all versions with the API server, again and again
    relist      the same, while it lists everything anew, every five seconds
    nine        as `events`, while a pod of nine one-card containers of 60 % is asked for, again and again

"CPU" is the processor time of the scheduler per request of that case, everything it does meanwhile included. At the
end: the memory of the scheduler's process. Nothing is asserted; figures by the clock depend on what else the machine
does.
"""

import argparse
import gc
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from filter import MEMORY, body, percentiles

from scheduler.app import MAX_VERB_BODY, extender_app
from scheduler.binder import Binder
from scheduler.cluster import ClusterState
from scheduler.feed import Feed
from scheduler.leader_check import Fence
from scheduler.verbs import Recent, Verbs
from vgpu import names
from vgpu.devices import Gpu, Inventory, encode_inventory
from vgpu.kube.client import KubeClient
from vgpu.listener import Listener
from vgpu.resources import Rules
from vgpu.standin.services import free_port, wait_for

FIRST = 100_000  #: resourceVersion of the first object
NAME = "vgpu-scheduler"
ACCEPTED_SECONDS = 300.0
CASES: Final = ("quiet", "events", "reconcile", "relist", "nine")


# The API server: objects as text, lists and watches of them


def node(number: int, cards: int) -> bytes:
    """A node as large as a real one: 50 images, conditions, addresses."""
    gpus = tuple(
        Gpu(
            f"GPU-{number:05d}-{card}-0000-0000-000000000000",
            card,
            "NVIDIA H100 80GB HBM3",
            MEMORY,
            numa=card // 4,
            pci=f"00000000:{card:02X}:00.0",
            links={
                f"GPU-{number:05d}-{other}-0000-0000-000000000000": "NVLINK" for other in range(cards) if other != card
            },
        )
        for card in range(cards)
    )
    images = [{"names": [f"registry.example.com/team/image-{n}@sha256:{'0' * 64}"], "sizeBytes": n} for n in range(50)]
    conditions = [{"type": f"Condition{n}", "status": "False", "message": "kubelet has no pressure"} for n in range(6)]
    return json.dumps(
        {
            "metadata": {
                "name": f"node-{number:05d}",
                "uid": f"node-uid-{number}",
                "resourceVersion": str(FIRST + number),
                "annotations": {names.DEVICES: encode_inventory(Inventory(gpus))},
                "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:field{n}": {} for n in range(60)}}],
            },
            "spec": {},
            "status": {"images": images, "conditions": conditions, "capacity": {"cpu": "64", "memory": "512Gi"}},
        },
        separators=(",", ":"),
    ).encode()


def pod(number: int, nodes: int, cards: int, version: int) -> bytes:
    """A pod as large as a real one, bound and with a record."""
    draw = random.Random(number)
    place = number % nodes
    uuid = f"GPU-{place:05d}-{draw.randrange(cards)}-0000-0000-000000000000"
    piece = {"uuid": uuid, "mem": draw.choice((2000, 4000, 8000, 16000)), "cores": draw.choice((0, 5, 10))}
    record = json.dumps({"v": 1, "containers": {"main": [piece]}}, separators=(",", ":"))
    env = [{"name": f"VARIABLE_{n}", "value": f"value of this variable, {n}"} for n in range(20)]
    mounts = [{"name": f"volume-{n}", "mountPath": f"/mnt/volume-{n}"} for n in range(4)]
    return json.dumps(
        {
            "metadata": {
                "name": f"train-{number}-0",
                "namespace": f"team-{number % 50}",
                "uid": f"{number:08d}-0000-4000-8000-000000000000",
                "resourceVersion": str(version),
                "labels": {names.LABEL_MANAGED: "true", "app": f"train-{number}"},
                "annotations": {names.ALLOCATION: record},
                "managedFields": [
                    {"manager": m, "fieldsV1": {f"f:field{n}": {} for n in range(70)}} for m in ("a", "b")
                ],
            },
            "spec": {
                "nodeName": f"node-{place:05d}",
                "schedulerName": NAME,
                "containers": [
                    {"name": "main", "image": "registry.example.com/train:1", "env": env, "volumeMounts": mounts}
                ],
            },
            "status": {"phase": "Running", "containerStatuses": [{"name": "main", "ready": True}]},
        },
        separators=(",", ":"),
    ).encode()


class Playback:
    """All objects as text by kind, and the changes of pods."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.version = FIRST + args.nodes + args.pods
        self.items = {
            "nodes": [node(n, args.cards) for n in range(args.nodes)],
            "pods": [pod(n, args.nodes, args.cards, FIRST + args.nodes + n) for n in range(args.pods)],
        }
        self.lost = 0  #: number of watches that were answered that their history is lost
        self.running = threading.Event()  #: pods change

    def list(self, kind: str) -> Iterator[bytes]:
        yield f'{{"kind":"List","metadata":{{"resourceVersion":"{self.version}"}},"items":['.encode()
        for at in range(0, len(self.items[kind]), 100):
            yield (b"," if at else b"") + b",".join(self.items[kind][at : at + 100])
        yield b"]}\n"

    def events(self, kind: str) -> Iterator[bytes]:
        """Yields at most 20 events in a row, so that they come evenly."""
        lost = self.lost
        due = time.monotonic()
        while True:
            if lost != self.lost:
                yield b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'
                return
            if kind != "pods" or not self.running.is_set():
                yield b"\n"
                time.sleep(0.05)
                due = time.monotonic()
                continue
            number = random.randrange(self.args.pods)
            self.version += 1
            text = pod(number, self.args.nodes, self.args.cards, self.version)
            self.items["pods"][number] = text
            yield b'{"type":"MODIFIED","object":' + text + b"}\n"
            due += 1 / self.args.events
            time.sleep(max(0.0, due - time.monotonic()))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    playback: Playback

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = parse_qs(url.query)
        if url.path == "/control":
            self.playback.lost += "lose" in asked
            (self.playback.running.set if "events" in asked else self.playback.running.clear)()
            return self._send(iter([b"ok"]))
        kind = url.path.rsplit("/", 1)[-1]
        if "labelSelector" in asked:  # earlier names of the scheduler: there are none
            empty = f'{{"metadata":{{"resourceVersion":"{self.playback.version}"}},"items":[]}}'.encode()
            return self._send(self.playback.events("none") if "watch" in asked else iter([empty]))
        return self._send(self.playback.events(kind) if "watch" in asked else self.playback.list(kind))

    def _send(self, parts: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for part in parts:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True


def serve_api(args: argparse.Namespace) -> None:
    Handler.playback = Playback(args)
    server = ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections that end with their process
    server.serve_forever()


# The scheduler


def serve_scheduler(args: argparse.Namespace) -> None:
    """The parts of scheduler.__main__ that place pods. A command on stdin names the work to repeat."""
    from scheduler.__main__ import SWITCH_SECONDS

    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()
    client = KubeClient.connect(Path(args.kubeconfig))
    state, recent = ClusterState(), Recent()
    feed = Feed(client, state, NAME, 3600)
    fence = Fence(lambda: None, lambda: "alone")
    verbs = Verbs(state, Rules(), recent)
    binder = Binder(client, state, Rules(), recent, fence.pass_)
    app = extender_app(verbs, binder, lambda: feed.ready, fence)
    Listener("extender", app, "127.0.0.1", args.port, threads=8, max_body=MAX_VERB_BODY)
    feed.start()
    again = threading.Event()

    def reconcile() -> None:
        while again.wait():
            feed.reconcile()

    threading.Thread(target=reconcile, daemon=True).start()
    for line in sys.stdin:
        command = line.strip()
        if command == "memory":
            fields = dict(each.split(":", 1) for each in Path("/proc/self/status").read_text().splitlines())
            print(fields["VmRSS"].split()[0], fields["VmHWM"].split()[0], state.slices(), flush=True)
        elif command == "processor":
            print(time.process_time(), flush=True)
        else:
            (again.set if command == "reconcile" else again.clear)()
            print("ok", flush=True)
    os._exit(0)


# The measurement


def measure(args: argparse.Namespace, scheduler: "subprocess.Popen[str]", api: int, port: int) -> None:
    small = body(args.nodes, [{"gpumem": 3000, "gpucores": 30}])
    nine = body(args.nodes, [{"gpumem": MEMORY * 6 // 10} for _ in range(9)])

    def tell(command: str) -> str:
        assert scheduler.stdin is not None
        assert scheduler.stdout is not None
        scheduler.stdin.write(command + "\n")
        scheduler.stdin.flush()
        return scheduler.stdout.readline().strip()

    def control(query: str) -> None:
        connection = HTTPConnection("127.0.0.1", api)
        connection.request("GET", f"/control?{query}")
        connection.getresponse().read()
        connection.close()

    def ask(connection: HTTPConnection, data: bytes) -> float:
        begin = time.perf_counter()
        connection.request("POST", "/filter", data)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200 or b'"Error":""' not in text[-200:] + text[:200]:
            raise RuntimeError(f"filter: {answer.status} {text[:200]!r}")
        return time.perf_counter() - begin

    wait_for("the scheduler", lambda: _listens(port), ACCEPTED_SECONDS)
    begin = time.perf_counter()
    wait_for("all pods read", lambda: int(tell("memory").split()[2]) == args.pods, ACCEPTED_SECONDS)
    now, most, _ = tell("memory").split()
    print(f"{args.nodes} nodes x {args.cards} cards, {args.pods} pods: read in {time.perf_counter() - begin:.1f} s;")
    print(f"memory of the scheduler after that: {int(now) // 1024} MiB, at most {int(most) // 1024} MiB\n")
    print(f"{'case':10} {'requests':>8} {'p50 ms':>8} {'p99 ms':>8} {'most ms':>8} {'CPU ms':>8}")
    ended = threading.Event()
    for case in args.cases:
        control("" if case == "quiet" else "events=1")
        tell("reconcile" if case == "reconcile" else "rest")
        ended.clear()
        slow: list[float] = []

        def beside(case: str = case, slow: list[float] = slow) -> None:
            with_nine = HTTPConnection("127.0.0.1", port)
            while not ended.is_set():
                if case == "nine":
                    slow.append(ask(with_nine, nine))
                elif case == "relist":
                    control("events=1&lose=1")
                    ended.wait(5)
                else:
                    return

        thread = threading.Thread(target=beside, daemon=True)
        connection = HTTPConnection("127.0.0.1", port)
        for _ in range(5):
            ask(connection, small)
        thread.start()
        used = float(tell("processor"))
        until = time.monotonic() + args.seconds
        times = []
        while time.monotonic() < until:
            times.append(ask(connection, small))
            time.sleep(0.01)
        used = float(tell("processor")) - used
        ended.set()
        thread.join()
        p50, p99 = percentiles(times)
        more = f"   nine containers: {percentiles(slow)[0]:.0f} ms, at most {max(slow) * 1e3:.0f} ms" if slow else ""
        figures = f"{p50:8.2f} {p99:8.2f} {max(times) * 1e3:8.2f} {used / len(times) * 1e3:8.2f}"
        print(f"{case:10} {len(times):8} {figures}{more}", flush=True)
    now, most, _ = tell("memory").split()
    print(f"\nmemory of the scheduler in the end: {int(now) // 1024} MiB, at most {int(most) // 1024} MiB")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = (("nodes", 5000), ("cards", 8), ("pods", 40_000), ("events", 200), ("seconds", 20), ("port", 0))
    for name, default in defaults:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--part", choices=("api", "scheduler"), help=argparse.SUPPRESS)
    parser.add_argument("--kubeconfig", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "api":
        serve_api(args)
    elif args.part == "scheduler":
        serve_scheduler(args)
    else:
        with TemporaryDirectory() as folder:
            run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> None:
    api, port = free_port(), free_port()
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{api}"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {
        "clusters": [cluster],
        "users": [{"name": "u", "user": {}}],
        "contexts": [context],
        "current-context": "c",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **config}))
    size = [f"--{name}={getattr(args, name)}" for name in ("nodes", "cards", "pods", "events")]
    program = [sys.executable, __file__, *size]
    with subprocess.Popen([*program, "--part=api", f"--port={api}"]) as server:
        try:
            wait_for("the API server", lambda: _listens(api), ACCEPTED_SECONDS)
            command = [*program, "--part=scheduler", f"--port={port}", f"--kubeconfig={path}"]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as scheduler:
                try:
                    measure(args, scheduler, api, port)
                finally:
                    scheduler.kill()
        finally:
            server.kill()


if __name__ == "__main__":
    main()
