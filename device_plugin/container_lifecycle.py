"""Which containers of a pod have come to their end before the pod does. Pure.

The folders of such containers stay as long as the pod exists, but the agent keeps no shared resource for them.
"""

from collections.abc import Collection

from vgpu.allocation import Kind
from vgpu.kube.objects import ContainerStatus, Pod, kinds

Key = tuple[str, str]  #: pod uid, container


class Course:
    """Remembers which containers this agent has started; not thread-safe."""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[Key, int] = {}  # a larger number means a later start
        self._before: dict[Key, str] = {}  # ids of the instances that existed when the container was started again

    def starts(self, uid: str, container: str, pod: Pod | None) -> None:
        """A container is about to start, maybe not for the first time.

        Reports about its earlier instances do not count any more.
        """
        self._turn += 1
        self._turns[uid, container] = self._turn
        status = _status(pod, container) if pod else None
        self._before[uid, container] = status.containerID if status else ""

    def ended(self, pod: Pod, container: str, granted: Collection[str]) -> bool:
        """Whether a container without processes will not run again, as far as the agent can know now.

        `granted`: the containers of the pod that have started here. An init container has ended when a later one
        starts; when it runs once more (in a new sandbox), that is another start. For an application container, its
        status decides.
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
        """Keeps only what is known of these pods (UIDs)."""
        self._turns = {key: turn for key, turn in self._turns.items() if key[0] in living}
        self._before = {key: one for key, one in self._before.items() if key[0] in living}


def _status(pod: Pod, container: str) -> ContainerStatus | None:
    return next((one for one in pod.status.containerStatuses if one.name == container), None)


def _restarts(pod: Pod, container: str, exit_code: int) -> bool:
    """Whether the kubelet may start the container again after this exit code.

    Source: Kubernetes API reference, Container.restartPolicy.
    """
    if any(one.restartPolicyRules for one in (*pod.spec.initContainers, *pod.spec.containers)):
        return True  # rules name exit codes, and may restart the whole pod
    own = next((one.restartPolicy for one in pod.spec.containers if one.name == container), "")
    policy = own or pod.spec.restartPolicy
    return not (policy == "Never" or (policy == "OnFailure" and exit_code == 0))
