"""`python -m scheduler` as a process: starts without an API server, serves, ends on SIGTERM, reports errors."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError

import pytest
from kube_world import World
from scheduler_world import SECONDS, add_node, gpu_pod, post, record

from vgpu.standin.apiserver import ApiServer
from vgpu.standin.services import free_port, wait_for

HOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class Program:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.extender, self.webhook, self.metrics, self.health = (free_port() for _ in range(4))
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *more: str) -> list[str]:
        ports = {"extender": self.extender, "webhook": self.webhook, "metrics": self.metrics, "health": self.health}
        flags = [f"--{name}-port={port}" for name, port in ports.items()]
        return [
            sys.executable, "-m", "scheduler", *flags, "--webhook-address=127.0.0.1", "--tls-secret=kube-system/tls",
            "--webhook-config=vgpu", f"--kubeconfig={self.folder / 'kubeconfig'}", *more,
        ]  # fmt: skip

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(), stderr=log, stdout=log, env=environment(self.folder))

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}/readyz") as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "VGPU_CONFIG": "", "HOME": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    yield program
    if program.process is not None and program.process.poll() is None:
        program.process.kill()
        program.process.wait()


def test_from_an_absent_api_server_to_a_bound_pod_and_on_after_kill_9(program: Program, tmp_path: Path) -> None:
    server = ApiServer(free_port())
    server.write_kubeconfig(tmp_path / "kubeconfig")
    program.start()
    wait_for("the outage is told", lambda: "trying again" in program.log.read_text(), SECONDS)
    assert not program.ready()
    world = World(tmp_path, server)
    try:
        url = f"https://127.0.0.1:{program.webhook}/webhook"
        world.send(
            "POST", HOOKS, {"metadata": {"name": "vgpu"}, "webhooks": [{"name": "a.b.c", "clientConfig": {"url": url}}]}
        )
        add_node(world, "node-a", cards=1)
        wait_for("ready", program.ready, SECONDS)
        for number, name in enumerate(("p", "q")):
            item = world.create(gpu_pod(name))
            meta = item["metadata"]
            args = {"PodName": name, "PodNamespace": "default", "PodUID": meta["uid"], "Node": "node-a"}
            assert post(program.extender, "/bind", args)[1] == {"Error": ""}
            assert record(world, name) is not None
            if number == 0:
                program.end(signal.SIGKILL)
                program.start()
                wait_for("ready again", program.ready, SECONDS)
        full = world.create(gpu_pod("r"))
        reply = post(program.extender, "/filter", {"Pod": full, "NodeNames": ["node-a"]})[1]
        assert reply["FailedNodes"] == {"node-a": "0 of 1 cards have 3000 MiB free, 1 needed"}
        with urllib.request.urlopen(f"http://127.0.0.1:{program.metrics}/metrics") as answer:
            text = answer.read().decode()
        assert 'vgpu_scheduler_request_duration_seconds_count{verb="filter"} 1.0' in text
        assert 'vgpu_scheduler_unschedulable_total{reason="memory"} 1.0' in text
        assert "vgpu_scheduler_drift_slices 0.0" in text
        for port in (program.extender, program.webhook, program.metrics, program.health):
            with pytest.raises(ConnectionRefusedError):  # a loopback address too, but not the one they listen on
                socket.create_connection(("127.0.0.2", port), SECONDS)
    finally:
        world.close()
    assert program.end(signal.SIGTERM) == 0
    assert "Traceback" not in program.log.read_text()


def test_it_ends_on_sigterm_while_it_still_waits_for_the_api_server(program: Program, tmp_path: Path) -> None:
    ApiServer(free_port()).write_kubeconfig(tmp_path / "kubeconfig")
    program.start()
    wait_for("the outage is told", lambda: "trying again" in program.log.read_text(), SECONDS)
    assert program.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--kubeconfig=/no/such/file"], 1, "vgpu-scheduler: cannot connect to a cluster: /no/such/file"),
        (["--config=/no/such/file"], 1, "vgpu-scheduler: cannot read /no/such/file: No such file or directory"),
        (["--extender-port=http"], 2, "'http' is not a port: 1 to 65535"),
        (["--tls-secret=tls"], 2, "'tls' is not NAMESPACE/NAME"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    program: Program, tmp_path: Path, flags: list[str], code: int, said: str
) -> None:
    ApiServer(free_port()).write_kubeconfig(tmp_path / "kubeconfig")
    done = subprocess.run(
        program.command(*flags), capture_output=True, text=True, timeout=SECONDS, env=environment(tmp_path), check=False
    )
    assert done.returncode == code
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("which", ["extender", "metrics", "webhook", "health"])
def test_a_port_that_is_taken_is_named(program: Program, tmp_path: Path, which: str) -> None:
    server = ApiServer(free_port())  # the webhook listens once it has its certificate
    server.start()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    port: int = getattr(program, which)
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            done = subprocess.run(
                program.command(),
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env=environment(tmp_path),
                check=False,
            )
    finally:
        server.stop()
    assert done.returncode == 1
    assert f"{which}: port {port} on 127.0.0.1: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
