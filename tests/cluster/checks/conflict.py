"""Another device plugin that takes over the same resource at the kubelet."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from tests.cluster.checks import doctor
from tests.cluster.checks.chart import CARDS, SPLIT
from tests.cluster.checks.faults import kill
from tests.cluster.checks.health import runs_on
from tests.cluster.checks.records import Records, cards
from tests.cluster.checks.sight import SEEN, last_words
from tests.cluster.credentials import NODE
from tests.cluster.images import CLIENT
from tests.cluster.kubectl import Object, phase, pod
from tests.cluster.node import Node
from tests.cluster.settings import KUBELET_ROOT
from vgpu import names
from vgpu.kubelet import checkpoint
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2_grpc as rpc

FOLDER: Final = Path(KUBELET_ROOT) / "device-plugins"
SOCKET: Final = "another.sock"
IDS: Final = 3  #: number of ids that it offers
MIB: Final = 900
SECONDS: Final = 120


class Another(rpc.DevicePluginServicer):
    """Offers its own ids as long as the kubelet listens, or until `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def GetDevicePluginOptions(self, *_: Any) -> api.DevicePluginOptions:
        return api.DevicePluginOptions()

    def ListAndWatch(self, _: Any, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:
        context.add_callback(self.over.set)
        yield api.ListAndWatchResponse(devices=[api.Device(ID=f"x-{at}", health="Healthy") for at in range(IDS)])
        self.over.wait()


def same_resource(node: Node) -> str:
    """The node and the doctor report it, running pods go on, and the agent takes the resource back by itself."""
    kubectl = node.kubectl
    begin = time.monotonic()
    with Records(kubectl.kubeconfig, cards(node)) as records:
        kubectl.create(_pod("before", ["sleep", "3600"]))
        before = kubectl.until("running", lambda one: phase(one) == "Running", "pod", "before", seconds=SECONDS)
        with _another():
            sentence = _condition(node, "True")
            assert "conflict" in {one.area for one in doctor.wrong(node)}, "the doctor says nothing of it"
            kubectl.until("offering our slices again", _offers_ours, "node", NODE, seconds=SECONDS)
            kubectl.create(_pod("after", ["sh", "-c", f"{SEEN} > /dev/termination-log"]))
            found = kubectl.until("done", lambda one: phase(one) == "Succeeded", "pod", "after", seconds=SECONDS)
            assert last_words(found) == f"{MIB}\n", last_words(found)
        # When any plugin of a resource ends, kubelets before 1.37 drop the plugin that registered last
        kubectl.until("offering our slices", _offers_ours, "node", NODE, seconds=SECONDS)
        runs_on(node, before)
        assert not records.over, f"{len(records.over)} states with too much: {records.over[0]}"
        kubectl.delete("pod", "before", "after")
    took = time.monotonic() - begin
    # This agent would report the conflict for ten minutes; a new agent has lost nothing yet
    kill("vgpu-device-plugin", "--node-name=")
    _condition(node, "False")
    return f"{sentence}; the resource was taken back, {took:.0f} s in all"


@contextmanager
def _another() -> Iterator[Another]:
    """Serves and registers the other plugin."""
    plugin, server = Another(), grpc.server(ThreadPoolExecutor(4))
    rpc.add_DevicePluginServicer_to_server(plugin, server)
    server.add_insecure_port(f"unix://{FOLDER / SOCKET}")
    server.start()
    try:
        with grpc.insecure_channel(f"unix://{FOLDER}/kubelet.sock") as channel:
            request = api.RegisterRequest(version="v1beta1", endpoint=SOCKET, resource_name=names.RESOURCE_GPU)
            rpc.RegistrationStub(channel).Register(request, timeout=30)
        yield plugin
    finally:
        plugin.over.set()
        server.stop(None).wait()
        (FOLDER / SOCKET).unlink(missing_ok=True)


def _pod(name: str, command: list[str]) -> Object:
    limits = {names.RESOURCE_GPU: 1, names.RESOURCE_MEMORY: MIB}
    return pod(name, CLIENT, command, container={"resources": {"limits": limits}})


def _offers_ours(found: Object) -> bool:
    """Whether the node offers our ids, and the kubelet, from whose list the node's is made some seconds later."""
    status = found["status"]
    offered = {int(status[each].get(names.RESOURCE_GPU, 0)) for each in ("capacity", "allocatable")}
    listed = checkpoint.read(FOLDER / checkpoint.FILE_NAME).registered[names.RESOURCE_GPU]
    return offered == {CARDS * SPLIT} and not any(one.startswith("x-") for one in listed)


def _condition(node: Node, wanted: str) -> str:
    """The message of VgpuConflict once it has this status."""

    def has(found: Object) -> bool:
        return any(one["type"] == names.CONDITION_CONFLICT and one["status"] == wanted for one in conditions(found))

    def conditions(found: Object) -> list[Object]:
        return list(found["status"].get("conditions", ()))

    found = node.kubectl.until(f"{names.CONDITION_CONFLICT} {wanted}", has, "node", NODE, seconds=SECONDS)
    (message,) = (one["message"] for one in conditions(found) if one["type"] == names.CONDITION_CONFLICT)
    return str(message)
