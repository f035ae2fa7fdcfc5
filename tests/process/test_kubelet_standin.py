"""The kubelet stand-in: protocol order with a plugin in a separate process, life of pods, restarts, kill -9."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tiny_plugin
from kube_world import SECONDS, World, pod

from vgpu.kube import writes
from vgpu.kubelet import checkpoint
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2, api_pb2_grpc
from vgpu.kubelet.podresources_v1 import api_pb2 as podresources
from vgpu.kubelet.podresources_v1 import api_pb2_grpc as podresources_grpc
from vgpu.standin.kubelet import Kubelet
from vgpu.standin.services import wait_for

NODE = "node-1"
CARD = tiny_plugin.RESOURCE


class Machine(World):
    """A node with a kubelet, and a plugin that is started on demand."""

    def __init__(self, folder: Path, root: Path) -> None:
        super().__init__(folder)
        self.root = root
        self.control = folder / "control"
        self.cdi_dir = folder / "cdi"
        self.control.mkdir()
        self.cdi_dir.mkdir()
        self.devices({f"id-{number}": ["Healthy", None] for number in range(4)})
        self.kubelet = Kubelet(self.client, NODE, root, self.cdi_dir)
        self.plugin: subprocess.Popen[bytes] | None = None

    def devices(self, devices: dict[str, list[Any]]) -> None:
        temporary = self.control / ".devices"
        temporary.write_text(json.dumps(devices))
        temporary.rename(self.control / "devices.json")

    def start_plugin(self) -> None:
        command = [tiny_plugin.__file__, str(self.root / "device-plugins"), str(self.control), str(self.cdi_dir)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.plugin = subprocess.Popen([sys.executable, *command], env=environment)

    def kill_plugin(self) -> None:
        assert self.plugin is not None
        self.plugin.send_signal(signal.SIGKILL)
        self.plugin.wait()

    def close(self) -> None:
        if self.plugin is not None and self.plugin.poll() is None:
            self.kill_plugin()
        self.kubelet.stop()
        super().close()

    def calls(self, *but: str) -> list[tuple[str, list[str]]]:
        """(method, ids) of the plugin's calls, without the methods in `but`."""
        path = self.control / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [(method, ids) for method, ids in found if method not in but]

    def cards(self) -> tuple[str | None, str | None]:
        """(capacity, allocatable) of the node in the API server."""
        status = self.node(NODE).get("status", {})
        return status.get("capacity", {}).get(CARD), status.get("allocatable", {}).get(CARD)

    def wait_cards(self, capacity: int, allocatable: int) -> None:
        wanted = (str(capacity), str(allocatable))
        wait_for(f"cards {wanted}", lambda: self.cards() == wanted, SECONDS)

    def run(self, manifest: dict[str, Any]) -> Any:
        """Creates a pod that is bound to the node."""
        made = self.create(manifest)
        writes.bind(self.client, "default", made["metadata"]["name"], made["metadata"]["uid"], NODE)
        return made

    def log(self, name: str, container: str = "main") -> str:
        path = self.root / "logs" / f"default_{name}_{container}.log"
        return path.read_text() if path.exists() else ""

    def checkpoint(self) -> checkpoint.Checkpoint:
        return checkpoint.read(self.root / "device-plugins" / checkpoint.FILE_NAME)


@pytest.fixture
def machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    root = tmp_path_factory.mktemp("k")  # short: it holds unix sockets
    machine = Machine(tmp_path, root)
    machine.kubelet.start()
    wait_for("the node", lambda: machine.get("/api/v1/nodes")["items"], SECONDS)
    yield machine
    machine.close()


@pytest.fixture
def plugged(machine: Machine) -> Machine:
    machine.start_plugin()
    machine.wait_cards(4, 4)
    return machine


def shell(text: str, **more: Any) -> dict[str, Any]:
    return {"command": ["sh", "-c", text], **more}


def test_registration_dials_back_before_it_answers(plugged: Machine) -> None:
    assert plugged.calls()[:2] == [("GetDevicePluginOptions", []), ("ListAndWatch", [])]


