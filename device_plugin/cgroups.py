"""Finds the pod of a process by its cgroup."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

#: kubelet and runtimes: …/pod<uid>/… (cgroupfs) and …-pod<uid with underscores>.slice (systemd). The kubelet itself
#: makes UIDs of static pods: hashes of 32 digits
_POD: Final = re.compile(
    r"(?<=[/-])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![\w-])"
)


def pod_of(text: str) -> str:
    """UID of the pod that /proc/PID/cgroup names; empty: none.

    Where a node is itself a pod, this is the innermost pod: not every cgroup v1 hierarchy goes that deep.
    """
    deepest = max((_POD.findall(line) for line in text.splitlines()), key=len, default=[])
    return deepest[-1].replace("_", "-") if deepest else ""


class Running:
    """Knows which pods have processes. Thread-safe.

    A node has many processes. So the object remembers one process of each pod, and reads all processes only for a pod
    without a remembered living process.
    """

    def __init__(self, proc: Path) -> None:
        """`proc`: /proc with the processes of the node."""
        self._proc = proc
        self._known: dict[str, Path] = {}  # pod uid → cgroup file of one process

    def among(self, pod_uids: Collection[str]) -> set[str]:
        """Those of `pod_uids` that have a process now."""
        known = self._known
        found = {uid for uid in pod_uids if uid in known and _pod_at(known[uid]) == uid}
        if len(found) < len(set(pod_uids)):
            self._known = known = self._look()
            found |= set(pod_uids) & known.keys()
        return found

    def _look(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for file in self._proc.glob("[0-9]*/cgroup"):
            uid = _pod_at(file)
            if uid:
                # the first process is most often the pod's pause process, which lives longest
                found.setdefault(uid, file)
        return found


def _pod_at(file: Path) -> str:
    try:
        return pod_of(file.read_text(errors="replace"))
    except OSError:
        return ""  # the process has ended
