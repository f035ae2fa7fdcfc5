"""A whole small cluster on this machine: the real agent and scheduler as processes between stand-ins.

Real: admission over TLS, extender, bind, device-plugin gRPC, regions, the preloaded library. Simulated: the cards.
Stand-ins that speak the real protocols: API server, kubelet, kube-scheduler.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from vgpu import config as configuration
from vgpu import names
from vgpu.kube.client import KubeClient
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.kubelet import Kubelet
from vgpu.standin.kubescheduler import KubeScheduler
from vgpu.standin.services import Service, free_port, wait_for

NODE = "demo-node"
NAMESPACE = "default"
DEFAULT_SCHEDULER = "default-scheduler"  #: scheduler of pods without a GPU
WEBHOOK = "vgpu-webhook"
READY_SECONDS = 40.0


class LocalCluster:
    """Starts everything in `directory` (a context manager); writes nothing outside this directory."""

    def __init__(self, directory: Path, *, simulate: str = "T4x2", config: configuration.Config | None = None) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.simulator_dir = self.run_dir / "simulator"
        base = config or configuration.Config()
        self.config = msgspec.structs.replace(
            base,
            simulate=simulate,
            global_=configuration.Global(gpu_hook_path=str(directory / "local")),
            device_plugin=msgspec.structs.replace(base.device_plugin, kubeletRoot=str(directory / "kubelet")),
        )
        self.metrics_port = free_port()
        self.webhook_port = free_port()
        self.extender_port = free_port()
        self.scheduler_metrics_port = free_port()
        for part in (self.run_dir, directory / "local", directory / "kubelet", directory / "cdi", directory / "logs"):
            part.mkdir(parents=True, exist_ok=True)
        self.api = ApiServer()
        self.kubeconfig = directory / "kubeconfig"
        self.client: KubeClient
        self._running = ExitStack()
        self.agent = self._service(
            "agent", "device_plugin", "--node-name", NODE, "--run-dir", str(self.run_dir),
            "--cdi-dir", str(directory / "cdi"), "--host-root", str(directory / "host"),
            "--metrics-port", str(self.metrics_port), "--health-port", str(free_port()),
        )  # fmt: skip
        self.scheduler = self._service(
            "scheduler", "scheduler", "--extender-port", str(self.extender_port),
            "--webhook-port", str(self.webhook_port), "--webhook-address", "127.0.0.1",
            "--metrics-port", str(self.scheduler_metrics_port), "--health-port", str(free_port()),
            "--tls-secret", "kube-system/vgpu-webhook-tls", "--webhook-config", WEBHOOK,
        )  # fmt: skip

    def _service(self, name: str, module: str, *flags: str) -> Service:
        config = self.directory / "config.yaml"
        # -P: Python does not search the current folder for modules
        command = [
            sys.executable,
            "-P",
            "-m",
            module,
            "--config",
            str(config),
            "--kubeconfig",
            str(self.kubeconfig),
            *flags,
        ]
        return Service(name, command, self.directory / "logs" / f"{name}.log", {"PYTHONUNBUFFERED": "1"})

    def __enter__(self) -> Self:
        (self.directory / "config.yaml").write_text(configuration.encode(self.config))
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        """Starts all parts. `stop` knows each part before it starts: an interrupt may come at any moment."""
        self._running.callback(self.api.stop)
        self.api.start()
        self.api.write_kubeconfig(self.kubeconfig)
        self.client = KubeClient.connect(self.kubeconfig)
        self._running.callback(self.client.close)
        self._register_webhook()
        kept = configuration.mebibytes(self.config.device_plugin.hostMemory)
        kubelet = Kubelet(self.client, NODE, self.directory / "kubelet", self.directory / "cdi", kept)
        scheduler = KubeScheduler(self.client, f"http://127.0.0.1:{self.extender_port}", self.config.scheduler_name)
        default = KubeScheduler(self.client, "", DEFAULT_SCHEDULER)
        for part in (self.scheduler, self.agent, kubelet, scheduler, default):
            self._running.callback(part.stop)
            part.start()
        self._wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends all parts, in the reverse order of their start."""
        self._running.close()

    def _register_webhook(self) -> None:
        """Registers the webhook as the chart does, for new pods.

        The scheduler itself fills in caBundle. The chart's policies are not simulated.
        """
        self.client.request(
            "POST",
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
            body={
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": {"name": WEBHOOK},
                "webhooks": [
                    {
                        "name": "pods.vgpu.io",
                        "admissionReviewVersions": ["v1"],
                        "sideEffects": "None",
                        "failurePolicy": "Fail",
                        "timeoutSeconds": 10,
                        "clientConfig": {"url": f"https://127.0.0.1:{self.webhook_port}/webhook"},
                        "rules": [
                            {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                        ],
                    }
                ],
            },
        )

    def _wait_ready(self) -> None:
        try:
            wait_for("scheduler ready", self._scheduler_ready, READY_SECONDS)
            wait_for("cards allocatable on the node", self._cards_allocatable, READY_SECONDS)
        except TimeoutError as error:
            logs = "\n".join(f"--- {part.name}\n{part.tail()}" for part in (self.agent, self.scheduler))
            raise RuntimeError(f"{error}\n{logs}") from None

    def _scheduler_ready(self) -> bool:
        """Whether the scheduler is ready, and the API server has the certificate for calls of the webhook."""
        context = ssl.create_default_context()
        # only for readiness; admission verifies the certificate
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            url = f"https://127.0.0.1:{self.webhook_port}/readyz"
            with urllib.request.urlopen(url, timeout=2, context=context) as answer:
                ready = answer.status == 200
        except (urllib.error.URLError, OSError):
            return False
        path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{WEBHOOK}"
        hooks = msgspec.json.decode(self.client.get(path))["webhooks"]
        return ready and all(hook["clientConfig"].get("caBundle") for hook in hooks)

    def _cards_allocatable(self) -> bool:
        allocatable = (self.node().get("status") or {}).get("allocatable") or {}
        needed = (self.config.resource_name, names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_TOTAL_CORES)
        return all(allocatable.get(name, "0") != "0" for name in needed)

    def node(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.client.get(f"/api/v1/nodes/{NODE}"))
        return found

    def pods(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.client.get("/api/v1/pods"))["items"]
        return items

    def create(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Creates a pod as kubectl would.

        Raises ApiError with the webhook's sentence when the webhook denies the pod.
        """
        namespace = pod.setdefault("metadata", {}).setdefault("namespace", NAMESPACE)
        body = self.client.request("POST", f"/api/v1/namespaces/{namespace}/pods", body=pod)
        created: dict[str, Any] = msgspec.json.decode(body)
        return created

    def log(self, pod: dict[str, Any], container: str) -> str:
        """The output of a container so far."""
        meta = pod["metadata"]
        path = self.directory / "kubelet" / "logs" / f"{meta['namespace']}_{meta['name']}_{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def metrics(self) -> str:
        """The node's /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
            return text


def scratch() -> Path:
    """A folder for a short-lived cluster, with a path that is short enough for unix sockets (108 bytes)."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) if base and os.access(base, os.W_OK) and len(base) < 40 else Path("/tmp")
