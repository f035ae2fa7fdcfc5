"""A device plugin for the tests of the kubelet stand-in: a process of its own, steered and read through files.

    python tiny_plugin.py PLUGIN_DIRECTORY CONTROL_DIRECTORY CDI_DIRECTORY

In the control directory: `devices.json` (id → [health, NUMA node or null]), `refuse` (its text refuses
PreStartContainer), `calls` (one JSON line [method, ids] per call), `nonce` (present: every Allocate answers a CDI name,
and PreStartContainer writes its spec).
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2, api_pb2_grpc

RESOURCE = "example.com/card"
SOCKET = "tiny.sock"


class Plugin(api_pb2_grpc.DevicePluginServicer):
    def __init__(self, control: Path, cdi_dir: Path) -> None:
        self.control = control
        self.cdi_dir = cdi_dir
        self.lock = threading.Lock()

    def note(self, method: str, ids: Any = ()) -> None:
        with self.lock, (self.control / "calls").open("a") as file:
            file.write(json.dumps([method, sorted(ids)]) + "\n")

    def GetDevicePluginOptions(self, *_: Any) -> api_pb2.DevicePluginOptions:
        self.note("GetDevicePluginOptions")
        return api_pb2.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    def ListAndWatch(self, _: Any, context: grpc.ServicerContext) -> Iterator[api_pb2.ListAndWatchResponse]:
        self.note("ListAndWatch")
        seen = None
        while context.is_active():
            text = (self.control / "devices.json").read_text()
            if text != seen:
                seen = text
                devices = [
                    api_pb2.Device(
                        ID=one,
                        health=health,
                        topology=api_pb2.TopologyInfo(nodes=[] if node is None else [api_pb2.NUMANode(ID=node)]),
                    )
                    for one, (health, node) in json.loads(text).items()
                ]
                yield api_pb2.ListAndWatchResponse(devices=devices)
            time.sleep(0.02)

    def GetPreferredAllocation(self, request: Any, _: Any) -> api_pb2.PreferredAllocationResponse:
        one = request.container_requests[0]
        self.note("GetPreferredAllocation", one.available_deviceIDs)
        must = list(one.must_include_deviceIDs)
        best = must + sorted(set(one.available_deviceIDs) - set(must))
        answer = api_pb2.ContainerPreferredAllocationResponse(deviceIDs=best[: one.allocation_size])
        return api_pb2.PreferredAllocationResponse(container_responses=[answer])

    def Allocate(self, request: Any, _: Any) -> api_pb2.AllocateResponse:
        ids = sorted(request.container_requests[0].devices_ids)
        self.note("Allocate", ids)
        answer = api_pb2.ContainerAllocateResponse(envs={"IDS": ",".join(ids)})
        if (self.control / "nonce").exists():
            answer.cdi_devices.add(name=f"example.com/card={'-'.join(ids)}")
        return api_pb2.AllocateResponse(container_responses=[answer])

    def PreStartContainer(self, request: Any, context: grpc.ServicerContext) -> api_pb2.PreStartContainerResponse:
        self.note("PreStartContainer", request.devices_ids)
        refusal = self.control / "refuse"
        if refusal.exists():
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal.read_text())
        if (self.control / "nonce").exists():
            name = "-".join(sorted(request.devices_ids))
            device = {"name": name, "containerEdits": {"env": [f"CDI_DEVICE={name}"]}}
            spec = {"cdiVersion": "0.7.0", "kind": "example.com/card", "devices": [device]}
            temporary = self.cdi_dir / f".{name}"
            temporary.write_text(json.dumps(spec))
            temporary.rename(self.cdi_dir / f"{name}.json")
        return api_pb2.PreStartContainerResponse()


def serve(directory: Path, plugin: Plugin) -> None:
    """Serves and registers; returns when its socket or the kubelet's socket was removed or replaced."""
    own, kubelet = directory / SOCKET, directory / "kubelet.sock"
    own.unlink(missing_ok=True)
    server = grpc.server(ThreadPoolExecutor(8))
    api_pb2_grpc.add_DevicePluginServicer_to_server(plugin, server)
    server.add_insecure_port(f"unix:{own}")
    server.start()
    try:
        before = kubelet.stat().st_ino
        with grpc.insecure_channel(f"unix:{kubelet}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            request = api_pb2.RegisterRequest(version="v1beta1", endpoint=SOCKET, resource_name=RESOURCE)
            api_pb2_grpc.RegistrationStub(channel).Register(request, timeout=5)
        while own.exists() and kubelet.stat().st_ino == before:
            time.sleep(0.02)
    except (OSError, grpc.RpcError):
        time.sleep(0.05)
    finally:
        server.stop(None).wait()


def main() -> None:
    directory, control, cdi_dir = map(Path, sys.argv[1:])
    plugin = Plugin(control, cdi_dir)
    while os.getppid() != 1:  # ends with the test that started it
        serve(directory, plugin)


if __name__ == "__main__":
    main()
