"""Many pods at once."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.cluster.checks.chart import CARDS
from tests.cluster.checks.sight import SEEN, last_words
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, Refused, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.native import Region

MIB: Final = 1 << 20
COUNT: Final = 40
BAR: Final = 1.2  #: factor for pods without a GPU; a check fails at three times that
SECONDS: Final = 300
BASE_MIB: Final = 200
STEP_MIB: Final = 20
ROUNDS: Final = 50
BATCH: Final = 5  #: rounds that follow each other without a wait
WAIT: Final = ("sleep", "3600")


def forty_pods(node: Node) -> str:
    """40 GPU pods run not much later than 40 pods without GPU, and each holds its own slice."""
    plain = [pod(f"plain-{number}", CLIENT, WAIT) for number in range(COUNT)]
    without, _ = _start(node, plain, "Running")
    _delete(node, plain)
    wanted = {f"sliced-{number}": BASE_MIB + number for number in range(COUNT)}
    sliced = [_sliced(name, mib, WAIT) for name, mib in wanted.items()]
    took, found = _start(node, sliced, "Running")
    held = {}
    for one in found:
        uid, name = one["metadata"]["uid"], one["metadata"]["name"]
        with Region.open(Path(names.CONTAINERS_DIR) / f"{uid}_main") as region:
            held[name] = [(card.memory or 0) // MIB for card in region.limits().cards]
    assert held == {name: [mib] for name, mib in wanted.items()}
    _delete(node, sliced)
    assert took < 3 * BAR * without, f"{took:.1f} s, without GPU {without:.1f} s"
    return f"{took:.1f} s, without GPU {without:.1f} s: ratio {took / without:.2f}"


def equal_pods(node: Node) -> str:
    """Pods of one card with different slices, created in the same second: each sees its own, every round."""
    begin = time.monotonic()
    count = 2 * CARDS
    shell = ("sh", "-c", f"{SEEN} > /dev/termination-log")
    for first in range(0, ROUNDS, BATCH):
        wanted = {
            f"equal-{number}-{one}": BASE_MIB + STEP_MIB * ((number + one) % ROUNDS)
            for number in range(first, first + BATCH)
            for one in range(count)
        }
        pods = [_sliced(name, mib, shell) for name, mib in wanted.items()]
        for at in range(0, len(pods) - count, count):
            node.kubectl.create(*pods[at : at + count])
        _, found = _start(node, pods[-count:], "Succeeded", also=pods[:-count])
        seen = {one["metadata"]["name"]: last_words(one) for one in found}
        wrong = {name: (mib, seen.get(name)) for name, mib in wanted.items() if seen.get(name) != f"{mib}\n"}
        assert not wrong, f"pod: (its MiB, what it sees): {wrong}"
        node.kubectl.run("delete", "pod", *wanted, "--grace-period=1", "--wait=false")
    return f"{ROUNDS} rounds of {count} pods, {(time.monotonic() - begin) / ROUNDS:.1f} s each"


def _sliced(name: str, mib: int, command: Sequence[str]) -> Object:
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: mib}
    return pod(name, CLIENT, command, container={"resources": {"limits": limits}})


def _start(node: Node, pods: Sequence[Object], wanted: str, also: Sequence[Object] = ()) -> tuple[float, list[Object]]:
    """Creates `pods` at once; returns seconds until they and `also` are in the phase `wanted`, and their state then."""
    mine = {one["metadata"]["name"] for one in (*pods, *also)}
    begin = time.monotonic()
    node.kubectl.create(*pods)
    while True:
        found = [one for one in node.kubectl.items("pods") if one["metadata"]["name"] in mine]
        others = {one["metadata"]["name"]: phase(one) for one in found if phase(one) != wanted}
        took = time.monotonic() - begin
        if not others:
            return took, found
        over = took > SECONDS or "Failed" in others.values()
        assert not over, f"not {wanted} after {took:.0f} s: {_summary(node, others)}"
        time.sleep(0.3)


def _summary(node: Node, others: Mapping[str, str]) -> str:
    """Number of pods with a wrong state, and all about one of them, a failed one first."""
    name = min(others, key=lambda name: others[name] != "Failed")
    try:
        output = node.kubectl.logs(name)
    except Refused as error:
        output = str(error)
    return f"{len(others)} pods; {name} is {others[name]}: {node.kubectl.events(name)[-3:]}\n{output}"


def _delete(node: Node, pods: Sequence[Object]) -> None:
    node.kubectl.delete("pod", *(one["metadata"]["name"] for one in pods))
