"""kill -9 of every part in turn, while pods come and go."""

import itertools
import os
import random
import signal
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.cluster.checks.chart import NAMESPACE
from tests.cluster.checks.records import Records, cards, together
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.namespaces import ADDRESS
from tests.cluster.node import Node
from tests.cluster.settings import KUBELET_ROOT
from vgpu import names
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.objects import Pod

TIMES: Final = 2  #: number of kills of each part
PERIOD_SECONDS: Final = 0.5  #: between two new pods
LIFE_SECONDS: Final = 10  #: of a pod
ALIVE: Final = 60  #: pods at the most
PODS_PER_FAULT: Final = 10
SLICES: Final = (300, 700, 1100, 1500, 2300)  #: MiB; ALIVE such pods need more than there is
CORES: Final = (0, 2, 5)
FREE_SECONDS, RAN_SECONDS = 60, 120  # bars; a check fails at three times them
REGISTERED_SECONDS: Final = 3  #: three times the bar: the median of the registrations of a storm
REGISTERED_LONGEST: Final = 30  #: any of them: two cores start ALIVE pods meanwhile
WAIT_SECONDS: Final = 120  #: time for a killed part to come back
JOBS: Final = "/apis/batch/v1/namespaces/default/jobs"
LABEL: Final = "storm"
REGISTERED: Final = f"registered {names.RESOURCE_GPU} with the kubelet"


class Storm:
    """Jobs of one pod each, made at a steady pace; each Job asks for a part of a card."""

    def __init__(self, client: KubeClient, records: Records) -> None:
        self.made = 0
        self._client = client
        self._records = records
        self._chance = random.Random(20261128)

    def blow(self, count: int) -> None:
        """Makes `count` Jobs, at most ALIVE with living pods at a time; AssertionError when there is no progress."""
        until = time.monotonic() + WAIT_SECONDS + count * (PERIOD_SECONDS + LIFE_SECONDS)
        wanted = self.made + count
        while self.made < wanted:
            begin = time.monotonic()
            if len(self._alive()) < ALIVE and self._make():
                self.made += 1
            assert begin < until, f"{self.made} of {wanted} pods made; {len(self._alive())} live"
            time.sleep(max(0.0, begin + PERIOD_SECONDS - time.monotonic()))

    def _alive(self) -> list[Pod]:
        return [one for one in self._records.living() if LABEL in one.metadata.labels]

    def _make(self) -> bool:
        memory, cores = self._chance.choice(SLICES), self._chance.choice(CORES)
        limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: memory, names.RESOURCE_CORES: cores}
        template = pod("", CLIENT, ["sleep", str(LIFE_SECONDS)], container={"resources": {"limits": limits}})
        body = {
            "metadata": {"name": f"storm-{self.made}"},
            "spec": {"backoffLimit": 20, "template": {"metadata": {"labels": {LABEL: ""}}, "spec": template["spec"]}},
        }
        try:
            self._client.request("POST", JOBS, body=body)
        except ApiError as error:
            return error.status == 409  # an answer was lost
        return True


def killed_in_turn(node: Node) -> str:
    """No slice is given twice and none is lost, after a kill of any part; afterwards every pod runs."""
    client = KubeClient.connect(node.kubectl.kubeconfig)
    faults = _faults(node)
    with Records(node.kubectl.kubeconfig, cards(node)) as records:
        storm = Storm(client, records)
        storm.blow(PODS_PER_FAULT)
        registered = []
        for name in itertools.chain.from_iterable([faults] * TIMES):
            faults[name]()
            last = time.monotonic()
            storm.blow(PODS_PER_FAULT)
            if name == "kubelet":
                registered.append(registered_after(node.services["kubelet"].begun))
        assert not records.over, f"{len(records.over)} states with too much: {records.over[0]}"
        free, ran = settle(node, records, storm.made, last)
        assert not records.over, f"{len(records.over)} states with too much: {records.over[0]}"
    cleared(node)
    median = statistics.median(registered)
    late = f"registered {registered} s after the kubelet's socket was back"
    assert median <= REGISTERED_SECONDS, late
    assert max(registered) < REGISTERED_LONGEST, late
    peak = ", ".join(str(mib) for mib in records.peak.values())
    return (
        f"{storm.made} pods, {len(faults) * TIMES} kills; {records.states} states, at most {peak} MiB of the cards; "
        f"free after {free:.0f} s, all ran after {ran:.0f} s; "
        f"registered after {median:.2f} s (median), {max(registered):.2f} s (longest)"
    )


