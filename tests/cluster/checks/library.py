"""The library on the host: without it no container starts, and none starts without limits."""

import time
from typing import Final

from tests.cluster.checks.chart import LIBRARIES
from tests.cluster.checks.sight import SEEN, last_words
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names

MIB: Final = 900
SECONDS: Final = 120


def removed(node: Node) -> str:
    """A removed library is put back before the next start; where that is impossible, the start is refused until it
    works.
    """
    (library,) = LIBRARIES.glob("libvgpu-*.so")
    library.unlink()
    _sees_its_slice(node, "put-back")
    assert library.is_file()
    library.unlink()
    (library / "in the way").mkdir(parents=True)
    node.kubectl.create(_pod("refused"))

    def told(_: Object) -> bool:
        return any(str(library) in event or library.name in event for event in node.kubectl.events("refused"))

    found = node.kubectl.until("told why", told, "pod", "refused", seconds=SECONDS)
    assert phase(found) == "Pending", found["status"]
    (library / "in the way").rmdir()
    begin = time.monotonic()
    found = node.kubectl.until("done", lambda one: phase(one) == "Succeeded", "pod", "refused", seconds=SECONDS)
    assert last_words(found) == f"{MIB}\n", last_words(found)
    node.kubectl.delete("pod", "refused")
    return f"put back; refused where it could not be, started {time.monotonic() - begin:.1f} s after it could"


def _sees_its_slice(node: Node, name: str) -> None:
    node.kubectl.create(_pod(name))
    found = node.kubectl.until("done", lambda one: phase(one) == "Succeeded", "pod", name, seconds=SECONDS)
    assert last_words(found) == f"{MIB}\n", last_words(found)
    node.kubectl.delete("pod", name)


def _pod(name: str) -> Object:
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
    shell = ["sh", "-c", f"{SEEN} > /dev/termination-log"]
    return pod(name, CLIENT, shell, container={"resources": {"limits": limits}})
