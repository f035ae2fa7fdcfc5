"""Which containers of a pod have come to their end before the pod does. Pure.

Their folders stay as long as the pod is there, and nothing that is shared is kept for them.
"""

from collections.abc import Collection

from vgpu.allocation import Kind
from vgpu.kube.objects import ContainerStatus, Pod, kinds

Key = tuple[str, str]  #: pod uid, container


class Course:
    """Remembers which containers this agent has started; not thread-safe."""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[Key, int] = {}  # the larger the later it was started
        self._before: dict[Key, str] = {}  # ids of the instances that were there when it was started again

    def starts(self, uid: str, container: str, pod: Pod | None) -> None:
        """A container is about to start, maybe once more: whatever is told of an instance before means nothing now."""
        self._turn += 1
        self._turns[uid, container] = self._turn
        status = _status(pod, container) if pod else None
        self._before[uid, container] = status.containerID if status else ""

    def ended(self, pod: Pod, container: str, granted: Collection[str]) -> bool:
        """A container without processes will not run again, as far as anybody can tell now.

        `granted`: those of its pod that have started here. An init container ends before a later one starts; one that
        starts once more (in a new sandbox) does so by another start. Of an application container its status tells.
        """
        order = kinds(pod)
        kind = dict(order).get(container)
        uid = pod.metadata.uid
        if kind is Kind.INIT:
            names = [name for name, _ in order]
            later = set(names[names.index(container) + 1 :]) & set(granted)
            return any(self._turns.get((uid, name), 0) >= self._turns.get((uid, container), 0) for name in later)
        status = _status(pod, container) if kind is Kind.APP else None
        if (
            status is None
            or status.state.terminated is None
            or status.containerID == self._before.get((uid, container))
        ):
            return False
        return not _restarts(pod, container, status.state.terminated.exitCode)

    def forget(self, living: Collection[str]) -> None:
        """Keeps what is known of these pods (UIDs) alone."""
        self._turns = {key: turn for key, turn in self._turns.items() if key[0] in living}
        self._before = {key: one for key, one in self._before.items() if key[0] in living}


def _status(pod: Pod, container: str) -> ContainerStatus | None:
    return next((one for one in pod.status.containerStatuses if one.name == container), None)


def _restarts(pod: Pod, container: str, exit_code: int) -> bool:
    """The kubelet may start it again after this exit code (Kubernetes API reference, Container.restartPolicy)."""
    if any(one.restartPolicyRules for one in (*pod.spec.initContainers, *pod.spec.containers)):
        return True  # rules name exit codes, and may restart the whole pod
    own = next((one.restartPolicy for one in pod.spec.containers if one.name == container), "")
    policy = own or pod.spec.restartPolicy
    return not (policy == "Never" or (policy == "OnFailure" and exit_code == 0))
