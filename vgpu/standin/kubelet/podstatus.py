"""The status that a kubelet reports for a pod, computed from the state of its containers. Pure."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from vgpu.allocation import Kind
from vgpu.standin.kubelet.containers import Process

Json = dict[str, Any]


@dataclass
class Run:
    """One container of a pod over all its restarts."""

    spec: Json
    kind: Kind
    process: Process | None = None
    exit_code: int | None = None  #: of the last run; None: no run has ended
    restarts: int = 0
    started: float = 0.0  #: seconds since the epoch
    ended: float = 0.0
    waiting: tuple[str, str] = ("ContainerCreating", "")  #: (reason, message) while the container is not running
    not_before: float = 0.0  #: monotonic time of the next start
    failures: int = 0  #: failed starts in a row
    restarting: bool = False  #: the container has ended and will be started again
    terminating: bool = False  #: the container was asked to end
    last: Json = field(default_factory=dict)  #: lastState

    @property
    def name(self) -> str:
        name: str = self.spec["name"]
        return name

    @property
    def running(self) -> bool:
        return self.process is not None


def stamp(seconds: float | None = None) -> str:
    """RFC 3339 as the API server writes it."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def terminated(run: Run) -> Json:
    """State of a container that has ended."""
    reason = "Completed" if run.exit_code == 0 else "Error"
    times = {"startedAt": stamp(run.started), "finishedAt": stamp(run.ended)}
    return {"terminated": {"exitCode": run.exit_code, "reason": reason, **times}}


def _container(run: Run, *, final: bool) -> Json:
    if run.running:
        state: Json = {"running": {"startedAt": stamp(run.started)}}
    elif run.exit_code is not None and (final or not run.restarting):
        state = terminated(run)
    else:
        reason, message = run.waiting
        state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    done = run.kind is Kind.INIT and run.exit_code == 0
    return {
        "name": run.name,
        "image": run.spec.get("image", ""),
        "imageID": "",
        "ready": run.running if run.kind is not Kind.INIT else done,
        "started": run.running,
        "restartCount": run.restarts,
        "state": state,
        "lastState": run.last,
        **({"containerID": f"process://{run.process.pid}"} if run.process is not None else {}),
    }


def _condition(type_: str, holds: bool, before: Sequence[Json]) -> Json:
    status = "True" if holds else "False"
    old: Json = next((one for one in before if one.get("type") == type_), {})
    since = old.get("lastTransitionTime") if old.get("status") == status else stamp()
    return {"type": type_, "status": status, "lastTransitionTime": since}


def pod_status(runs: Sequence[Run], phase: str, before: Mapping[str, Any], *, final: bool) -> Json:
    """The status as a merge patch.

    `before`: the pod's status so far; `final`: no container will be started any more.
    """
    conditions: list[Json] = list(before.get("conditions") or ())
    first = [run for run in runs if run.kind is not Kind.APP]
    apps = [run for run in runs if run.kind is Kind.APP]
    initialized = all(run.exit_code == 0 if run.kind is Kind.INIT else run.started for run in first)
    ready = phase == "Running" and all(run.running for run in runs if run.kind is not Kind.INIT)
    kept = [one for one in conditions if one.get("type") not in ("Initialized", "Ready", "ContainersReady")]
    told = (("Initialized", initialized), ("Ready", ready), ("ContainersReady", ready))
    return {
        "phase": phase,
        "conditions": kept + [_condition(type_, holds, conditions) for type_, holds in told],
        "initContainerStatuses": [_container(run, final=final) for run in first],
        "containerStatuses": [_container(run, final=final) for run in apps],
        "hostIP": "127.0.0.1",
        "podIP": "127.0.0.1",
        "startTime": before.get("startTime") or stamp(),
    }
