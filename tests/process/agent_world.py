"""One node without its processes: the agent's parts with a real API server, a checkpoint file and folders."""

import base64
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from device_plugin import driver, plugin
from device_plugin.cards import Cards
from device_plugin.cri import Runtime, sockets
from device_plugin.enforcement import Enforcement
from device_plugin.exporter import Exporter
from device_plugin.foreign import TURNS, Observed, Process, process_of
from device_plugin.granting import Granting, Places
from device_plugin.holdings import Holdings
from device_plugin.identity import Identity
from device_plugin.lending import Lending
from device_plugin.pod_events import Consequences
from device_plugin.pods import Pods
from device_plugin.sandbox import Sandboxes
from device_plugin.selinux import Labels
from device_plugin.starts import Starts
from device_plugin.sweep import Sweep
from device_plugin.watch import Watch
from scheduler.cluster import ClusterState
from scheduler.feed import Feed
from scheduler.moves import Moves
from vgpu import allocation, names, tier
from vgpu.allocation import Allocation
from vgpu.config import Config, decode
from vgpu.devices import Gpu, GpuSlice, Inventory, encode_inventory
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kubelet import checkpoint
from vgpu.native import Limits, Region
from vgpu.standin.apiserver import ApiServer

NODE = "node-1"
A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
MIB = 1 << 20


