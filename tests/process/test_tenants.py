"""Three pods on one card whose limits sum up to more than it has: each gets its limit, one all of it on the card."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vgpu import names
from vgpu.config import Config, DevicePlugin
from vgpu.standin.cluster import LocalCluster, scratch
from vgpu.standin.demo import Demo
from vgpu.workstation import host_memory

SCALING, HOST = 1.5, 9320  #: of a T4 with 14912 MiB: 7456 MiB, and a quarter more

HOST_MEMORY = re.compile(r'^vgpu_container_host_memory_bytes\{.*pod="(\w+)".*\} (\S+)$', re.MULTILINE)


def tenant(name: str, memory: int, **notes: str) -> dict[str, Any]:
    command = ["python3", "-m", "vgpu.probe", "--blocks", "128", "--over", "--hold", "4"]
    container = {"name": "main", "command": command, "resources": {"limits": {names.RESOURCE_MEMORY: memory}}}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "annotations": notes},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }


@pytest.mark.skipif(
    host_memory.read().available < HOST + 2000, reason="a part of the card's memory is that of this machine"
)
def test_nobody_is_refused_below_its_limit_and_what_is_guaranteed_is_on_the_card() -> None:
    plugin = DevicePlugin(deviceMemoryScaling=SCALING, hostMemory=HOST)
    pods = [
        tenant("movable", 9000, **{names.MEMORY_MODE: "movable"}),
        tenant("static", 9000),
        tenant("whole", 2500, **{names.OVERSUBSCRIBE: "false"}),
    ]
    with (
        tempfile.TemporaryDirectory(dir=scratch()) as folder,
        LocalCluster(Path(folder), simulate="T4", config=Config(device_plugin=plugin)) as cluster,
    ):
        capacity = cluster.node()["status"]["capacity"]
        assert capacity[names.RESOURCE_MEMORY] == str(14912 + 7456)
        most = dict.fromkeys(("movable", "static", "whole"), -1.0)

        def look(_: str) -> None:
            for pod, value in HOST_MEMORY.findall(cluster.metrics()):
                most[pod] = max(most[pod], float(value) / 2**20)

        found = Demo(cluster, pods).run(look)
    assert not found.problems
    assert [one.problems for one in found.findings] == [[], [], []]
    assert [(one.pod, one.over, one.data) for one in found.findings] == [
        (name, "CUDA_ERROR_OUT_OF_MEMORY", "right") for name in ("movable", "static", "whole")
    ]
    assert {one.pod: one.slice_.guarantee for one in found.findings} == {"movable": 6000, "static": 6000, "whole": 2500}
    assert most["whole"] == 0
    assert 3000 <= most["static"] <= 3000 + 512, "what is above the guarantee, and what would not fit into it"
