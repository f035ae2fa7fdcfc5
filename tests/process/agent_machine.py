"""The agent as a real process with a kubelet and an API server."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from agent_world import until
from prometheus_client.parser import text_string_to_metric_families

from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.devices import GpuSlice, Inventory, decode_inventory
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.kubelet import Kubelet
from vgpu.standin.services import free_port

NODE = "node-1"
REPORT = (
    "import os, signal; keys = sorted(os.environ)\n"
    "print(*(f'{k}={os.environ[k]}' for k in keys), sep='\\n', flush=True)\n"
)


class Machine:
    """`cards`: number of simulated cards; `split`: slices of each; `plugin`: more settings of devicePlugin.

    `reserved`: MiB of the node's memory that pods cannot have.
    """

    def __init__(
        self, root: Path, strategy: str, cards: int = 2, split: int = 10, plugin: str = "", reserved: int = 0
    ) -> None:
        self.root = root
        self._ids = str(cards * split)
        self.api = ApiServer()
        self.api.start()
        self.api.write_kubeconfig(root / "kubeconfig")
        self.client = KubeClient.connect(root / "kubeconfig")
        (root / "config.yaml").write_text(
            f"simulate: T4x{cards}\nglobal: {{gpuHookPath: {root}/usr}}\n"
            f"devicePlugin: {{kubeletRoot: {root}/kubelet, deviceListStrategy: {strategy}, "
            f"deviceSplitCount: {split}, {plugin}}}\n"
        )
        (root / "cdi").mkdir()
        self.port, self.health_port = free_port(), free_port()
        self.kubelet = Kubelet(self.client, NODE, root / "kubelet", root / "cdi", reserved)
        self.kubelet.start()
        self.agent: subprocess.Popen[bytes] | None = None

    def start_agent(self) -> None:
        with (self.root / "agent.log").open("ab") as log:
            self.agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "device_plugin", "--node-name", NODE, "--verbose"),
                    *("--config", str(self.root / "config.yaml"), "--kubeconfig", str(self.root / "kubeconfig")),
                    *("--run-dir", str(self.root / "run"), "--cdi-dir", str(self.root / "cdi")),
                    *("--host-root", str(self.root / "host")),
                    *("--metrics-port", str(self.port), "--health-port", str(self.health_port)),
                ],
                stdout=log,
                stderr=log,
            )

    def stop_agent(self, number: int) -> int:
        assert self.agent is not None
        self.agent.send_signal(number)
        return self.agent.wait(10)

    def close(self) -> None:
        if self.agent is not None and self.agent.poll() is None:
            self.agent.kill()
            self.agent.wait()
        self.kubelet.stop()
        self.api.stop()

    def get(self, path: str) -> dict[str, Any]:
        """An object; an empty object while it does not exist."""
        try:
            found: dict[str, Any] = msgspec.json.decode(self.client.get(path))
        except ApiError as error:
            if error.status != 404:
                raise
            found = {}
        return {"metadata": {}, "status": {}, **found}

    def node(self) -> dict[str, Any]:
        return self.get(f"/api/v1/nodes/{NODE}")

    def allocatable(self, resource: str) -> str | None:
        value = self.node()["status"].get("allocatable", {}).get(resource)
        return None if value is None else str(value)

    def inventory(self) -> Inventory:
        return decode_inventory(self.node()["metadata"].get("annotations", {}).get(names.DEVICES, "{}"))

    def ready(self) -> list[str]:
        """Waits until pods can be placed; the cards' UUIDs."""
        until(lambda: self.allocatable("nvidia.com/gpu") == self._ids and self.allocatable(names.RESOURCE_TOTAL_MEMORY))
        return [gpu.uuid for gpu in self.inventory().devices]

    def registered(self, times: int) -> None:
        """Waits until agents have registered `times` times; before that, the kubelet refuses pods with
        GPUs for good.
        """
        until(lambda: (self.root / "agent.log").read_text().count("registered nvidia.com/gpu") >= times)

    def run(
        self,
        name: str,
        slices: dict[str, list[GpuSlice]],
        script: str = "",
        *,
        init: str = "",
        record: bool = True,
        command: Sequence[str] = (),
    ) -> str:
        """A bound pod; its containers report their environment and run `script`, or run `command` instead."""
        containers = [
            {
                "name": each,
                "command": list(command) or ["python3", "-c", REPORT + script],
                "resources": {"limits": {"nvidia.com/gpu": str(len(given)), "nvidia.com/gpumem": str(given[0].mem)}},
            }
            for each, given in slices.items()
        ]
        body = {
            "metadata": {"name": name},
            "spec": {
                "schedulerName": "vgpu-scheduler",
                "restartPolicy": "Never",
                "initContainers": [c for c in containers if c["name"] == init],
                "containers": [c for c in containers if c["name"] != init],
            },
        }
        made = msgspec.json.decode(self.client.request("POST", "/api/v1/namespaces/default/pods", body=body))
        uid = str(made["metadata"]["uid"])
        annotations = {}
        if record:
            annotations[names.ALLOCATION] = allocation.encode(Allocation({k: tuple(v) for k, v in slices.items()}))
        writes.bind(self.client, "default", name, uid, NODE, annotations)
        return uid

    def delete(self, name: str, uid: str) -> None:
        """Removes a pod at once and waits until its containers' folders are gone."""
        writes.delete_pod(self.client, "default", name, uid, grace_seconds=0)
        until(lambda: not list((self.root / "run" / "containers").glob(f"{uid}_*")))

    def phase(self, name: str) -> str | None:
        phase: str | None = self.get(f"/api/v1/namespaces/default/pods/{name}")["status"].get("phase")
        return phase

    def environment(self, name: str, container: str = "main") -> dict[str, str]:
        log = self.root / "kubelet" / "logs" / f"default_{name}_{container}.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return dict(line.partition("=")[::2] for line in lines)

    def metrics(self) -> dict[str, dict[tuple[str, ...], float]]:
        found: dict[str, dict[tuple[str, ...], float]] = {}
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                for sample in family.samples:
                    key = tuple(sample.labels.get(k, "") for k in ("pod", "container", "uuid"))
                    found.setdefault(sample.name, {})[key] = sample.value
        return found

    def sample(self, name: str, pod: str, container: str, card: str) -> float | None:
        return self.metrics().get(name, {}).get((pod, container, card))

    def condition(self, type_: str) -> dict[str, str]:
        """A condition of the node; empty while it has none of this type."""
        return next((one for one in self.node()["status"].get("conditions", ()) if one["type"] == type_), {})

    def mark(self, annotation: str, value: str | None) -> None:
        """Writes an administrator's mark on the node."""
        writes.patch_node(self.client, NODE, annotations={annotation: value})

    def events(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.client.get("/api/v1/events"))["items"])


@contextlib.contextmanager
def machines(strategy: str, cards: int = 2, split: int = 10, plugin: str = "", reserved: int = 0) -> Iterator[Machine]:
    """One machine, which ends with the block."""
    root = Path(tempfile.mkdtemp(prefix="vgpu", dir="/tmp"))
    made = Machine(root, strategy, cards, split, plugin, reserved)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(root, ignore_errors=True)
