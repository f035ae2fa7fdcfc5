"""What this node's pods hold on its cards, from what was granted here and from what the scheduler recorded."""

from collections.abc import Collection, Mapping, Sequence

from device_plugin import grants
from device_plugin.pods import Pods, allocation_of
from device_plugin.refusal import Refusal
from device_plugin.sandbox import Sandboxes
from vgpu import allocation
from vgpu.allocation import Allocation, Held, Kind
from vgpu.devices import GpuSlice
from vgpu.kube.objects import Pod, kinds


class Holdings:
    """Thread-safe view; answers are by card UUID."""

    def __init__(self, pods: Pods, sandboxes: Sandboxes) -> None:
        self._pods = pods
        self._sandboxes = sandboxes
        # records of pods that another version started
        self._recorded: dict[str, Mapping[str, tuple[GpuSlice, ...]]] = {}

    def granted(self, without: Collection[str] = ()) -> dict[str, Held]:
        """What pods hold that have started here and may still run; `without`: UIDs of pods to leave out."""
        started = self._all_started()
        return grants.total(self._holds({uid: slices for uid, slices in started.items() if uid not in without}))

    def held(self) -> dict[str, Held]:
        """What all live pods hold, including pods that have an allocation and have not started yet."""
        started = self._all_started()
        waiting = [pod for pod in self._pods.all() if not pod.finished and pod.metadata.uid not in started]
        return grants.total([*self._holds(started), *(pod_holds(pod) for pod in waiting)])

    def pod(self, uid: str) -> Pod | None:
        """The pod as the API server knows it."""
        return self._pods.get(uid)

    def strangers(self) -> dict[str, dict[str, Held]]:
        """Pods (UID) with containers that another version has started, and what is counted for each pod, by card.

        Once all pods are known, pods that are unknown and for which nothing is counted are left out.
        """
        started, found = self._all_started(), {}
        for uid in self._sandboxes.strangers():
            (holds,) = self._holds({uid: started.get(uid, {})})
            if holds or self._pods.get(uid) is not None or not self._pods.synced:
                found[uid] = holds
        return found

    def _all_started(self) -> dict[str, dict[str, tuple[GpuSlice, ...]]]:
        """Pod UID → container → its slices.

        Where another version's limits cannot be read, the pod's record tells; for a pod that is gone, its last known
        record.
        """
        started = self._sandboxes.granted()
        for uid in self._sandboxes.strangers():
            known, pod = started.get(uid, {}), self._pods.get(uid)
            if pod is not None:
                self._recorded[uid] = _record(pod).containers
                started[uid] = known
            else:
                started[uid] = {**self._recorded.get(uid, {}), **known}
        return started

    def _holds(self, started: Mapping[str, Mapping[str, Sequence[GpuSlice]]]) -> list[dict[str, Held]]:
        """What each of these pods (uid → container → slices) holds."""
        pods = {uid: self._pods.get(uid) for uid in started}
        survivors = self._sandboxes.survivors(
            {(uid, container) for uid, pod in pods.items() if pod is None for container in started[uid]}
        )
        found = []
        for uid, pod in pods.items():
            slices = started[uid]
            if pod is not None and not pod.finished:
                found.append(pod_holds(pod, slices))
                continue
            living = [
                pieces
                for container, pieces in slices.items()
                if (uid, container) in survivors or (pod is not None and self._sandboxes.lives(uid, container))
            ]
            found.append(allocation.held((Kind.APP, pieces) for pieces in living))
        return found


def pod_holds(pod: Pod, granted: Mapping[str, Sequence[GpuSlice]] | None = None) -> dict[str, Held]:
    """What a pod occupies at its peak.

    For each container in `granted`, the grant counts instead of the pod's record.
    """
    record, done = _record(pod), granted or {}
    return allocation.held((kind, done[name] if name in done else record.of(name)) for name, kind in kinds(pod))


def _record(pod: Pod) -> Allocation:
    try:
        return allocation_of(pod) or Allocation({})
    except Refusal:
        return Allocation({})
