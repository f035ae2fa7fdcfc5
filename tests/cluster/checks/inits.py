"""Init containers, whose ids the app container inherits."""

import time
from pathlib import Path
from typing import Final

from tests.cluster.checks.faults import kill
from tests.cluster.checks.sight import SEEN, last_words
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from tests.cluster.settings import KUBELET_ROOT
from vgpu import names

SECONDS: Final = 120
#: MiB of init container and app: first the init container is larger, then the app.
PAIRS: Final = ((1700, 900), (1100, 2300))
#: Every start writes what it sees into a file of its own; the first one waits for a signal and fails.
SCRIPT: Final = """\
n=$(ls /seen | grep -c ^{name})
{seen} > /seen/{name}-$n
if [ $n = 0 ]; then until [ -e /seen/go-{name} ]; do sleep 0.1; done; exit 1; fi
cd /seen && grep . *-[0-9] > /dev/termination-log
"""
#: The sidecar restarts while the apps run; the first app waits for all and reports.
SCRIPTS: Final = {
    "sidecar": """\
n=$(ls /seen | grep -c ^{name})
{seen} > /seen/{name}-$n
if [ $n = 0 ]; then until [ -s /seen/one-0 ]; do sleep 0.1; done; exit 1; fi
exec sleep 3600
""",
    "first": "{seen} > /seen/{name}-0",
    "one": """\
{seen} > /seen/{name}-0
until [ -s /seen/sidecar-1 -a -s /seen/two-0 ]; do sleep 0.1; done
cd /seen && grep . *-[0-9] > /dev/termination-log
""",
    "two": "{seen} > /seen/{name}-0",
}


def own_slice_at_every_start(node: Node) -> str:
    """Init container and app fail once, the agent is killed in between: every start has the slice of its
    own container.
    """
    for number, (first, then) in enumerate(PAIRS):
        name = f"inits-{number}"
        body = pod(
            name,
            CLIENT,
            [],
            container=_container("app", then),
            initContainers=[_container("first", first)],
            restartPolicy="OnFailure",
            volumes=[{"name": "seen", "emptyDir": {}}],
        )
        node.kubectl.create(body)
        uid = node.kubectl.get("pod", name)["metadata"]["uid"]
        folder = Path(KUBELET_ROOT) / "pods" / uid / "volumes/kubernetes.io~empty-dir/seen"
        for container in ("first", "app"):
            _wait_for(folder / f"{container}-0", node, name)
            kill("vgpu-device-plugin", "--node-name=")
            (folder / f"go-{container}").touch()
        found = node.kubectl.until("done", lambda found: phase(found) == "Succeeded", "pod", name, seconds=SECONDS)
        seen = last_words(found).split()
        assert seen == [f"app-0:{then}", f"app-1:{then}", f"first-0:{first}", f"first-1:{first}"], seen
        node.kubectl.delete("pod", name)
    return f"{len(PAIRS)} pods, each with 4 starts and 2 kills of the agent"


def several_containers(node: Node) -> str:
    """A sidecar that starts twice, an init container and two apps, one of them with two cards: each has
    its own slice.
    """
    name = "several"
    slices = {"sidecar": (1, 700), "first": (1, 1900), "one": (1, 1300), "two": (2, 500)}
    containers = {one: _container(one, mib, cards, SCRIPTS[one]) for one, (cards, mib) in slices.items()}
    containers["sidecar"]["restartPolicy"] = "Always"
    body = pod(
        name,
        CLIENT,
        [],
        initContainers=[containers["sidecar"], containers["first"]],
        volumes=[{"name": "seen", "emptyDir": {}}],
    )
    body["spec"]["containers"] = [containers["one"], containers["two"]]
    node.kubectl.create(body)
    found = node.kubectl.until("done", lambda found: phase(found) == "Succeeded", "pod", name, seconds=SECONDS)
    statuses = {one["name"]: one for one in found["status"]["containerStatuses"]}
    seen = str(statuses["one"]["state"]["terminated"].get("message")).split()
    assert seen == ["first-0:1900", "one-0:1300", "sidecar-0:700", "sidecar-1:700", "two-0:500,500"], seen
    node.kubectl.delete("pod", name)
    return f"{len(seen)} starts in one pod"


def _container(name: str, mib: int, cards: int = 1, script: str = SCRIPT) -> Object:
    limits = {names.RESOURCE_GPU: cards, names.RESOURCE_MEMORY: mib}
    return {
        "name": name,
        "image": CLIENT,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script.format(name=name, seen=SEEN)],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "seen", "mountPath": "/seen"}],
    }


def _wait_for(file: Path, node: Node, name: str) -> None:
    until = time.monotonic() + SECONDS
    while not _read(file):
        assert time.monotonic() < until, f"{node.kubectl.get('pod', name)['status']} {node.kubectl.events(name)}"
        time.sleep(0.1)


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
