"""The storm: many pods while agent and scheduler are killed at random.

No slice may be given twice, and every pod must finish. When the kubelet refuses a pod because the agent is away at that
moment, the storm recreates the pod, as a Job does.
"""

import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from vgpu import names
from vgpu.allocation import Held, Kind, decode, held, merge
from vgpu.devices import decode_inventory
from vgpu.kube.client import ApiError
from vgpu.kube.writes import delete_pod
from vgpu.native import simulator
from vgpu.resources import containers_of
from vgpu.standin.cluster import LocalCluster
from vgpu.standin.demo import FINISHED, reports

BLOCK: Final = 64  #: MiB, of pods that have more memory than their cards
JOB_LABEL = "batch.kubernetes.io/job-name"


class StormResult(msgspec.Struct):
    pods: int = 0
    succeeded: int = 0
    replaced: int = 0  #: pods that the kubelet refused while the agent was away, and that were recreated
    failed: list[str] = []
    unfinished: list[str] = []
    kills: dict[str, int] = {}
    samples: int = 0
    peak_mib: dict[str, int] = {}  #: card → largest sum of live allocations seen in the API server
    peak_bytes: dict[str, int] = {}  #: card → largest use that the simulator has seen
    violations: list[str] = []
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.violations and self.succeeded == self.pods


def occupied(pod: dict[str, Any]) -> dict[str, Held]:
    """What a pod holds on the cards by its record; nothing before its bind and after its end."""
    record = (pod["metadata"].get("annotations") or {}).get(names.ALLOCATION)
    if record is None or (pod.get("status") or {}).get("phase") in FINISHED:
        return {}
    slices = decode(record).containers
    kinds: list[tuple[str, Kind]] = [(c["name"], kind) for _, kind, c in containers_of(pod["spec"])]
    return held((kind, slices.get(name, ())) for name, kind in kinds)


def refused(pod: dict[str, Any]) -> bool:
    """The kubelet did not admit the pod: it never ran, and only its controller makes another pod."""
    status = pod.get("status") or {}
    reason = status.get("reason") or ""
    return status.get("phase") == "Failed" and (reason == "UnexpectedAdmissionError" or reason.startswith("OutOf"))


def storm_pod(chance: random.Random, *, fill: Sequence[str] = ("--fill",)) -> dict[str, Any]:
    """A pod that fills its slice, holds it for a moment and ends; `fill`: the probe's options for that."""
    memory = chance.choice((2000, 3000, 5000, 7000))
    hold = chance.uniform(0.2, 1.0)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            "restartPolicy": "OnFailure",
            "containers": [
                {
                    "name": "main",
                    "image": "vgpu/probe:0.1",
                    "command": ["python3", "-m", "vgpu.probe", *fill, "--over", "--hold", f"{hold:.2f}"],
                    "resources": {
                        "limits": {
                            names.RESOURCE_GPU: 1,
                            names.RESOURCE_MEMORY: memory,
                            names.RESOURCE_CORES: chance.choice((0, 10, 20)),
                        }
                    },
                }
            ],
        },
    }


