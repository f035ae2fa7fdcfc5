"""The demo: the pods of examples/ from admission to limited processes, on simulated cards."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from vgpu import config as configuration
from vgpu import names
from vgpu.allocation import Kind, decode
from vgpu.devices import GpuSlice, decode_inventory
from vgpu.kube.client import ApiError
from vgpu.native import simulator
from vgpu.resources import GpuRequest, containers_of, read_container
from vgpu.standin.cluster import LocalCluster

MIB = 1024**2
CORE_TOLERANCE = 2.0  #: points
RUN_SECONDS = 45.0
FINISHED = ("Succeeded", "Failed")  #: phases of a pod that has ended


class Finding(msgspec.Struct):
    """What one container saw of its card, next to what it was promised."""

    pod: str
    container: str
    card: str  #: "0 NVIDIA T4"
    slice_: GpuSlice
    cuda_total: int | None = None  #: bytes, cuMemGetInfo
    nvml_total: int | None = None  #: bytes, nvidia-ml-py
    exact: str = ""  #: result of an allocation of exactly the rest of the slice
    over: str = ""  #: result of one more allocation
    core_share: float | None = None  #: % of the card's time by the simulator's truth
    data: str = ""  #: whether its blocks contain what was written into them
    problems: list[str] = []


class DemoResult(msgspec.Struct):
    findings: list[Finding] = []
    problems: list[str] = []
    metrics: list[str] = []
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return bool(self.findings) and not self.problems and not any(f.problems for f in self.findings)


def read_pods(folder: Path) -> list[dict[str, Any]]:
    """The pods of a folder's YAML files in name order; raises ValueError naming a file without a pod."""
    found = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml")):
        try:
            documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {error}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        for document in documents:
            if not isinstance(document, dict) or document.get("kind") != "Pod":
                raise ValueError(f"{path}: the demo runs objects of kind Pod only")
            for part in ("metadata", "spec"):
                if not isinstance(document.get(part), dict):
                    raise ValueError(f"{path}: {part} must be a mapping")
            policy = document["spec"].get("restartPolicy", "Always")
            if policy not in ("Never", "OnFailure"):
                default = "" if "restartPolicy" in document["spec"] else ", which is the default"
                raise ValueError(
                    f"{path}: spec.restartPolicy is {policy}{default}: the pod would start again whenever it ends, and "
                    "the demo waits for its end: write Never or OnFailure"
                )
            found.append(document)
    if not found:
        raise ValueError(f"{folder}: no *.yaml or *.yml with a pod")
    return found