@pytest.mark.parametrize(
    ("version", "resource", "said"),
    [
        ("v1alpha1", "example.com/x", "is not supported by kubelet"),
        ("v1beta1", "cards", "is invalid"),
        ("v1beta1", "example.com/x", "failed to dial device plugin"),
    ],
)
def test_refused_registrations(
    machine: Machine, version: str, resource: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vgpu.standin.kubelet.pluginclient.DIAL_SECONDS", 0.2)
    with grpc.insecure_channel(f"unix:{machine.root}/device-plugins/kubelet.sock") as channel:
        request = api_pb2.RegisterRequest(version=version, endpoint="none.sock", resource_name=resource)
        with pytest.raises(grpc.RpcError) as error:
            api_pb2_grpc.RegistrationStub(channel).Register(request, timeout=SECONDS)
    assert said in str(error.value.details())


def test_order_of_calls_for_a_container(plugged: Machine) -> None:
    plugged.run(pod("a", limits={CARD: 2}, main=shell("echo got $IDS"), restartPolicy="Never"))
    plugged.wait_phase("a", "Succeeded")
    every = [f"id-{number}" for number in range(4)]
    assert plugged.calls()[2:] == [
        ("GetPreferredAllocation", every),
        ("Allocate", ["id-0", "id-1"]),
        ("PreStartContainer", ["id-0", "id-1"]),
    ]
    assert plugged.log("a") == "got id-0,id-1\n"


def test_preference_is_asked_even_when_every_id_is_needed(plugged: Machine) -> None:
    plugged.run(pod("a", limits={CARD: 4}, main=shell("true"), restartPolicy="Never"))
    plugged.wait_phase("a", "Succeeded")
    every = [f"id-{number}" for number in range(4)]
    assert plugged.calls()[2:4] == [("GetPreferredAllocation", every), ("Allocate", every)]


def test_init_containers_share_their_ids_with_the_app(plugged: Machine) -> None:
    card = {"resources": {"limits": {CARD: 1}}}
    first = [
        {"name": "first", **shell("echo $IDS", **card)},
        {"name": "side", "restartPolicy": "Always", **shell("echo $IDS; exec sleep 60", **card)},
        {"name": "second", **shell("echo $IDS", **card)},
    ]
    plugged.run(pod("a", limits={CARD: 1}, main=shell("echo $IDS"), initContainers=first, restartPolicy="Never"))
    plugged.wait_phase("a", "Succeeded")
    ids = {name: plugged.log("a", name).strip() for name in ("first", "side", "second", "main")}
    # The sidecar takes the ids that the first container leaves, and keeps them.
    assert ids["first"] == ids["side"]
    assert ids["second"] == ids["main"]
    assert ids["first"] != ids["main"]
    allocated = [call for call in plugged.calls() if call[0] == "Allocate"]
    assert [one for _, (one,) in allocated] == [ids["first"], ids["side"], ids["second"], ids["main"]]
    started = [one for method, (one,) in plugged.calls("GetDevicePluginOptions", "ListAndWatch", "Allocate",
                                                       "GetPreferredAllocation")]  # fmt: skip
    assert started == [ids["first"], ids["side"], ids["second"], ids["main"]]


def test_checkpoint_tells_who_holds_what(plugged: Machine) -> None:
    plugged.devices({"id-0": ["Healthy", 0], "id-1": ["Healthy", 1]})
    plugged.wait_cards(2, 2)
    init = {"name": "init", **shell("true", resources={"limits": {CARD: 2}})}
    made = plugged.run(pod("a", limits={CARD: 2}, initContainers=[init]))
    plugged.wait_phase("a", "Running")
    uid = made["metadata"]["uid"]
    found = plugged.checkpoint()
    assert found.holders(CARD, ["id-0", "id-1"]) == [(uid, "init"), (uid, "main")]
    assert found.entries[0].DeviceIDs == {"0": ["id-0"], "1": ["id-1"]}
    assert dict(found.entries[1].response.envs) == {"IDS": "id-0,id-1"}
    assert set(found.registered[CARD] or ()) == {"id-0", "id-1"}


def test_pod_resources_leave_init_containers_out(plugged: Machine) -> None:
    init = {"name": "init", **shell("true", resources={"limits": {CARD: 1}})}
    plugged.run(pod("a", limits={CARD: 1}, initContainers=[init]))
    plugged.wait_phase("a", "Running")
    with grpc.insecure_channel(f"unix:{plugged.root}/pod-resources/kubelet.sock") as channel:
        stub: Any = podresources_grpc.PodResourcesListerStub(channel)
        (listed,) = stub.List(podresources.ListPodResourcesRequest(), timeout=SECONDS).pod_resources
        every = stub.GetAllocatableResources(podresources.AllocatableResourcesRequest(), timeout=SECONDS).devices
        one = stub.Get(podresources.GetPodResourcesRequest(pod_name="a", pod_namespace="default"), timeout=SECONDS)
        with pytest.raises(grpc.RpcError, match="pod default/b not found"):
            stub.Get(podresources.GetPodResourcesRequest(pod_name="b", pod_namespace="default"), timeout=SECONDS)
    assert (listed.namespace, listed.name) == ("default", "a")
    assert [(c.name, [(d.resource_name, list(d.device_ids)) for d in c.devices]) for c in listed.containers] == [
        ("main", [(CARD, ["id-0"])])
    ]
    assert one.pod_resources == listed
    assert [list(device.device_ids) for device in every] == [[f"id-{number}"] for number in range(4)]


def test_refused_start_is_told_and_tried_again(plugged: Machine) -> None:
    (plugged.control / "refuse").write_text("no allocation of this pod is known")
    plugged.run(pod("a", limits={CARD: 1}, main=shell("echo ran"), restartPolicy="Never"))

    def waiting() -> Any:
        statuses = plugged.pod("a").get("status", {}).get("containerStatuses") or [{}]
        return statuses[0].get("state", {}).get("waiting", {})

    wait_for("the reason", lambda: "no allocation of this pod is known" in waiting().get("message", ""), SECONDS)
    assert waiting()["reason"] == "CreateContainerConfigError"
    wait_for("the event", lambda: plugged.events("a"), SECONDS)
    reason, message = plugged.events("a")[0]
    assert reason == "Failed"
    assert "rpc error: code = FailedPrecondition desc = no allocation of this pod is known" in message
    assert plugged.log("a") == ""
    (plugged.control / "refuse").unlink()
    plugged.wait_phase("a", "Succeeded")
    assert plugged.log("a") == "ran\n"
    assert len([call for call in plugged.calls() if call[0] == "Allocate"]) == 1


def test_cdi_spec_of_pre_start_is_seen_in_the_same_create(plugged: Machine) -> None:
    (plugged.control / "nonce").touch()
    plugged.run(pod("a", limits={CARD: 2}, main=shell("echo $CDI_DEVICE"), restartPolicy="Never"))
    plugged.wait_phase("a", "Succeeded")
    assert plugged.log("a") == "id-0-id-1\n"


def test_restarted_container_gets_the_cached_answer(plugged: Machine) -> None:
    plugged.run(pod("a", limits={CARD: 1}, main=shell("echo $IDS; test -e twice || { touch twice; exit 3; }"),
                    restartPolicy="OnFailure"))  # fmt: skip
    status = plugged.wait_phase("a", "Succeeded")["status"]["containerStatuses"][0]
    assert plugged.log("a") == "id-0\nid-0\n"
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert [method for method, _ in plugged.calls()[2:]] == [
        "GetPreferredAllocation", "Allocate", "PreStartContainer", "PreStartContainer",
    ]  # fmt: skip


def test_killed_plugin_leaves_nothing_allocatable_until_it_is_back(plugged: Machine) -> None:
    plugged.run(pod("a", limits={CARD: 1}))
    plugged.wait_phase("a", "Running")
    plugged.kill_plugin()
    plugged.wait_cards(4, 0)
    plugged.run(pod("b", limits={CARD: 1}))
    rejected = plugged.wait_phase("b", "Failed")["status"]
    assert rejected["reason"] == f"OutOf{CARD}"
    assert plugged.phase("a") == "Running"
    plugged.start_plugin()
    plugged.wait_cards(4, 4)
    plugged.run(pod("c", limits={CARD: 1}))
    plugged.wait_phase("c", "Running")
    held = [one for entry in plugged.checkpoint().entries for one in entry.ids]
    assert sorted(held) == ["id-0", "id-1"]


def test_unhealthy_ids_lower_allocatable(plugged: Machine) -> None:
    plugged.devices({"id-0": ["Unhealthy", None], "id-1": ["Healthy", None]})
    plugged.wait_cards(2, 1)
    plugged.run(pod("a", limits={CARD: 1}, main=shell("echo $IDS"), restartPolicy="Never"))
    plugged.wait_phase("a", "Succeeded")
    assert plugged.log("a") == "id-1\n"


def test_ids_of_finished_and_deleted_pods_are_given_again(plugged: Machine) -> None:
    for name in ("a", "b", "c"):
        plugged.run(pod(name, limits={CARD: 4}, main=shell("echo $IDS"), restartPolicy="Never"))
        plugged.wait_phase(name, "Succeeded")
    long = plugged.run(pod("d", limits={CARD: 4}, terminationGracePeriodSeconds=1))
    plugged.wait_phase("d", "Running")
    writes.delete_pod(plugged.client, "default", "d", long["metadata"]["uid"])
    plugged.wait_phase("d", "gone")
    plugged.run(pod("e", limits={CARD: 4}))
    plugged.wait_phase("e", "Running")


def test_kubelet_restart_wipes_sockets_and_keeps_containers(plugged: Machine) -> None:
    made = plugged.run(pod("a", limits={CARD: 1}, main=shell("echo $IDS; exec sleep 60")))
    plugged.wait_phase("a", "Running")
    before = plugged.pod("a")["status"]["containerStatuses"][0]["containerID"]
    registered = len([call for call in plugged.calls() if call[0] == "ListAndWatch"])
    left_over = plugged.root / "device-plugins" / "other.sock"
    left_over.touch()
    plugged.kubelet.restart()
    assert not left_over.exists()
    wait_for(
        "the plugin to register again",
        lambda: len([call for call in plugged.calls() if call[0] == "ListAndWatch"]) > registered,
        SECONDS,
    )
    plugged.wait_cards(4, 4)
    assert plugged.checkpoint().holders(CARD, ["id-0"]) == [(made["metadata"]["uid"], "main")]
    now = plugged.pod("a")["status"]
    assert (now["phase"], now["containerStatuses"][0]["containerID"]) == ("Running", before)
    plugged.run(pod("b", limits={CARD: 3}, main=shell("echo $IDS"), restartPolicy="Never"))
    plugged.wait_phase("b", "Succeeded")
    assert plugged.log("b") == "id-1,id-2,id-3\n"


def test_restart_admits_running_pods_again(plugged: Machine) -> None:
    """If the published capacity falls below what a running pod holds, a restart of the kubelet kills the pod."""
    writes.patch_node_capacity(plugged.client, NODE, {"vgpu.io/memory": "5000", "vgpu.io/cores": "100"})

    def allocatable() -> Any:
        return plugged.node(NODE)["status"]["allocatable"].get("vgpu.io/memory")

    wait_for("the copy", lambda: allocatable() == "5k", SECONDS)
    plugged.run(pod("a", limits={CARD: 1, "vgpu.io/memory": 3000}))
    plugged.wait_phase("a", "Running")
    plugged.kubelet.restart()
    plugged.wait_cards(4, 4)
    assert plugged.phase("a") == "Running"
    writes.patch_node_capacity(plugged.client, NODE, {"vgpu.io/memory": "2000"})
    wait_for("the copy", lambda: allocatable() == "2k", SECONDS)
    plugged.kubelet.restart()
    assert plugged.wait_phase("a", "Failed")["status"]["reason"] == "OutOfvgpu.io/memory"


def test_published_capacity_is_zeroed_when_the_checkpoint_is_lost(plugged: Machine) -> None:
    writes.patch_node_capacity(plugged.client, NODE, {"vgpu.io/memory": "5000"})
    (plugged.root / "device-plugins" / checkpoint.FILE_NAME).unlink()
    plugged.kubelet.restart()

    def memory() -> Any:
        return plugged.node(NODE)["status"]["capacity"].get("vgpu.io/memory")

    wait_for("zero", lambda: memory() == "0", SECONDS)
    plugged.wait_cards(4, 4)


def test_exit_codes_and_signals(machine: Machine) -> None:
    machine.run(pod("ok", main=shell("exit 0"), restartPolicy="Never"))
    machine.run(pod("bad", main=shell("exit 7"), restartPolicy="Never"))
    machine.run(pod("killed", main=shell("kill -9 $$$$"), restartPolicy="Never"))
    for name, phase, code in (("ok", "Succeeded", 0), ("bad", "Failed", 7), ("killed", "Failed", 137)):
        ended = machine.wait_phase(name, phase)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert ended["exitCode"] == code


def test_failing_init_container_keeps_the_app_from_starting(machine: Machine) -> None:
    init = [{"name": "init", **shell("echo once >> $HOME_LOG; exit 1", env=[{"name": "HOME_LOG", "value": "log"}])}]
    machine.run(pod("a", main=shell("echo app"), initContainers=init, restartPolicy="Never"))
    machine.wait_phase("a", "Failed")
    assert machine.log("a") == ""


def test_sidecars_end_after_the_app(machine: Machine) -> None:
    side = [{"name": "side", "restartPolicy": "Always",
             **shell("trap 'echo told; exit 0' TERM; echo up; while :; do sleep 0.05; done")}]  # fmt: skip
    main = shell("while ! grep -q up ../../../logs/default_a_side.log; do sleep 0.05; done")
    machine.run(pod("a", main=main, initContainers=side, restartPolicy="Never"))
    machine.wait_phase("a", "Succeeded")
    assert machine.log("a", "side") == "up\ntold\n"


def test_deletion_asks_first_and_kills_after_the_grace_period(machine: Machine) -> None:
    text = "trap 'echo told' TERM; echo up; while :; do sleep 0.05; done"
    made = machine.run(pod("a", main=shell(text), terminationGracePeriodSeconds=1))
    wait_for("the trap", lambda: machine.log("a"), SECONDS)
    writes.delete_pod(machine.client, "default", "a", made["metadata"]["uid"])
    machine.wait_phase("a", "gone")
    assert machine.log("a") == "up\ntold\n"


def test_processes_of_a_container_end_with_it(machine: Machine) -> None:
    machine.run(pod("a", main=shell("sleep 300 & echo $!"), restartPolicy="Never"))
    machine.wait_phase("a", "Succeeded")
    child = int(machine.log("a"))
    wait_for("the child to end", lambda: not Path(f"/proc/{child}").exists() or _zombie(child), SECONDS)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_kubelet_lives_through_an_api_server_restart(machine: Machine) -> None:
    release = machine.folder / "release"
    machine.run(pod("a", main=shell(f"while ! test -e {release}; do sleep 0.05; done"), restartPolicy="Never"))
    machine.wait_phase("a", "Running")
    machine.server.stop()
    release.touch()
    machine.restart()
    machine.wait_phase("a", "Succeeded")


def test_kubelet_waits_for_an_api_server_that_is_not_there_yet(tmp_path: Path, tmp_path_factory: Any) -> None:
    world = World(tmp_path)
    world.server.stop()
    kubelet = Kubelet(world.client, NODE, tmp_path_factory.mktemp("k"), tmp_path)
    kubelet.start()
    try:
        world.restart()
        wait_for("the node", lambda: world.get("/api/v1/nodes")["items"], SECONDS)
    finally:
        kubelet.stop()
        world.close()


def test_long_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long for a unix socket"):
        Kubelet(None, NODE, tmp_path / ("x" * 90), tmp_path)  # type: ignore[arg-type]  # no request is made
