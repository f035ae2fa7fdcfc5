"""Collects files of a cluster for finding the cause of a failure."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.cluster.kubectl import Kubectl, Refused

#: file → arguments of kubectl
QUESTIONS: Final = {
    "pods.txt": ("get", "pods", "-A", "-o", "wide"),
    "pods.yaml": ("get", "pods", "-A", "-o", "yaml"),
    "nodes.yaml": ("get", "nodes", "-o", "yaml"),
    "events.txt": ("get", "events", "-A", "--sort-by=.metadata.creationTimestamp"),
    "describe-nodes.txt": ("describe", "nodes"),
    "describe-pods.txt": ("describe", "pods", "-A"),
    "webhooks.yaml": ("get", "mutatingwebhookconfigurations,validatingadmissionpolicies", "-o", "yaml"),
}


def collect(kubectl: Kubectl, folder: Path) -> None:
    """Writes objects, events and container logs into `folder`; a missing file has the reason instead.

    Never raises OSError, because the earlier failure must be reported.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    for name, question in QUESTIONS.items():
        try:
            text = kubectl.run(*question)
        except (Refused, ValueError) as error:
            text = f"{error}\n"
        with suppress(OSError):
            (folder / name).write_text(text)
    with suppress(OSError):  # logs of living pods come and go meanwhile; all others are copied
        shutil.copytree("/var/log/pods", folder / "containers", dirs_exist_ok=True, ignore_dangling_symlinks=True)
