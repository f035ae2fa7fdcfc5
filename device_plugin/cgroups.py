"""Which pod a process is of, as its cgroup tells."""

import re
from pathlib import Path
from typing import Final

#: kubelet and runtimes: …/pod<uid>/… (cgroupfs) and …-pod<uid with underscores>.slice (systemd)
_POD: Final = re.compile(r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12})")


def pod_of(text: str) -> str:
    """UID of the pod that /proc/PID/cgroup names; empty: none."""
    found = _POD.search(text)
    return found[1].replace("_", "-") if found else ""


def has_processes(pod_uid: str, proc: Path) -> bool:
    """A process of the pod runs; `proc`: where the host's processes are."""
    for group in proc.glob("[0-9]*/cgroup"):
        try:
            if pod_of(group.read_text(errors="replace")) == pod_uid:
                return True
        except OSError:
            continue  # it has ended meanwhile
    return False
