"""More memory than cards have: host memory behind them, which the kubelet keeps from pods."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.cluster.checks.chart import SECONDS, upgrade, values
from tests.cluster.checks.first_pod import metrics
from tests.cluster.checks.health import STATE
from tests.cluster.checks.records import cards
from tests.cluster.commands import run
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import FOLDER, Node
from vgpu import names
from vgpu.native import simulator
from vgpu.resources import parse_quantity
from vgpu.tier import MIB

FACTOR: Final = 2
OF_A_CARD: Final = 1.6  #: what one program allocates
MODES: Final = ("static", "movable")
HOLD_SECONDS: Final = 5  #: while everything is allocated
PREFIX: Final = "vgpu_container_"
MEMINFO: Final = Path("/proc/meminfo")


class Seen(msgspec.Struct):
    """Metrics of a program at its peak, and the largest figures of the simulator for all cards."""

    of: dict[str, dict[str, float]] = {}  #: pod → name without PREFIX → value
    host: dict[str, int] = {}  #: card → largest number of bytes of host memory behind it
    used: dict[str, int] = {}  #: card → largest number of bytes in use on it

    def look(self) -> None:
        now: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
        for line in metrics():
            found = re.match(rf'{PREFIX}(memory|host|untracked)(\w+){{.*pod="({"|".join(MODES)})".* (\S+)$', line)
            if found:
                now[found[3]][found[1] + found[2]] = float(found[4])
        for name, one in now.items():
            if one.get("memory_used_bytes", 0) >= self.of.get(name, {}).get("memory_used_bytes", 1):
                self.of[name] = one
        for card in simulator.cards(STATE):
            self.host[card.uuid] = max(card.host, self.host.get(card.uuid, 0))
            self.used[card.uuid] = max(card.used, self.used.get(card.uuid, 0))


def more_than_the_card(node: Node) -> str:
    """Limits of twice the cards where the kubelet keeps host memory for them; else not, and the node says why.

    For each card, a program that can or cannot move its memory fills 1.6 times the card and reads back what it wrote.
    """
    behind = (FACTOR - 1) * sum(gpu.physical_memory for gpu in cards(node).values())
    changed = values(node)
    changed["devicePlugin"] |= {"deviceMemoryScaling": FACTOR, "hostMemory": behind}
    try:
        upgrade(node, changed)
        _not_scaled(node, behind)
        with _kept(node, behind):
            _offers(node, FACTOR)
            told = _programs(node)
            condition = _condition(node.kubectl.get("node", NODE))
            assert condition.get("status") == "False", f"host memory is kept, and the node says {condition}"
        _offers(node, 1)
    finally:
        upgrade(node, values(node))
    return f"{told}; not before the kubelet kept {behind} MiB"


def _not_scaled(node: Node, behind: int) -> None:
    """The kubelet keeps nothing: a condition and an event of the node name what is missing, and the node offers its
    cards.
    """

    def told(found: Object) -> bool:
        one = _condition(found)
        event = f"{names.CONDITION_UNBACKED}: {one.get('message')}"
        return one.get("status") == "True" and event in node.kubectl.events(NODE)

    found = node.kubectl.until("telling that host memory is not kept", told, "node", NODE, seconds=SECONDS)
    sentence = str(_condition(found)["message"])
    assert f"raise memory in its systemReserved by {behind} MiB" in sentence, sentence
    _offers(node, 1)


def _offers(node: Node, factor: int) -> None:
    """Waits until every card has `factor` times its memory for limits, and the node their sum for pods."""

    def offered(found: Object) -> bool:
        known = cards(node).values()
        total = sum(factor * gpu.physical_memory for gpu in known)
        allocatable = found["status"]["allocatable"]
        sums = {
            parse_quantity(allocatable.get(one, "0")) for one in (names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_MEMORY)
        }
        return all(gpu.memory == factor * gpu.physical_memory for gpu in known) and sums == {total}

    node.kubectl.until(f"offering {factor} times the memory of its cards", offered, "node", NODE, seconds=SECONDS)


def _programs(node: Node) -> str:
    """One program of each mode, at the same time, each on its own card."""
    kubectl, seen = node.kubectl, Seen()
    size = min(gpu.physical_memory for gpu in cards(node).values())
    limit = int(size * OF_A_CARD)
    command = ["vgpu", "probe", "--blocks", "256", "--over", "--hold", str(HOLD_SECONDS)]
    limits = {"resources": {"limits": {names.RESOURCE_MEMORY: limit}}}
    for mode in MODES:
        chosen = {"annotations": {names.MEMORY_MODE: mode}}
        kubectl.create(pod(mode, CLIENT, command, container=limits, metadata=chosen))

    def done(found: Object) -> bool:
        seen.look()
        return phase(found) == "Succeeded"

    for mode in MODES:
        kubectl.until("done", done, "pod", mode, seconds=SECONDS)
    told = [_judged(mode, kubectl.logs(mode), limit, seen.of.get(mode, {})) for mode in MODES]
    for uuid, used in seen.used.items():
        assert used <= size * MIB, f"card {uuid} had {used} bytes in use, of {size} MiB"
    told_host = sum(int(one["host_memory_bytes"]) for one in seen.of.values())
    assert sum(seen.host.values()) >= told_host, f"host memory: {told_host} told, {seen.host} by the driver"
    for one in node.kubectl.items("events", "-A"):
        ours = one["involvedObject"]["name"] in MODES and str(one.get("reason")).startswith("Vgpu")
        assert not ours or one.get("type") == "Normal", f"{one['reason']}: {one.get('message')}"
    kubectl.delete("pod", *MODES)
    return f"{limit} MiB of a card of {size}: {', '.join(told)}"


def _judged(mode: str, output: str, limit: int, seen: dict[str, float]) -> str:
    """The program had exactly its limit, its data were right, and metrics showed where they were."""
    (card,) = json.loads(output.splitlines()[0])["cards"]
    assert card["cuda_total"] == limit * MIB, output
    assert (card["fill"], card["data"]) == ("CUDA_SUCCESS", "right"), output
    assert card["over"] == "CUDA_ERROR_OUT_OF_MEMORY", output
    assert seen.get("memory_used_bytes") == limit * MIB, f"{mode}: {seen}"
    assert seen["memory_resident_bytes"] + seen["host_memory_bytes"] == limit * MIB, f"{mode}: {seen}"
    guarantee, lent = seen["memory_guarantee_bytes"], seen["memory_lent_bytes"]
    assert seen["memory_resident_bytes"] <= guarantee + lent, f"{mode}: {seen}"
    assert (mode == "movable") == (lent > 0), f"{mode}: {seen}"
    assert 0 < seen["host_memory_bytes"] <= seen["host_memory_limit_bytes"], f"{mode}: {seen}"
    assert seen["untracked_bytes"] == 0, f"{mode}: {seen}"
    return f"{mode} with {int(seen['host_memory_bytes']) // MIB} MiB in host memory"


def _condition(found: Object) -> dict[str, Any]:
    """A node's condition that its memory is not scaled; empty: it was never reported."""
    conditions = found["status"].get("conditions", ())
    return next((one for one in conditions if one["type"] == names.CONDITION_UNBACKED), {})


@contextmanager
def _kept(node: Node, mib: int) -> Iterator[None]:
    """The kubelet keeps this much memory from pods.

    It sees this much more memory than there is, because a simulated card has no memory either: the machine may be too
    small.
    """
    settings, memory = FOLDER / "kubelet.yaml", FOLDER / "meminfo"
    before, text = settings.read_text(), MEMINFO.read_text()
    memory.write_text(re.sub(r"(?<=^MemTotal:) +\d+", lambda kib: f" {int(kib[0]) + (mib << 10)}", text))
    run(["mount", "--bind", memory, MEMINFO], what="more memory of the node", timeout=10)
    try:
        reserved = {"systemReserved": {"memory": f"{mib}Mi"}}
        settings.write_text(json.dumps(json.loads(before) | reserved, indent=1))
        node.services["kubelet"].restart()
        yield
    finally:
        run(["umount", MEMINFO], what="the memory of the node", timeout=10)
        settings.write_text(before)
        node.services["kubelet"].restart()
