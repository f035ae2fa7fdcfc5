"""Two replicas of the scheduler, of which one leads."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.cluster.checks.chart import NAMESPACE, upgrade, values
from tests.cluster.checks.faults import Storm, cleared, processes, settle
from tests.cluster.checks.records import Records, cards
from tests.cluster.node import Node
from vgpu.kube.client import KubeClient

LEASE: Final = "vgpu-scheduler"
PODS: Final = 8  #: number of pods before, during and after the stop of the leader
SECONDS: Final = 150  #: ten times a lease


def stopped_leader(node: Node) -> str:
    """The leader stops for longer than its lease, another replica leads, the first one wakes up: no slice is given
    twice.
    """
    changed = values(node)
    changed["scheduler"]["replicas"] = 2
    try:
        upgrade(node, changed)
        with Records(node.kubectl.kubeconfig, cards(node)) as records:
            storm = Storm(KubeClient.connect(node.kubectl.kubeconfig), records)
            storm.blow(PODS)
            first = _leader(node)
            with _stopped(node, first):
                begin = time.monotonic()
                while (second := _leader(node)) == first:
                    assert time.monotonic() < begin + SECONDS, f"{first} still leads"
                    time.sleep(0.3)
                took = time.monotonic() - begin
                storm.blow(PODS)
            storm.blow(PODS)
            _, ran = settle(node, records, storm.made, time.monotonic())
            assert not records.over, f"{len(records.over)} states with too much: {records.over[0]}"
        cleared(node)
    finally:
        upgrade(node, values(node))
    assert second != first
    return f"another led after {took:.1f} s; {storm.made} pods, all ran {ran:.0f} s after the last was made"


def _leader(node: Node) -> str:
    """The name of the pod that leads."""
    holder = node.kubectl.get("lease", LEASE, NAMESPACE)["spec"].get("holderIdentity") or ""
    return str(holder).partition("_")[0]


def _cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""  # ended meanwhile


@contextmanager
def _stopped(node: Node, name: str) -> Iterator[None]:
    """Stops all programs of this pod, as on a machine that hangs."""
    uid = node.kubectl.get("pod", name, NAMESPACE)["metadata"]["uid"]
    pids = [pid for pid in processes("scheduler") if uid in _cgroup(pid)]
    assert len(pids) > 1, f"{len(pids)} programs of {name}"
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # its kubelet has ended it
                os.kill(pid, signal.SIGCONT)