class World:
    """`agent()` recreates the agent's parts, as a restart does; everything else stays."""

    def __init__(self, root: Path, strategy: str = "cdi", plugin: str = "", config: str = "") -> None:
        """`plugin`: more settings of devicePlugin; `config`: more lines of the configuration."""
        self.root = root
        self.config: Config = decode(
            f"devicePlugin: {{deviceListStrategy: {strategy}, kubeletRoot: {root}/kubelet, {plugin}}}\n{config}\n"
            f"global: {{gpuHookPath: {root}/usr}}"
        )
        (root / "kubelet" / "device-plugins").mkdir(parents=True)
        (root / "built" / "simulator").mkdir(parents=True)
        (root / "built" / "libvgpu.so").write_bytes(b"the library")
        (root / "built" / "simulator" / "libcuda.so.1").write_bytes(b"a driver")
        self.api = ApiServer()
        self.api.start()
        self.api.write_kubeconfig(root / "kubeconfig")
        self.client = KubeClient.connect(root / "kubeconfig")
        self.client.request("POST", "/api/v1/nodes", body={"metadata": {"name": NODE}})
        gpus = tuple(
            Gpu(uuid=uuid, index=index, model="Tesla T4", memory=15360, physical=15360)
            for index, uuid in enumerate((A, B))
        )
        self.cards = Cards(Inventory(devices=gpus), tier.wanted(self.config))
        self.places = Places(
            cdi=root / "cdi",
            library=root / "usr" / "vgpu",
            built_library=root / "built" / "libvgpu.so",
            built_simulator=root / "built" / "simulator",
            simulator_state=root / "run" / "simulator",
            driver_at=driver.Place(root / "host"),
        )
        self.observed: list[Observed] = []  # processes on cards, as NVML reports them
        self.who: Callable[[int], Process | None] = process_of
        self._entries: list[checkpoint.Entry] = []
        self._pods: list[Pods] = []
        self._schedulers: list[Feed | Moves] = []
        self.agent()

    def agent(self) -> None:
        self.pods = Pods(self.client, NODE)
        self._pods.append(self.pods)
        self.pods.start()
        runtime = Runtime(sockets(self.root / "host"))
        self.identity = Identity(self.root / "kubelet", self.config.resource_name, runtime)
        labels = Labels(self.root / "host")
        self.sandboxes = Sandboxes(self.root / "run", labels, proc=self.root / "proc")
        self.holdings = Holdings(self.pods, self.sandboxes)
        self.consequences = Consequences(self.client, NODE)
        self.watch = Watch(
            self.cards,
            self.pods,
            self.consequences,
            evict=self.config.device_plugin.backstop == "evict",
            look=lambda: list(self.observed),
            who=lambda pid: self.who(pid),
            strangers=self.holdings.strangers,
        )
        for _ in range(TURNS):  # the watch has seen enough to report
            self.watch.once({}, lambda _: None)
        self.lending = Lending(self.cards, self.sandboxes, self.holdings, self.watch)
        self.granting = Granting(
            self.config, self.cards, self.sandboxes, self.holdings, self.places, self.consequences, labels, self.lending
        )
        self.exporter = Exporter(NODE)
        self.enforcement = Enforcement(
            self.config.device_plugin.deviceListStrategy,
            runtime,
            self.root / "host",
            self.places.cdi,
            self.client,
            NODE,
            tell=self.consequences.node,
            show=self.exporter.show_unsafe,
            driver=lambda strategy: (
                "" if self.places.simulator_state else driver.shortage(self.places.driver_at, strategy)
            ),
        )
        self.starts = Starts(
            self.config,
            self.cards,
            self.pods,
            self.identity,
            self.granting,
            self.consequences,
            mode=lambda: self.enforcement.current,
        )
        self.sweep = Sweep(
            self.cards,
            self.pods,
            self.sandboxes,
            self.holdings,
            self.identity,
            self.exporter,
            places=self.places,
            current=lambda: self.granting.rollout.sources(),
            watch=self.watch,
            lending=self.lending,
        )

    def scheduler(self) -> None:
        """From now on the scheduler moves the records of pods that ask for it."""
        cards = {names.DEVICES: encode_inventory(self.cards.inventory)}
        writes.patch_node(self.client, NODE, annotations=cards)
        state = ClusterState()
        feed = Feed(self.client, state, names.SCHEDULER_NAME, reconcile_seconds=3600)
        moves = Moves(self.client, state, lambda: feed.ready)
        self._schedulers += [feed, moves]
        feed.start()
        moves.start()

    def close(self) -> None:
        for part in self._schedulers:
            part.stop()
        self.consequences.stop()
        self.api.stop()
        for pods in self._pods:
            pods.stop()

    def pod(
        self,
        name: str,
        slices: Mapping[str, Sequence[GpuSlice]] | None,
        *,
        init: Sequence[str] = (),
        sidecars: Sequence[str] = (),
        owner: str = "",
        annotations: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        limits: Mapping[str, str] | None = None,
        restart: str = "Always",
    ) -> str:
        """A bound pod with one container for each entry of `slices` (None: one container, no allocation); its UID."""
        variables = [{"name": name, "value": value} for name, value in (env or {}).items()]
        containers = [
            {
                "name": each,
                "env": variables,
                "resources": {"limits": {names.RESOURCE_GPU: str(len(given) or 1), **(limits or {})}},
            }
            for each, given in (slices or {"main": ()}).items()
        ]
        meta: dict[str, Any] = {"name": name, "annotations": dict(annotations or {})}
        if slices is not None:
            record = Allocation({each: tuple(given) for each, given in slices.items()})
            meta["annotations"][names.ALLOCATION] = allocation.encode(record)
        if owner:
            made_by = {"kind": owner, "name": owner, "uid": f"uid-of-{owner}", "apiVersion": "v1", "controller": True}
            meta["ownerReferences"] = [made_by]
        body = {
            "metadata": meta,
            "spec": {
                "nodeName": NODE,
                "restartPolicy": restart,
                "schedulerName": names.SCHEDULER_NAME,
                "containers": [c for c in containers if c["name"] not in (*init, *sidecars)],
                "initContainers": [
                    {**c, **({"restartPolicy": "Always"} if c["name"] in sidecars else {})}
                    for c in containers
                    if c["name"] in (*init, *sidecars)
                ],
            },
        }
        made = msgspec.json.decode(self.client.request("POST", "/api/v1/namespaces/default/pods", body=body))
        return str(made["metadata"]["uid"])

    def read_pod(self, name: str, namespace: str = "default") -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = msgspec.json.decode(self.client.get(f"/api/v1/namespaces/{namespace}/pods/{name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        return found

    def delete_pod(self, name: str, namespace: str = "default") -> None:
        self.client.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", body={"gracePeriodSeconds": 0})

    def finish_pod(self, name: str) -> None:
        self.client.request(
            "PATCH",
            f"/api/v1/namespaces/default/pods/{name}/status",
            body={"status": {"phase": "Succeeded"}},
            content_type="application/merge-patch+json",
        )

    def process(self, uid: str, pid: int) -> None:
        """Adds a process whose cgroup names this pod."""
        file = self.root / "proc" / str(pid) / "cgroup"
        file.parent.mkdir(parents=True)
        file.write_text(f"0::/kubepods/burstable/pod{uid}/0123abc\n")

    def end_process(self, pid: int) -> None:
        shutil.rmtree(self.root / "proc" / str(pid))

    def allocate(self, uid: str, container: str, device_ids: Sequence[str]) -> str:
        """Does what the kubelet does at admission: Allocate, then its checkpoint.

        Returns the CDI name, if there was one.
        """
        answer = self.starts.answer(device_ids)
        response = plugin.response(answer)
        encoded = base64.b64encode(response.SerializeToString()).decode()
        self._entries.append(
            checkpoint.Entry(uid, container, names.RESOURCE_GPU, {checkpoint.NO_NUMA: list(device_ids)}, encoded)
        )
        self.write_checkpoint()
        return answer.cdi_names[0] if answer.cdi_names else ""

    def forget(self, uid: str) -> None:
        """Does what the kubelet does with the ids of a deleted pod."""
        self._entries = [entry for entry in self._entries if entry.PodUID != uid]
        self.write_checkpoint()

    def write_checkpoint(self) -> None:
        path = self.root / "kubelet" / "device-plugins" / checkpoint.FILE_NAME
        checkpoint.write(path, checkpoint.Checkpoint(self._entries))

    def limits(self, uid: str, container: str = "main") -> Limits:
        with Region.open(self.sandboxes.directory(uid, container)) as region:
            return region.limits()

    def events(self, namespace: str = "default") -> list[dict[str, Any]]:
        found = msgspec.json.decode(self.client.get(f"/api/v1/namespaces/{namespace}/events"))
        return list(found["items"])


MakeWorld = Callable[..., World]


@contextmanager
def worlds() -> Iterator[MakeWorld]:
    """Makes worlds with the arguments of World, in folders short enough for sockets; all end with the block."""
    made: list[World] = []
    folders: list[str] = []

    def one(strategy: str = "cdi", **settings: str) -> World:
        folders.append(tempfile.mkdtemp(prefix="vgpu", dir="/tmp"))
        made.append(World(Path(folders[-1]), strategy, **settings))
        return made[-1]

    try:
        yield one
    finally:
        for world in made:
            world.close()
        for folder in folders:
            shutil.rmtree(folder)


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Polls until `condition()` is true and returns it; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.02)
    return found