class Storm:
    """Runs `pods` pods on a running cluster, with `kills` × kill -9 of a part chosen at random."""

    def __init__(self, cluster: LocalCluster, *, pods: int, kills: int, seed: int, deadline: float = 240.0) -> None:
        self.cluster = cluster
        self.pods = pods
        self.kills = kills
        self.deadline = deadline
        self.chance = random.Random(seed)
        self.result = StormResult(pods=pods, kills={"agent": 0, "scheduler": 0})
        self._stop = threading.Event()
        self._manifests: dict[str, dict[str, Any]] = {}
        inventory = cluster.node()["metadata"]["annotations"][names.DEVICES]
        self._cards = {gpu.uuid: gpu for gpu in decode_inventory(inventory).devices}
        # A block is on one side only, and only all blocks together are larger than what is on the card.
        scaled = any(gpu.memory > gpu.physical_memory for gpu in self._cards.values())
        self._fill = ("--blocks", str(BLOCK)) if scaled else ("--fill",)

    def run(self, progress: Callable[[StormResult], None]) -> StormResult:
        """Returns when every pod has finished and every kill was done, or after the deadline."""
        begin = time.monotonic()
        threads = [
            threading.Thread(target=work, daemon=True)
            for work in (self._submit, self._replace_refused, self._watch, self._kill)
        ]
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() - begin < self.deadline:
                self._count()
                progress(self.result)
                done = self.result.succeeded + len(self.result.failed) == self.pods
                if done and sum(self.result.kills.values()) >= self.kills:
                    break
                time.sleep(0.2)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(15)
        self._count()
        self._read_reports()
        for card in simulator.cards(self.cluster.simulator_dir):
            self.result.peak_bytes[card.uuid] = card.peak
            if card.peak > card.memory:
                self.result.violations.append(f"card {card.uuid} held {card.peak} of {card.memory} bytes")
        self.result.seconds = time.monotonic() - begin
        return self.result

    def _submit(self) -> None:
        """Creates the pods.

        While the webhook is down, the API server refuses them (failurePolicy Fail), and the storm tries again.
        """
        for number in range(self.pods):
            manifest = storm_pod(self.chance, fill=self._fill)
            job = f"storm-{number:03d}"
            self._manifests[job] = manifest
            self._create(manifest, job)

    def _create(self, manifest: dict[str, Any], name: str) -> None:
        pod = copy.deepcopy(manifest)
        pod["metadata"] = {"name": name, "labels": {JOB_LABEL: name[: len("storm-000")]}}
        while not self._stop.is_set():
            try:
                self.cluster.create(pod)
                return
            except ApiError as error:
                if error.status == 409:
                    return
                self._stop.wait(0.2)

    def _replace_refused(self) -> None:
        """Does what a Job does with a pod that failed before it ran."""
        while not self._stop.wait(0.3):
            for pod in self.cluster.pods():
                meta = pod["metadata"]
                if refused(pod):
                    self.result.replaced += 1
                    delete_pod(self.cluster.client, meta["namespace"], meta["name"], meta["uid"])
                    job = meta["labels"][JOB_LABEL]
                    self._create(self._manifests[job], f"{job}-{self.result.replaced}")

    def _kill(self) -> None:
        chance = random.Random(self.chance.random())
        parts = (self.cluster.agent, self.cluster.scheduler)
        while sum(self.result.kills.values()) < self.kills and not self._stop.wait(chance.uniform(0.2, 1.5)):
            part = chance.choice(parts)
            if part.kill():
                self.result.kills[part.name] += 1

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            total: dict[str, Held] = {}
            for pod in self.cluster.pods():
                total = merge(total, occupied(pod))
            self.result.samples += 1
            for uuid, sum_ in total.items():
                self.result.peak_mib[uuid] = max(self.result.peak_mib.get(uuid, 0), sum_.mem)
                card = self._cards[uuid]
                if sum_.mem > card.memory or sum_.cores > card.cores or sum_.slots > card.slots:
                    self.result.violations.append(f"pods hold more than card {uuid} has: {sum_}")

    def _read_reports(self) -> None:
        """Checks that every pod got its slice to the last byte, and no byte more."""
        for pod in self.cluster.pods():
            name = pod["metadata"]["name"]
            if refused(pod) or (pod.get("status") or {}).get("phase") != "Succeeded":
                continue
            cards = [card for report in reports(self.cluster.log(pod, "main")) for card in report["cards"]]
            if not cards:
                self.result.violations.append(f"pod {name} printed no report")
            for card in cards:
                got = (card.get("fill"), card.get("over"))
                taken = card["cuda_total"] - card["cuda_free"]
                if taken != self._cards[card["uuid"]].context:
                    self.result.violations.append(f"pod {name}: {taken} bytes of its slice were missing")
                if card.get("data") not in (None, "right"):
                    self.result.violations.append(f"pod {name}: it read other data than it wrote: {card['data']}")
                if got != ("CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY"):
                    self.result.violations.append(
                        f"pod {name}: the rest of the slice returned {got[0]}, one byte more returned {got[1]}"
                    )

    def _count(self) -> None:
        pods = [pod for pod in self.cluster.pods() if not refused(pod)]
        phases = {pod["metadata"]["name"]: (pod.get("status") or {}).get("phase", "Pending") for pod in pods}
        self.result.succeeded = sum(phase == "Succeeded" for phase in phases.values())
        self.result.failed = sorted(name for name, phase in phases.items() if phase == "Failed")
        self.result.unfinished = sorted(name for name, phase in phases.items() if phase not in FINISHED)
