"""Modes on one node: chosen from what kubelet, container runtime and NVIDIA's settings say, and the answer of each
mode.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from agent_world import MIB, NODE, A, B, MakeWorld, World, until
from cri_world import SmallRuntime
from tools import elf

from device_plugin import cri, granting, modes, plugin
from device_plugin.container_edits import DeviceNode
from device_plugin.refusal import Refusal
from vgpu import names
from vgpu.devices import GpuSlice
from vgpu.inventory import Reading
from vgpu.kube import writes

ID_A, ID_B = f"{A}::0", f"{B}::0"
NVIDIA = {"containerd": {"defaultRuntimeName": "nvidia", "runtimes": {"nvidia": {"options": {}}}}, "enableCDI": True}


@pytest.fixture
def world(make: MakeWorld) -> World:
    return make("auto")


@pytest.fixture
def runtime(world: World) -> Iterator[SmallRuntime]:
    made = SmallRuntime(world.root / "host" / cri.SOCKETS[0])
    made.config = {**NVIDIA, "cdiSpecDirs": [str(world.places.cdi)]}
    made.start()
    yield made
    made.stop()


def settings(world: World, **values: bool) -> None:
    file = world.root / "host" / modes.TOOLKIT_FILES[0].lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    keys = {"unprivileged": modes.UNPRIVILEGED, "mounts": modes.VOLUME_MOUNTS}
    file.write_text("".join(f"{keys[key]} = {str(value).lower()}\n" for key, value in values.items()))


def condition(world: World, type_: str = names.CONDITION_UNENFORCED) -> dict[str, Any]:
    node = msgspec.json.decode(world.client.get(f"/api/v1/nodes/{NODE}"))
    found = [one for one in node.get("status", {}).get("conditions", ()) if one["type"] == type_]
    return found[0] if found else {}


def told(world: World) -> str:
    node = msgspec.json.decode(world.client.get(f"/api/v1/nodes/{NODE}"))
    return str(node["metadata"].get("annotations", {}).get(names.MODE))


def metric(world: World) -> float | None:
    return world.exporter.registry.get_sample_value("vgpu_node_unenforced", {"node": NODE})


def test_an_unsafe_setting_is_a_condition_an_event_and_a_metric_until_it_is_fixed(
    world: World, runtime: SmallRuntime
) -> None:
    settings(world, unprivileged=False, mounts=True)
    assert world.enforcement.once()
    assert condition(world) == {}
    assert metric(world) == 0
    settings(world, mounts=True)
    writes.patch_node_condition(world.client, NODE, "Ready", "True", "KubeletReady", "the kubelet's own")
    assert world.enforcement.once()
    first = condition(world)
    assert (first["status"], first["reason"]) == ("True", "UnsafeRuntimeSetting")
    assert f"set {modes.UNPRIVILEGED} = false" in first["message"]
    assert metric(world) == 1
    until(lambda: [event["reason"] for event in world.events()] == ["VgpuUnenforced"])
    world.enforcement.once()
    assert condition(world) == first
    settings(world, unprivileged=False, mounts=True)
    world.enforcement.once()
    assert condition(world)["status"] == "False"
    assert metric(world) == 0
    node = msgspec.json.decode(world.client.get(f"/api/v1/nodes/{NODE}"))
    assert [one["type"] for one in node["status"]["conditions"]] == ["Ready", "VgpuUnenforced"]
    runtime.stop()


def test_the_mode_follows_the_runtime_and_waits_for_nobody(world: World, runtime: SmallRuntime) -> None:
    assert world.starts.answer([ID_A]).cdi_names
    world.enforcement.once()
    assert told(world) == "cdi: kubelet and container runtime support CDI"
    runtime.version, runtime.config = "1.6.20~ds1", {key: value for key, value in NVIDIA.items() if key != "enableCDI"}
    settings(world, unprivileged=False, mounts=True)
    world.enforcement.once()
    assert told(world).startswith("envvar: containerd 1.6.20~ds1 does not support CDI, ")
    answer = world.starts.answer([ID_A])
    assert not answer.cdi_names
    assert answer.env["LD_LIBRARY_PATH"]  # simulated cards bring their driver
    world.api.stop()
    # the API server's answer is remembered, and not requested again for each container
    assert not world.enforcement.once()
    assert world.enforcement.current.strategy == "envvar"


def test_without_a_runtime_to_ask_the_kubelets_word_counts(world: World) -> None:
    body = {"status": {"nodeInfo": {"kubeletVersion": "v1.34.4", "containerRuntimeVersion": "containerd://1.6.20~ds1"}}}
    world.client.request(
        "PATCH", f"/api/v1/nodes/{NODE}/status", body=body, content_type="application/merge-patch+json"
    )
    assert world.enforcement.current.strategy == "device-specs"
    assert "containerd 1.6.20~ds1 does not support CDI" in world.enforcement.current.reason


def test_device_specs_give_nodes_and_driver_files(make: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make("device-specs")
    world.places = msgspec.structs.replace(world.places, simulator_state=None, built_simulator=None)
    world.agent()
    monkeypatch.setattr(granting, "readings", lambda: {A: Reading(0, 0.0, 4), B: Reading(0, 0.0, 7)})
    host = world.root / "host"
    elf.write(host / "usr/lib64/libcuda.so.1")
    for file in ("dev/nvidia4", "dev/nvidia7", "dev/nvidiactl"):
        (host / file).parent.mkdir(parents=True, exist_ok=True)
        (host / file).touch()
    uid = world.pod("p", {"main": [GpuSlice(A, 100)]})
    world.allocate(uid, "main", [ID_A])
    answer = world.starts.answer([ID_A])
    assert answer.devices == (
        DeviceNode("/dev/nvidia4", "/dev/nvidia4"),
        DeviceNode("/dev/nvidiactl", "/dev/nvidiactl"),
    )
    wire = plugin.response(answer)
    assert [(one.host_path, one.permissions) for one in wire.devices] == [
        ("/dev/nvidia4", "rw"),
        ("/dev/nvidiactl", "rw"),
    ]
    assert {one.container_path: one.host_path for one in wire.mounts}["/usr/local/nvidia/lib64/libcuda.so.1"] == (
        "/usr/lib64/libcuda.so.1"
    )
    assert wire.envs["NVIDIA_VISIBLE_DEVICES"] == "void"
    world.starts.start([ID_A])
    assert world.limits(uid).cards[0].memory == 100 * MIB
    (host / "usr/lib64/libcuda.so.1").unlink()  # another driver: the cached answer names a file that is gone
    with pytest.raises(Refusal, match=r"libcuda\.so\.1, which the driver of the node no longer has") as caught:
        world.starts.start([ID_A])
    assert not caught.value.transient
    (host / "dev/nvidia7").unlink()
    with pytest.raises(OSError, match="device node /dev/nvidia7 is missing"):
        world.starts.answer([ID_B])


@pytest.mark.parametrize("strategy", ["device-specs", "cdi"])
def test_a_driver_that_is_not_found_is_refused_and_shown_until_it_is_there(
    make: MakeWorld, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its libraries, a program would find no card, or use a libcuda of its image that fits another driver."""
    world = make(strategy)
    place = msgspec.structs.replace(world.places.driver_at, specs=())
    world.places = msgspec.structs.replace(world.places, simulator_state=None, built_simulator=None, driver_at=place)
    world.agent()
    monkeypatch.setattr(granting, "readings", lambda: {A: Reading(0, 0.0, 4), B: Reading(0, 0.0, 7)})
    host = world.root / "host"
    (host / "dev").mkdir(parents=True)
    (host / "dev" / "nvidia4").touch()
    uid = world.pod("p", {"main": [GpuSlice(A, 100)]})
    world.enforcement.once()
    shown = condition(world, names.CONDITION_DRIVERLESS)
    assert (shown["status"], shown["reason"]) == ("True", "DriverLibrariesMissing")
    assert "set devicePlugin.driverRoot to the driver's folder" in shown["message"]
    until(lambda: names.CONDITION_DRIVERLESS in [event["reason"] for event in world.events()])

    # Not at Allocate: the pod would end as Failed, and its controller would recreate it at once.
    world.allocate(uid, "main", [ID_A])
    with pytest.raises((OSError, Refusal), match=r"cannot find .* libcuda\.so\.1 on the node"):
        world.starts.start([ID_A])
    elf.write(host / "usr/local/lib/libcuda.so.1")
    world.enforcement.once()
    assert condition(world, names.CONDITION_DRIVERLESS)["status"] == "False"
    if strategy == "device-specs":  # the kubelet uses its stored answer again, which has no libraries
        with pytest.raises(Refusal, match="recreate the pod") as caught:
            world.starts.start([ID_A])
        assert not caught.value.transient
        world.forget(uid)
        world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    assert world.limits(uid).cards[0].memory == 100 * MIB
