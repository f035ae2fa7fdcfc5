"""Which pod a process is of, as its cgroup tells."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

#: kubelet and runtimes: …/pod<uid>/… (cgroupfs) and …-pod<uid with underscores>.slice (systemd). The kubelet makes UIDs
#: of static pods itself: hashes of 32 digits
_POD: Final = re.compile(
    r"(?<=[/-])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![\w-])"
)


def pod_of(text: str) -> str:
    """UID of the pod that /proc/PID/cgroup names; empty: none.

    The innermost one, where a node is itself a pod: not every hierarchy of cgroups v1 need go so deep.
    """
    deepest = max((_POD.findall(line) for line in text.splitlines()), key=len, default=[])
    return deepest[-1].replace("_", "-") if deepest else ""


class Running:
    """Which pods have processes. Thread-safe.

    All processes of a node are many: one of each pod is remembered, and all are looked at only for a pod of which none
    is known, or whose known one has ended.
    """

    def __init__(self, proc: Path) -> None:
        """`proc`: where the processes of the node are."""
        self._proc = proc
        self._known: dict[str, Path] = {}  # pod uid → cgroup file of one process

    def among(self, pod_uids: Collection[str]) -> set[str]:
        """Those of these pods that have a process now."""
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
                found.setdefault(uid, file)  # the first is most often the pod's pause process, which lives longest
        return found


def _pod_at(file: Path) -> str:
    try:
        return pod_of(file.read_text(errors="replace"))
    except OSError:
        return ""  # it has ended
