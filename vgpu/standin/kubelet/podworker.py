"""Runs one pod: init containers in order, sidecars, apps, restarts, termination. One thread per pod."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from vgpu.allocation import Kind
from vgpu.kube import writes
from vgpu.kube.client import MERGE_PATCH, ApiError, KubeClient
from vgpu.standin.kubelet import containers, podstatus
from vgpu.standin.kubelet.containers import CreateError
from vgpu.standin.kubelet.devicemanager import DeviceManager
from vgpu.standin.kubelet.pluginclient import PluginError
from vgpu.standin.kubelet.podstatus import Run

log = logging.getLogger(__name__)

Pod = dict[str, Any]

START_BACK_OFF: Final = (0.2, 2.0)  #: seconds between attempts to create a container (10 s in a real kubelet)
CRASH_BACK_OFF: Final = (0.5, 10.0)  #: seconds before the second and later restarts (10 s to 5 min in a real kubelet)
WRITE_RETRY: Final = 0.3  #: seconds between attempts to write the status while the API server is away
IDLE: Final = 60.0


class Host(Protocol):
    """What a worker needs from its kubelet."""

    client: KubeClient
    node_name: str
    root: Path
    cdi_dir: Path

    @property
    def devices(self) -> DeviceManager: ...


def _phase_after(runs: list[Run]) -> str:
    return "Succeeded" if all(run.exit_code == 0 for run in runs if run.kind is Kind.APP) else "Failed"


class PodWorker:
    """Runs one pod; `on_end` is called once, when the pod has ended and is gone from the API server."""

    def __init__(self, host: Host, pod: Pod, on_end: "Callable[[PodWorker], None]") -> None:
        self.pod = pod
        self.finished = False  #: phase Succeeded or Failed: the pod's devices are free
        self._host = host
        self._on_end = on_end
        self._wake = threading.Event()
        self._forced = False
        self._abandoned = False
        self._status: Mapping[str, Any] = pod.get("status") or {}
        self._written: dict[str, Any] = {}
        self._final: dict[str, str] = {}  # phase, reason and message of a pod that has ended
        self._kill_at: float | None = None
        spec = pod["spec"]
        self._runs = [
            Run(one, Kind.SIDECAR if one.get("restartPolicy") == "Always" else Kind.INIT)
            for one in spec.get("initContainers") or ()
        ] + [Run(one, Kind.APP) for one in spec["containers"]]
        self._thread = threading.Thread(target=self._run, name=f"pod {pod['metadata']['name']}", daemon=True)

    @property
    def uid(self) -> str:
        uid: str = self.pod["metadata"]["uid"]
        return uid

    def start(self) -> None:
        self._thread.start()

    def update(self, pod: Pod) -> None:
        """Takes over the pod as the API server has it now."""
        self.pod = pod
        self._wake.set()

    def vanished(self) -> None:
        """The pod was removed from the API server: running containers are killed."""
        self._forced = True
        self._wake.set()

    def reject(self, reason: str, message: str) -> None:
        """The pod cannot stay here: it becomes Failed, and its containers are ended."""
        self._final = {"phase": "Failed", "reason": reason, "message": message}
        self.finished = True
        self._wake.set()

    def abandon(self) -> None:
        """The machine is switched off: all containers are killed, no status is written."""
        self._abandoned = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            delay = self._step()
            if delay is None:
                break
            self._wake.wait(delay)
        self._on_end(self)

    def _step(self) -> float | None:
        """One look at everything; returns seconds until the next look, None at the end."""
        self._collect()
        deleted = self.pod["metadata"].get("deletionTimestamp") is not None
        if self._abandoned or self._forced:
            return None if self._stop(0) else IDLE
        if deleted:
            if not self._stop(self.pod["metadata"].get("deletionGracePeriodSeconds") or 0):
                return self._until_kill()
            self._final = self._final or {"phase": _phase_after(self._runs)}
            return None if self._publish() and self._confirm_deletion() else WRITE_RETRY
        if self._final:
            self._stop(self._grace())
        else:
            self._start_due()
        if not self._publish():
            return WRITE_RETRY
        if self._kill_at is not None:
            return self._until_kill()
        if self._final:
            return IDLE
        waits = [run.not_before - time.monotonic() for run in self._runs if not run.running and run.not_before]
        return max(0.01, min(waits, default=IDLE))

    def _grace(self) -> int:
        return int(self.pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _collect(self) -> None:
        """Records containers that have ended."""
        for run in self._runs:
            if run.process is not None and run.process.exit_code is not None:
                run.exit_code, run.ended, run.process = run.process.exit_code, time.time(), None

    def _start_due(self) -> None:
        policy = self.pod["spec"].get("restartPolicy", "Always")
        for run in self._runs:
            if run.kind is Kind.SIDECAR:
                self._ensure(run)
                if not run.started:
                    return
            elif run.kind is Kind.INIT and run.exit_code != 0:
                if run.exit_code is not None and not run.running and policy == "Never":
                    self._end("Failed")
                else:
                    self._ensure(run)
                return
            elif run.kind is Kind.APP and (
                run.exit_code is None or policy == "Always" or (policy == "OnFailure" and run.exit_code)
            ):
                self._ensure(run)
        apps = [run for run in self._runs if run.kind is Kind.APP]
        ended = all(not run.running and run.exit_code is not None for run in apps)
        if ended and (policy == "Never" or (policy == "OnFailure" and not any(run.exit_code for run in apps))):
            self._end(_phase_after(self._runs))

    def _end(self, phase: str) -> None:
        """The apps have ended: stops the sidecars, then gives the pod this phase."""
        if self._stop(self._grace()):
            self._final = {"phase": phase}

    def _ensure(self, run: Run) -> None:
        """Starts the container when it is not running and the time of its next start has come."""
        now = time.monotonic()
        if run.running or self._kill_at is not None:
            return
        if run.exit_code is not None and not run.restarting:
            run.last, run.restarting = podstatus.terminated(run), True
            first, longest = CRASH_BACK_OFF
            pause = min(first * 2 ** (run.restarts - 1), longest) if run.restarts else 0.0
            run.not_before = now + pause
            run.waiting = ("CrashLoopBackOff", f"back-off {pause:g}s restarting failed container={run.name}")
        if now < run.not_before:
            return
        try:
            self._create(run)
        except (CreateError, PluginError) as error:
            reason = error.reason if isinstance(error, CreateError) else "CreateContainerConfigError"
            run.waiting = (reason, str(error))
            first, longest = START_BACK_OFF
            run.not_before = time.monotonic() + min(first * 2**run.failures, longest)
            run.failures += 1
            self._tell("Failed", f"Error: {error}")

    def _create(self, run: Run) -> None:
        meta = self.pod["metadata"]
        self._host.devices.pre_start(self.uid, run.spec)
        scratch = self._host.root / "pods" / self.uid / run.name
        logs = self._host.root / "logs"
        scratch.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        responses = self._host.devices.responses(self.uid, run.name)
        what = containers.command(self.pod, run.spec, responses, self._host.cdi_dir, scratch)
        output = logs / f"{meta['namespace']}_{meta['name']}_{run.name}.log"
        run.process = containers.Process(what, output, self._wake.set)
        run.restarts += run.restarting
        run.started, run.exit_code, run.restarting = time.time(), None, False
        run.failures, run.not_before = 0, 0.0

    def _stop(self, grace: int) -> bool:
        """Ends all containers, sidecars after the others: SIGTERM, after `grace` seconds SIGKILL.

        True when no container runs.
        """
        alive = [run for run in self._runs if run.process is not None]
        if not alive:
            return True
        now = time.monotonic()
        if self._kill_at is None or now + grace < self._kill_at:
            self._kill_at = now + grace
        late = now >= self._kill_at
        others = [run for run in alive if run.kind is not Kind.SIDECAR]
        for run in alive if late else others or alive:
            assert run.process is not None
            if late:
                run.process.kill()
            elif not run.terminating:
                run.terminating = True
                run.process.terminate()
        return False

    def _until_kill(self) -> float:
        return max(0.05, (self._kill_at or 0.0) - time.monotonic())

    def _publish(self) -> bool:
        """Writes the status if it differs from the last written one; False: try again."""
        final = bool(self._final) and not any(run.running for run in self._runs)
        begun = all(run.started or run.exit_code is not None for run in self._runs)
        phase = self._final["phase"] if final else "Running" if begun else "Pending"
        status = podstatus.pod_status(self._runs, phase, self._status, final=final)
        if final:
            status |= self._final
            self.finished = True
        if status == self._written:
            return True
        if self._write("PATCH", "/status", {"metadata": {"uid": self.uid}, "status": status}):
            self._written = self._status = status
            return True
        return False

    def _confirm_deletion(self) -> bool:
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        return self._write("DELETE", "", body)

    def _write(self, method: str, subresource: str, body: object) -> bool:
        """Writes to the API server; False: try again. A pod that is gone or was replaced needs no write."""
        meta = self.pod["metadata"]
        path = writes.pod_path(meta["namespace"], meta["name"]) + subresource
        try:
            kind = MERGE_PATCH if method == "PATCH" else "application/json"
            self._host.client.request(method, path, body=body, content_type=kind)
        except ApiError as error:
            if error.status not in (404, 409):
                log.warning("%s %s: %s", method, path, error)
                return False
        return True

    def _tell(self, reason: str, message: str) -> None:
        meta = self.pod["metadata"]
        about = writes.pod_reference(meta["namespace"], meta["name"], meta["uid"])
        writes.emit_event(self._host.client, about, reason, message, reporting="kubelet", host=self._host.node_name)
