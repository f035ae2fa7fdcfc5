"""Only containers with a grant see cards."""

import time
from pathlib import Path
from typing import Final

from tests.cluster.checks import doctor
from tests.cluster.checks.faults import kill
from tests.cluster.checks.first_pod import slice_pod
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, Refused, phase
from tests.cluster.node import FOLDER, Node
from vgpu import names

SECONDS: Final = 120
TELL: Final = "echo devices=$NVIDIA_VISIBLE_DEVICES; sleep 3600"
TOLD: Final = "devices=void\n"
TOOLKIT: Final = Path("/etc/nvidia-container-runtime/config.toml")
#: Where a file names a runtime, containerd adds none; the file of containerd 1 has this one already (settings.py).
RUNC: Final = """
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
#: By the version of containerd's configuration file. Its program need not exist: no container uses it.
RUNTIME: Final = """
[plugins."{plugin}".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."{plugin}".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
"""


def others_in_the_pod(node: Node) -> str:
    """Containers without GPU next to one with a GPU, and those of `kubectl debug`, start without visible cards."""
    body = slice_pod("beside", "sleep", "3600")
    side = {"name": "side", "image": CLIENT, "imagePullPolicy": "Never", "command": ["sh", "-c", TELL]}
    body["spec"]["containers"].append(side)
    body["spec"]["initContainers"] = [{**side, "name": "sidecar", "restartPolicy": "Always"}]
    node.kubectl.create(body)
    node.kubectl.until("running", lambda found: phase(found) == "Running", "pod", "beside", seconds=SECONDS)
    node.kubectl.run(
        "debug", "beside", f"--image={CLIENT}", "--container=looks", "--profile=general", "--", "sh", "-c", TELL
    )
    for container in ("side", "sidecar", "looks"):
        _tells(node, "beside", container)
    node.kubectl.delete("pod", "beside")
    return "void in a sidecar, a container beside it and a debug container"


def unsafe_runtime(node: Node) -> str:
    """An NVIDIA runtime that obeys a container's own NVIDIA_VISIBLE_DEVICES is a condition of the node."""
    file = FOLDER / "containerd.toml"
    before = file.read_text()
    second = node.versions.containerd is not None
    plugin, runc = ("io.containerd.cri.v1.runtime", RUNC) if second else ("io.containerd.grpc.v1.cri", "")
    TOOLKIT.unlink(missing_ok=True)  # the machine's own file, hidden: the cluster's /etc is mounted over the machine's
    try:
        file.write_text(before + runc + RUNTIME.format(plugin=plugin))
        node.services["containerd"].restart()
        sentence = _condition(node, "True")
        told = [one for one in doctor.wrong(node) if one.area == "settings" and sentence in one.sentence]
        assert told, "the doctor says nothing of it"
        TOOLKIT.parent.mkdir(exist_ok=True)
        TOOLKIT.write_text("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
        _condition(node, "False")
    finally:
        file.write_text(before)
        node.services["containerd"].restart()
        TOOLKIT.unlink(missing_ok=True)
    return sentence


def _tells(node: Node, name: str, container: str) -> None:
    until = time.monotonic() + SECONDS
    said = ""
    while time.monotonic() < until:
        try:
            said = node.kubectl.logs(name, "-c", container)
        except Refused as error:
            said = str(error)
        if said == TOLD:
            return
        assert "devices=" not in said, f"{container}: {said}"
        time.sleep(0.3)
    raise AssertionError(f"{container}: {said}")


def _condition(node: Node, wanted: str) -> str:
    """The message of VgpuUnenforced once it has the status `wanted`; a new agent looks at once."""
    kill("vgpu-device-plugin", "--node-name=")

    def has(found: Object) -> bool:
        return any(one["type"] == names.CONDITION_UNENFORCED and one["status"] == wanted for one in conditions(found))

    def conditions(found: Object) -> list[Object]:
        return list(found.get("status", {}).get("conditions", ()))

    found = node.kubectl.until(f"{names.CONDITION_UNENFORCED} {wanted}", has, "node", NODE, seconds=SECONDS)
    (message,) = (one["message"] for one in conditions(found) if one["type"] == names.CONDITION_UNENFORCED)
    return str(message)
