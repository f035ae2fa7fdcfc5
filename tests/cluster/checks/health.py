"""A card that fails on a full node."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from device_plugin.recovery import LONGEST
from tests.cluster.checks.chart import QUIET_SECONDS, SPLIT
from tests.cluster.checks.faults import registered_after
from tests.cluster.checks.records import cards, holds
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.kube.objects import Pod
from vgpu.native import simulator

STATE: Final = Path("/run/vgpu/simulator")
XID: Final = 79  #: "GPU has fallen off the bus" (NVIDIA's XID catalogue)
PER_CARD: Final = 2
SECONDS: Final = 120
REGISTERED_SECONDS: Final = 3  #: three times the bar
AGAIN_SECONDS: Final = 5  #: between two XIDs, far less than QUIET_SECONDS
BACK_SECONDS: Final = SECONDS + LONGEST * QUIET_SECONDS  #: also if the card came back too early and failed again


def failed_card(node: Node) -> str:
    """Full node, XID on a card, kubelet restarted: the other card's pods go on; the failed card comes back."""
    kubectl = node.kubectl
    well, ill = sorted(cards(node).values(), key=lambda gpu: gpu.index)
    size = well.memory // PER_CARD
    full = [f"full-{number}" for number in range(2 * PER_CARD)]
    kubectl.create(*(_pod(name, size) for name in full))
    at: dict[str, list[Object]] = {well.uuid: [], ill.uuid: []}
    for name in full:
        found = _until(node, name, "Running")
        at[_card(found)].append(found)
    with _trouble(ill.index):
        _healthy(node, ill.uuid, False)
        _slices(node, SPLIT)
        node.services["kubelet"].restart()
        registered = registered_after(node.services["kubelet"].begun)
        assert registered < REGISTERED_SECONDS, f"registered {registered:.2f} s after the kubelet's socket was back"
        _slices(node, SPLIT)
        kubectl.delete("pod", at[ill.uuid].pop()["metadata"]["name"])
        kubectl.create(_pod("next", size))
        why = kubectl.until("refused a place", unschedulable, "pod", "next", seconds=SECONDS)
        for before in at[well.uuid]:
            runs_on(node, before)
        kubectl.delete("pod", at[well.uuid].pop()["metadata"]["name"])
        assert _card(_until(node, "next", "Running")) == well.uuid
        kubectl.create(_pod("last", size))
        kubectl.until("refused a place", unschedulable, "pod", "last", seconds=SECONDS)
    begin = time.monotonic()
    _healthy(node, ill.uuid, True, BACK_SECONDS)
    assert _card(_until(node, "last", "Running")) == ill.uuid
    took = time.monotonic() - begin
    kubectl.delete("pod", "next", "last", *full)
    message = next(one["message"] for one in why["status"]["conditions"] if one["type"] == "PodScheduled")
    return (
        f"meanwhile: {message}; registered after {registered:.2f} s; "
        f"back {took:.0f} s later, quiet for {QUIET_SECONDS} s"
    )


@contextmanager
def _trouble(index: int) -> Iterator[None]:
    """Repeats XIDs of a card, so that it does not come back meanwhile."""
    ending = threading.Event()

    def repeat() -> None:
        while True:
            simulator.inject_xid(STATE, index, XID)
            if ending.wait(AGAIN_SECONDS):
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _pod(name: str, mib: int) -> Object:
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: mib}
    return pod(name, CLIENT, ["sleep", "3600"], container={"resources": {"limits": limits}})


def _until(node: Node, name: str, wanted: str) -> Object:
    return node.kubectl.until(wanted, lambda found: phase(found) == wanted, "pod", name, seconds=SECONDS)


def _card(found: Object) -> str:
    """The card of a pod's only slice, by its record."""
    (uuid,) = holds(msgspec.convert(found, Pod))
    return uuid


def _healthy(node: Node, uuid: str, wanted: bool, seconds: float = SECONDS) -> None:
    def told(_: Object) -> bool:
        return cards(node)[uuid].healthy is wanted

    node.kubectl.until(f"telling that {uuid} is {'' if wanted else 'not '}well", told, "node", NODE, seconds=seconds)


def _slices(node: Node, wanted: int) -> None:
    def told(found: Object) -> bool:
        return int(found["status"]["allocatable"].get(names.RESOURCE_GPU, 0)) == wanted

    node.kubectl.until(f"offering {wanted} slices", told, "node", NODE, seconds=SECONDS)


def unschedulable(found: Object) -> bool:
    conditions = found["status"].get("conditions", ())
    return any(one["type"] == "PodScheduled" and one["status"] == "False" for one in conditions)


def runs_on(node: Node, before: Object) -> None:
    """The same container goes on, never restarted."""
    now = node.kubectl.get("pod", before["metadata"]["name"])
    assert phase(now) == "Running", now["status"]
    (was,), (one,) = before["status"]["containerStatuses"], now["status"]["containerStatuses"]
    assert (was["containerID"], one["restartCount"]) == (one["containerID"], 0), one