def _faults(node: Node) -> Mapping[str, Callable[[], None]]:
    return {
        "agent": lambda: kill("vgpu-device-plugin", "--node-name="),
        "kubelet": node.services["kubelet"].restart,
        "extender": lambda: kill("vgpu-scheduler", "--extender-port="),
        "kube-scheduler": lambda: kill("kube-scheduler", "--config=/etc/kube-scheduler/"),
        "apiserver": node.services["kube-apiserver"].restart,
    }


def kill(*words: str) -> None:
    """kill -9 of the one program whose command line has all of these words, as soon as it exists."""
    until = time.monotonic() + WAIT_SECONDS
    while not (found := list(processes(*words))):
        assert time.monotonic() < until, f"no program {words[0]} to be killed"
        time.sleep(0.1)
    for pid in found:
        with suppress(ProcessLookupError):  # ended meanwhile
            os.kill(pid, signal.SIGKILL)


def processes(*words: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdecimal() else ""
        except OSError:
            continue  # ended meanwhile
        if line and all(word in line for word in words):
            yield int(entry.name)


def registered_after(begun: float) -> float:
    """Seconds from the start of the kubelet's socket to the agent's log line that it is registered.

    `begun`: time of the kubelet's restart; the earlier kubelet's socket stays until then, and a while longer.
    """
    socket = Path(KUBELET_ROOT) / "device-plugins/kubelet.sock"
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        try:
            back = socket.stat().st_ctime
        except FileNotFoundError:
            back = float("inf")
        later = [when - back for when in _registrations() if when >= back >= begun]
        if later:
            return min(later)
        time.sleep(0.2)
    raise AssertionError(f"the agent has not registered {WAIT_SECONDS} s after the kubelet was killed")


def _registrations() -> Iterator[float]:
    """Unix times; a line of a container's log is TIME STREAM TAG TEXT (CRI)."""
    for log in Path("/var/log/pods").glob(f"{NAMESPACE}_vgpu-device-plugin-*/device-plugin/*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if REGISTERED in line:
                yield datetime.fromisoformat(line.split(" ", 1)[0]).timestamp()


def settle(node: Node, records: Records, made: int, last: float) -> tuple[float, float]:
    """Seconds since `last` until the node holds what living pods hold, and until every Job has run."""
    free = ran = None
    seen: object = None
    while free is None or ran is None:
        took = time.monotonic() - last
        if free is None:
            seen = held_by_node(), {uuid: now.mem for uuid, now in together(records.living()).items() if now.mem}
            free = took if seen[0] == seen[1] else None
            assert free is not None or took < 3 * FREE_SECONDS, f"MiB that the node and the records hold: {seen}"
        if ran is None:
            missing = [one for one in node.kubectl.items("jobs") if not one.get("status", {}).get("succeeded")]
            ran = took if not missing else None
            assert ran is not None or took < 3 * RAN_SECONDS, _stuck(node, missing, made)
        time.sleep(0.5)
    return free, ran


def held_by_node() -> dict[str, int]:
    """Card → MiB that the agent counts as held."""
    found = {}
    with urllib.request.urlopen(f"http://{ADDRESS}:31992/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("vgpu_card_memory_allocated_bytes{"):
                mib = int(float(line.split()[-1])) >> 20
                if mib:
                    found[line.partition('uuid="')[2].partition('"')[0]] = mib
    return found


def _stuck(node: Node, missing: list[Object], made: int) -> str:
    name = missing[0]["metadata"]["name"]
    pods = node.kubectl.items("pods", "-l", f"job-name={name}")
    about = [(phase(one), one["status"].get("reason"), node.kubectl.events(one["metadata"]["name"])) for one in pods]
    return f"{len(missing)} of {made} Jobs have not run; {name}: {missing[0].get('status')} {about}"


def cleared(node: Node) -> None:
    """Deletes the Jobs of a storm.

    Then every card must be available as a whole: neither scheduler, agent nor kubelet has kept a slice.
    """
    node.kubectl.run("delete", "jobs", "--all", "--cascade=foreground", timeout=WAIT_SECONDS)
    count = len(cards(node))
    limits = {names.RESOURCE_GPU: count, names.RESOURCE_CORES: 100}
    node.kubectl.create(pod("whole", CLIENT, ["true"], container={"resources": {"limits": limits}}))
    node.kubectl.until("done", lambda one: phase(one) == "Succeeded", "pod", "whole", seconds=3 * FREE_SECONDS)
    node.kubectl.delete("pod", "whole")
