"""500 clients that send slowly on every listener of both programs: probes, metrics and reviews are still answered."""

import json
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_machine import machines
from agent_world import until
from drippers import BODY, Crowd, dripping
from kube_world import World
from test_scheduler_program import HOOKS, Program

from vgpu.standin.apiserver import ApiServer

CROWD = 500
ROUNDS = 20
REVIEW = {
    "apiVersion": "admission.k8s.io/v1",
    "kind": "AdmissionReview",
    "request": {"uid": "u", "operation": "CREATE", "object": {"kind": "Pod", "spec": {"containers": []}}},
}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    if program.process is not None and program.process.poll() is None:
        program.end(signal.SIGKILL)


def asked(url: str, body: object = None) -> bool:
    """Whether the answer is 200. The bar is one second on an idle machine; here the crowd's deadline counts."""
    # without the machine's authorities, because reading them takes long
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data)
    with urllib.request.urlopen(request, timeout=8, context=context) as answer:
        return bool(answer.status == 200)


def _ready(port: int) -> bool:
    try:
        return asked(f"http://127.0.0.1:{port}/readyz")
    except urllib.error.HTTPError:
        return False


def beside(crowds: list[Crowd], questions: dict[str, Callable[[], bool]]) -> dict[str, float]:
    """The longest time of each question while all clients of all crowds were connected."""
    longest = dict.fromkeys(questions, 0.0)
    with dripping(*crowds) as counts:
        until(lambda: sum(counts.begun) > 0.9 * CROWD * len(crowds))
        for _ in range(ROUNDS):
            for name, question in questions.items():
                began = time.monotonic()
                assert question(), name
                longest[name] = max(longest[name], time.monotonic() - began)
    print(longest)
    return longest


@pytest.mark.slow
def test_the_scheduler_answers_beside_clients_that_drip(program: Program, tmp_path: Path) -> None:
    world = World(tmp_path, ApiServer())
    world.server.write_kubeconfig(tmp_path / "kubeconfig")
    try:
        url = f"https://127.0.0.1:{program.webhook}/webhook"
        hook = {"name": "a.b.c", "clientConfig": {"url": url}}
        world.send("POST", HOOKS, {"metadata": {"name": "vgpu"}, "webhooks": [hook]})
        program.start()
        until(program.ready)
        health, metrics, extender = (
            f"http://127.0.0.1:{port}" for port in (program.health, program.metrics, program.extender)
        )
        crowds = [Crowd(port, CROWD) for port in (program.health, program.metrics)]
        crowds.append(Crowd(program.extender, CROWD, begin=BODY))
        crowds.append(Crowd(program.webhook, CROWD, tls=True, begin=BODY))
        beside(
            crowds,
            {
                "health": lambda: asked(f"{health}/healthz"),
                "readiness": lambda: asked(f"{health}/readyz"),
                "metrics": lambda: asked(f"{metrics}/metrics"),
                "filter": lambda: asked(f"{extender}/filter", {"Pod": {}, "NodeNames": []}),
                "admission": lambda: asked(url, REVIEW),
            },
        )
    finally:
        world.close()


@pytest.mark.slow
def test_the_agent_answers_beside_clients_that_drip() -> None:
    with machines("cdi") as machine:
        machine.start_agent()
        machine.ready()
        until(lambda: _ready(machine.health_port))  # its first look at what containers hold comes after the cards
        crowds = [Crowd(port, CROWD) for port in (machine.port, machine.health_port)]
        beside(
            crowds,
            {
                "health": lambda: asked(f"http://127.0.0.1:{machine.health_port}/readyz"),
                "metrics": lambda: asked(f"http://127.0.0.1:{machine.port}/metrics"),
            },
        )
