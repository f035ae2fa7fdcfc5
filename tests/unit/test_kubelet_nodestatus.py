"""The stand-in kubelet's picture of its node: an answer and the watch report the same changes, in any order."""

from pathlib import Path

from vgpu.kube.client import KubeClient
from vgpu.kube.objects import Meta, RawObject
from vgpu.standin.apiserver import ApiServer
from vgpu.standin.kubelet.nodestatus import NodeStatus


def node(version: int, memory: str) -> RawObject:
    return RawObject(Meta(name="n", resourceVersion=str(version)), status={"allocatable": {"vgpu.io/memory": memory}})


def test_an_older_answer_does_not_replace_what_the_watch_has_told(tmp_path: Path) -> None:
    ApiServer().write_kubeconfig(tmp_path / "kubeconfig")
    status = NodeStatus(KubeClient.connect(tmp_path / "kubeconfig"), "n", lambda: ({}, {}))
    status._seen("set", node(11, "new"))
    status._take(node(10, "old"))
    assert status.allocatable() == {"vgpu.io/memory": "new"}
    status._take(node(12, "newest"))
    assert status.allocatable() == {"vgpu.io/memory": "newest"}
