"""Pods that were deleted by force: the API server has forgotten them, and the kubelet still gives them some seconds."""

import time
from pathlib import Path
from typing import Final

from device_plugin.cgroups import Running
from tests.cluster.checks.chart import CARDS
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node

PERCENT: Final = 60  #: of a card's memory: two pods do not fit on one card
GRACE_SECONDS: Final = 20
SECONDS = 120
STUBBORN: Final = ("sh", "-c", "trap '' TERM; while :; do sleep 0.2; done")


def slices_stay_held(node: Node) -> str:
    """No other pod gets their slices until their processes have ended; these have not called the driver yet."""
    kubectl = node.kubectl
    old = [f"forced-{number}" for number in range(CARDS)]
    kubectl.create(*(_pod(name, *STUBBORN) for name in old))
    uids = [
        kubectl.until("running", lambda found: phase(found) == "Running", "pod", name, seconds=SECONDS)["metadata"][
            "uid"
        ]
        for name in old
    ]
    running = Running(Path("/proc"))
    assert set(running.among(uids)) == set(uids), "the processes of pods that run are not found"
    kubectl.run("delete", "pod", *old, "--force", "--grace-period=0", "--wait=false")
    begin = time.monotonic()
    kubectl.create(_pod("after", "sleep", "3600"))
    left: set[str] = set()
    refused: set[str] = set()

    def runs(found: Object) -> bool:
        refused.update(text for text in (*_waiting(found), *kubectl.events("after")) if "held by other pods" in text)
        if phase(found) != "Running":
            return False
        left.update(running.among(uids))
        return True

    kubectl.until("running", runs, "pod", "after", seconds=SECONDS)
    took = time.monotonic() - begin
    assert len(left) < CARDS, "it runs, and on every card a pod that was there before does, too"
    kubectl.delete("pod", "after")
    return f"started after {took:.1f} s, {'with' if refused else 'without'} a refusal; {GRACE_SECONDS} s of grace"


def _waiting(found: Object) -> list[str]:
    """The reasons why its containers wait."""
    states = [one.get("state", {}) for one in found.get("status", {}).get("containerStatuses", ())]
    return [str(state["waiting"].get("message")) for state in states if "waiting" in state]


def _pod(name: str, *command: str) -> Object:
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": PERCENT}
    return pod(
        name, CLIENT, command, container={"resources": {"limits": limits}}, terminationGracePeriodSeconds=GRACE_SECONDS
    )