def unschedulable(pod: Mapping[str, Any]) -> str:
    """Why no node takes the pod; empty when a node does."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((str(one.get("message", "")) for one in conditions if one.get("reason") == "Unschedulable"), "")


def unfinished(pod: Mapping[str, Any]) -> str:
    """Why a pod without a message has not succeeded, from the state of its containers."""
    status = pod.get("status") or {}
    found = []
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        state, last = one.get("state") or {}, (one.get("lastState") or {}).get("terminated") or {}
        ended = state.get("terminated") or {}
        code = (ended or last).get("exitCode")
        if waiting := state.get("waiting"):
            words = [waiting.get("reason", "waits"), waiting.get("message", ""), code and f"it ended with {code}"]
            found.append(f"{one.get('name')}: {', '.join(str(word) for word in words if word)}")
        elif "running" in state:
            found.append(f"{one.get('name')} still runs; the demo waits {RUN_SECONDS:.0f} s for its end")
        elif code:
            found.append(f"{one.get('name')} ended with {code}")
    if not found and status.get("phase") == "Pending":
        return f"none of its containers started within {RUN_SECONDS:.0f} s"
    return "; ".join(found) or "the cluster reports no reason"


def reports(log: str) -> list[dict[str, Any]]:
    """The JSON objects that `vgpu probe` printed, one per line."""
    found = []
    for line in log.splitlines():
        if line.startswith("{"):
            try:
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                continue
    return found


class Demo:
    """Runs `pods` on a started cluster and compares what they see with what they asked for."""

    def __init__(self, cluster: LocalCluster, pods: list[dict[str, Any]]) -> None:
        self.cluster = cluster
        self.pods = pods
        self.result = DemoResult()
        inventory = decode_inventory(cluster.node()["metadata"]["annotations"][names.DEVICES])
        self._cards = {gpu.uuid: gpu for gpu in inventory.devices}
        self._rules = configuration.rules(cluster.config)

    def run(self, progress: Callable[[str], None]) -> DemoResult:
        begin = time.monotonic()
        for pod in self.pods:
            try:
                self.cluster.create(pod)
            except ApiError as error:
                name = pod["metadata"].get("name", "without a name")
                self.result.problems.append(f"the API server refused pod {name}: {error.message}")
        deadline = begin + RUN_SECONDS
        while time.monotonic() < deadline:
            pods = self.cluster.pods()
            self._keep_metrics()
            phases = [(pod.get("status") or {}).get("phase", "Pending") for pod in pods]
            progress(", ".join(f"{phases.count(p)} {p.lower()}" for p in dict.fromkeys(sorted(phases))))
            if all(phase in FINISHED or unschedulable(pod) for pod, phase in zip(pods, phases, strict=True)):
                break
            time.sleep(0.2)
        for pod in self.cluster.pods():
            self._judge(pod)
        if not self.result.findings and not self.result.problems:
            gpu = self._rules.names.gpu
            self.result.problems.append(f"no container of these pods asks for {gpu}: nothing to compare")
        self.result.seconds = time.monotonic() - begin
        return self.result

    def _keep_metrics(self) -> None:
        """Keeps the scrape with most containers, and of several such scrapes the one with most memory in use."""
        lines = [line for line in self.cluster.metrics().splitlines() if line.startswith("vgpu_container_")]
        if lines and _shows(lines) >= _shows(self.result.metrics):
            self.result.metrics = lines

    def _judge(self, pod: dict[str, Any]) -> None:
        meta, status = pod["metadata"], pod.get("status") or {}
        name = meta["name"]
        if status.get("phase") != "Succeeded":
            detail = unschedulable(pod) or status.get("message") or status.get("reason") or unfinished(pod)
            self.result.problems.append(f"pod {name} is {status.get('phase', 'Pending')}: {detail}")
        if (meta.get("labels") or {}).get(names.LABEL_MANAGED) != "true" or not pod["spec"].get("nodeName"):
            return
        record = (meta.get("annotations") or {}).get(names.ALLOCATION)
        if record is None:
            self.result.problems.append(f"pod {name} has no allocation")
            return
        allocation = decode(record)
        for path, kind, container in containers_of(pod["spec"]):
            asked = read_container(path, container, self._rules)
            slices = allocation.containers.get(container["name"], ())
            if asked is None:
                continue
            if len(slices) != asked.count:
                self.result.problems.append(f"pod {name}: {container['name']} has {len(slices)} of {asked.count} cards")
            report = reports(self.cluster.log(pod, container["name"]))
            seen = {card["uuid"]: card for card in report[-1]["cards"]} if report else {}
            if report and set(seen) != {piece.uuid for piece in slices}:
                self.result.problems.append(f"pod {name}: {container['name']} sees other cards than its slices")
            for piece in slices:
                self.result.findings.append(self._finding(name, container, kind, asked, piece, seen.get(piece.uuid)))

    def _finding(
        self,
        pod: str,
        container: Mapping[str, Any],
        kind: Kind,
        asked: GpuRequest,
        piece: GpuSlice,
        seen: dict[str, Any] | None,
    ) -> Finding:
        gpu = self._cards[piece.uuid]
        label = container["name"] if kind is Kind.APP else f"{container['name']} ({kind})"
        found = Finding(pod, label, f"{gpu.index} {gpu.model}", piece)
        if piece.mem != asked.memory_on(gpu.physical_memory):
            found.problems.append(f"slice of {piece.mem} MiB, asked {asked.memory_on(gpu.physical_memory)}")
        if seen is None:
            found.problems.append("printed no report")
            return found
        found.cuda_total, found.nvml_total = seen["cuda_total"], seen["nvml_total"]
        found.exact, found.over = seen.get("fill") or "", seen.get("over") or ""
        found.core_share, found.data = seen.get("core_share"), seen.get("data") or ""
        if found.data not in ("", "right"):
            found.problems.append(f"the container read other data than it wrote: {found.data}")
        for what, total in (("cuMemGetInfo", found.cuda_total), ("NVML", found.nvml_total)):
            if total != piece.mem * MIB:
                found.problems.append(f"{what} reports {total} bytes, the slice has {piece.mem * MIB}")
        if seen["cuda_total"] - seen["cuda_free"] != gpu.context:
            free = seen["cuda_free"]
            found.problems.append(
                f"{free} bytes are free next to its context of {gpu.context} bytes; the slice has more"
            )
        if found.exact and found.exact != "CUDA_SUCCESS":
            found.problems.append(f"an allocation of exactly the rest of the slice returned {found.exact}")
        if found.over and found.over != "CUDA_ERROR_OUT_OF_MEMORY":
            found.problems.append(f"an allocation above the slice returned {found.over}")
        if found.core_share is not None and piece.cores and abs(found.core_share - piece.cores) > CORE_TOLERANCE:
            found.problems.append(f"core share {found.core_share:.1f} %, promised {piece.cores} ± {CORE_TOLERANCE:g}")
        return found


def _shows(lines: list[str]) -> tuple[int, float]:
    """Number of series, and the bytes in use."""
    used = (line.rsplit(" ", 1)[1] for line in lines if line.startswith("vgpu_container_memory_used_bytes{"))
    return len(lines), sum(map(float, used))


def truth_lines(directory: Path) -> list[str]:
    """What the simulator itself reports about its cards, independent of every ledger."""
    return [
        f"{card.uuid}  {card.model}  in use {card.used // MIB} MiB, peak {card.peak // MIB} of "
        f"{card.memory // MIB} MiB, busy {card.busy_ns / 1e9:.2f} s"
        for card in simulator.cards(directory)
    ]
