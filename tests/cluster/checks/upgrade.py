"""`helm upgrade` and `helm rollback` while GPU pods run."""

import http.client
import threading
import time
import urllib.request
from itertools import pairwise
from types import TracebackType
from typing import Final, Self

from tests.cluster.checks.chart import LIBRARIES, NAMESPACE, SECONDS, after, upgrade, values
from tests.cluster.checks.sight import last_words
from tests.cluster.images import CLIENT, NEXT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.namespaces import ADDRESS
from tests.cluster.node import Node
from vgpu import names

MIB: Final = 1000
POD: Final = "upgraded"
#: Prints a line each time the limit is seen and holds.
PROBE: Final = f"while vgpu probe --over --cores --seconds 0.2 --expect-memory={MIB}; do sleep 1; done; sleep 3600"
#: A shell command that prints the name of the library in this container.
LIBRARY: Final = "grep -o 'libvgpu-[0-9a-f]*[.]so' /proc/self/mountinfo | sort -u > /dev/termination-log"
LAUNCHES: Final = "vgpu_container_launches_total{"
AWAY_SECONDS: Final = 60  #: while one agent replaces another, which answers before it has looked at its pods


class Scrapes:
    """Reads the node's metrics again and again; records how long the pod's metrics were missing, and its counters."""

    def __init__(self) -> None:
        self.away = 0.0  #: seconds, longest gap
        self.launches: list[float] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ending.wait(0.2):
            try:
                with urllib.request.urlopen(f"http://{ADDRESS}:31992/metrics", timeout=5) as answer:
                    lines = [line for line in answer.read().decode().splitlines() if f'pod="{POD}"' in line]
            except (OSError, http.client.HTTPException):
                lines = []
            self.away = max(self.away, time.monotonic() - last)
            launches = [float(line.split()[-1]) for line in lines if line.startswith(LAUNCHES)]
            if launches:
                self.launches += launches
                last = time.monotonic()


def running_pods_stay(node: Node) -> str:
    """An upgrade with another image, library and settings, and the way back: pods go on, limited and metered.

    New pods get the new library; running pods keep theirs.
    """
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
    node.kubectl.create(pod(POD, CLIENT, ["sh", "-c", PROBE], container={"resources": {"limits": limits}}))
    before = node.kubectl.until("running", lambda one: phase(one) == "Running", "pod", POD, seconds=SECONDS)
    changed = values(node)
    changed["image"]["tag"] = NEXT.rpartition(":")[2]
    changed["scheduler"]["nodePolicy"] = "binpack"
    changed["devicePlugin"]["allowDisableControl"] = True
    words = {
        "upgrade": lambda: upgrade(node, changed),
        "rollback": lambda: after(node, [node.helm, "rollback", "vgpu", "-n", NAMESPACE]),
    }
    told = []
    libraries = [_another(node, "before")]
    for word, change in words.items():
        with Scrapes() as scrapes:
            agents = _agents(node)
            took = change()
            assert not agents & _agents(node), f"{word}: the agent is still the one before"
            _goes_on(node, before)
            libraries.append(_another(node, f"after-{word}"))
            assert (LIBRARIES / libraries[0]).is_file(), f"{word}: the library of a running pod is gone"
        assert scrapes.away < AWAY_SECONDS, f"{word}: for {scrapes.away:.0f} s no metrics told of the pod"
        assert len(scrapes.launches) > 1, f"{word}: metrics told of the pod {len(scrapes.launches)} times"
        back = [(one, then) for one, then in pairwise(scrapes.launches) if then < one]
        assert not back, f"{word}: a counter went back: {back}"
        told.append(f"{word} {took:.1f} s, metrics away for at most {scrapes.away:.1f} s")
    node.kubectl.delete("pod", POD)
    old, new, old_again = libraries
    assert old == old_again != new, f"libraries before, after the upgrade and after the rollback: {libraries}"
    return "; ".join(told)


def _agents(node: Node) -> set[str]:
    found = node.kubectl.items("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=device-plugin")
    assert found
    return {one["metadata"]["uid"] for one in found}


def _goes_on(node: Node, before: Object) -> None:
    """The same container goes on: it still sees its limit and is refused beyond it."""
    lines = len(node.kubectl.logs(POD).splitlines())

    def more(found: Object) -> bool:
        return phase(found) == "Running" and len(node.kubectl.logs(POD).splitlines()) > lines + 1

    found = node.kubectl.until("going on", more, "pod", POD, seconds=SECONDS)
    (was,), (now,) = before["status"]["containerStatuses"], found["status"]["containerStatuses"]
    assert (was["containerID"], now["restartCount"]) == (now["containerID"], 0), now


def _another(node: Node, name: str) -> str:
    """A new pod runs within its limit; returns the node's file of its library."""
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
    command = ["sh", "-ec", f"vgpu probe --over --expect-memory={MIB}; {LIBRARY}"]
    node.kubectl.create(pod(name, CLIENT, command, container={"resources": {"limits": limits}}))
    found = node.kubectl.until("done", lambda one: phase(one) == "Succeeded", "pod", name, seconds=SECONDS)
    node.kubectl.delete("pod", name)
    return last_words(found).strip()
