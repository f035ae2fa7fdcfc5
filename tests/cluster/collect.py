"""What is kept of a cluster for whoever looks for the cause of a failure."""

import shutil
from pathlib import Path
from typing import Final

from tests.cluster.kubectl import Kubectl, Refused

#: file → what kubectl says to it
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
    """Objects, events and container logs into `folder`; what cannot be had says why in its file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, question in QUESTIONS.items():
        try:
            text = kubectl.run(*question)
        except Refused as error:
            text = f"{error}\n"
        (folder / name).write_text(text)
    logs = Path("/var/log/pods")
    if logs.is_dir():
        shutil.copytree(logs, folder / "containers", dirs_exist_ok=True, ignore_dangling_symlinks=True)
