"""The totals that kube-scheduler, quotas and people compute."""

from typing import Final

from tests.cluster.checks.first_pod import slice_pod
from tests.cluster.checks.records import cards
from tests.cluster.checks.refusals import refused
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from vgpu import names
from vgpu.resources import parse_quantity

SPACE: Final = "sums"
QUOTA: Final = "memory"
PERCENT: Final = 10
SPARE: Final = 1000  #: MiB that the quota leaves free
SECONDS: Final = 120


def quota_and_node(node: Node) -> str:
    """ResourceQuota and `kubectl describe node` count cards × MiB, percentages as MiB, and cards × cores."""
    kubectl = node.kubectl
    before = _described(node)
    size = next(iter(cards(node).values())).physical_memory
    share = size * PERCENT // 100
    asked: dict[str, tuple[dict[str, int], int, int]] = {
        "one": ({names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: 3000, names.RESOURCE_CORES: 20}, 3000, 20),
        "two": ({names.RESOURCE_GPU: 2, names.RESOURCE_MEMORY: 2000, names.RESOURCE_CORES: 15}, 4000, 30),
        "share": ({names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY_PERCENTAGE: PERCENT}, share, 0),
        "shares": ({names.RESOURCE_GPU: 2, names.RESOURCE_MEMORY_PERCENTAGE: PERCENT}, 2 * share, 0),
    }
    memory = sum(one[1] for one in asked.values())
    cores = sum(one[2] for one in asked.values())
    key = f"requests.{names.RESOURCE_TOTAL_MEMORY}"
    kubectl.run("create", "namespace", SPACE)
    kubectl.run("create", "quota", QUOTA, f"--hard={key}={memory + SPARE}", "-n", SPACE)
    for name, (limits, _, _) in asked.items():
        body = pod(name, CLIENT, ["sleep", "3600"], container={"resources": {"limits": limits}})
        body["metadata"]["namespace"] = SPACE
        kubectl.create(body)

    def counted(found: Object) -> bool:
        return bool(found.get("status", {}).get("used", {}).get(key) == str(memory))

    kubectl.until("counted", counted, "resourcequota", QUOTA, namespace=SPACE, seconds=SECONDS)
    more = slice_pod("more", "true")
    more["metadata"]["namespace"] = SPACE
    refused(lambda: kubectl.create(more), "exceeded quota", names.RESOURCE_TOTAL_MEMORY)
    for name in asked:
        kubectl.until("running", lambda found: phase(found) == "Running", "pod", name, namespace=SPACE, seconds=SECONDS)
    now = _described(node)
    added = {name: now[name] - before[name] for name in now}
    assert added == {names.RESOURCE_TOTAL_MEMORY: memory, names.RESOURCE_TOTAL_CORES: cores}, added
    kubectl.run("delete", "namespace", SPACE, timeout=SECONDS)
    return f"{memory} MiB of {memory + SPARE}, {cores} %"


def _described(node: Node) -> dict[str, int]:
    """Totals of requests under "Allocated resources" of `kubectl describe node`, equal to those of limits."""
    _, _, table = node.kubectl.run("describe", "node", NODE).partition("Allocated resources:")
    found = {}
    for line in table.splitlines():
        row = line.split()
        if row and row[0] in (names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_TOTAL_CORES):
            assert row[1] == row[2], line
            found[row[0]] = int(parse_quantity(row[1]))  # 3000 is written 3k
    return found
