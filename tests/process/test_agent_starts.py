"""From ids to a container that may start: identity, allocation, guard, preparation, and refusals."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from agent_world import MIB, NODE, A, B, MakeWorld, World, until

from device_plugin import cdi, selinux
from device_plugin.refusal import Refusal
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.devices import GpuSlice, Inventory
from vgpu.kube import writes
from vgpu.kubelet.podresources_v1 import api_pb2 as podresources
from vgpu.kubelet.podresources_v1.api_pb2_grpc import (
    PodResourcesListerServicer,
    add_PodResourcesListerServicer_to_server,
)

ID_A, ID_B = f"{A}::0", f"{B}::0"


def spec_env(world: World, name: str) -> dict[str, str]:
    body = json.loads(cdi.path(world.places.cdi, name).read_text())
    return dict(entry.split("=", 1) for entry in body["devices"][0]["containerEdits"]["env"])


def spec_mounts(world: World, name: str) -> dict[str, Path]:
    body = json.loads(cdi.path(world.places.cdi, name).read_text())
    return {m["containerPath"]: Path(m["hostPath"]) for m in body["devices"][0]["containerEdits"]["mounts"]}


def test_a_container_gets_its_slice_by_a_spec_of_its_own(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"main": [GpuSlice(B, mem=3000, cores=30), GpuSlice(A, mem=3000, cores=30)]})
    name = world.allocate(uid, "main", [ID_A, ID_B])
    assert not cdi.path(world.places.cdi, name).exists()
    world.starts.start([ID_B, ID_A])
    limits = world.limits(uid)
    assert [(card.uuid, card.memory, card.cores) for card in limits.cards] == [
        (A, 3000 * MIB, 30),
        (B, 3000 * MIB, 30),
    ]
    assert limits.core_policy == "fixed"
    mounts = spec_mounts(world, name)
    assert mounts["/run/vgpu/limits"] == world.root / "run" / "containers" / f"{uid}_main" / "limits"
    assert all(source.exists() for target, source in mounts.items() if target != "/run/vgpu/simulator")
    env = spec_env(world, name)
    assert env["NVIDIA_VISIBLE_DEVICES"] == f"{A},{B}"
    assert env["CUDA_DEVICE_MEMORY_LIMIT_1"] == "3000m"


CORES: dict[str, tuple[dict[str, dict[str, str]], dict[str, str], tuple[str, int, int]]] = {
    "nothing": ({}, {}, ("fixed", 0, 0)),
    "annotations": (
        {"annotations": {names.CORE_POLICY: "elastic", names.CORES_LIMIT: "80"}},
        {},
        ("elastic", 80, 0),
    ),
    "a ceiling below the guarantee": (
        {"annotations": {names.CORE_POLICY: "elastic", names.CORES_LIMIT: "10"}},
        {},
        ("elastic", 30, 0),
    ),
    "configuration": ({}, {"config": "corePolicy: elastic"}, ("elastic", 0, 0)),
    "annotation against configuration": (
        {"annotations": {names.CORE_POLICY: "fixed"}},
        {"config": "corePolicy: elastic"},
        ("fixed", 0, 0),
    ),
    "force": (
        {"annotations": {names.CORE_POLICY: "elastic"}, "env": {names.ENV_CORE_POLICY: "force"}},
        {},
        ("fixed", 0, 0),
    ),
    "disable": ({"env": {names.ENV_CORE_POLICY: "disable"}}, {}, ("fixed", 0, 0)),
    "disable where allowed": (
        {"env": {names.ENV_CORE_POLICY: "DISABLE"}},
        {"plugin": "allowDisableControl: true"},
        ("none", 0, 0),
    ),
    "default": (
        {"annotations": {names.CORE_POLICY: "elastic"}, "env": {names.ENV_CORE_POLICY: "default"}},
        {},
        ("elastic", 0, 0),
    ),
    "administrator": (
        {"annotations": {names.CORE_POLICY: "elastic"}, "env": {names.ENV_CORE_POLICY: "force"}},
        {"plugin": "disablecorelimit: true"},
        ("none", 0, 0),
    ),
    "low priority": ({"limits": {names.RESOURCE_PRIORITY: "1"}}, {}, ("fixed", 0, 1)),
}


@pytest.mark.parametrize("case", CORES)
def test_policy_ceiling_and_priority_reach_the_limits(make: MakeWorld, case: str) -> None:
    pod, settings, expected = CORES[case]
    world = make(**settings)
    uid = world.pod("p", {"main": [GpuSlice(A, mem=100, cores=30)]}, **pod)
    world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    limits = world.limits(uid)
    assert (limits.core_policy, limits.cards[0].cores_ceiling, limits.priority) == expected
    assert limits.cards[0].cores == 30


def test_files_have_the_modes_that_a_container_of_any_user_needs(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"main": [GpuSlice(A, mem=100)]})
    world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    folder = world.sandboxes.directory(uid, "main")
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert modes == {"limits": 0o644, "usage": 0o666}
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_no_folder_is_open_to_everybody(make: MakeWorld) -> None:
    before = os.umask(0)
    try:
        world = make("envvar")
        uid = world.pod("p", {"main": [GpuSlice(A, mem=100)]})
        world.allocate(uid, "main", [ID_A])
        world.starts.start([ID_A])
    finally:
        os.umask(before)
    made = [*(world.root / "run").rglob("*"), *world.places.library.rglob("*")]
    writable = [path for path in made if not path.is_symlink() and path.stat().st_mode & 0o022]
    assert writable == [world.sandboxes.directory(uid, "main") / "usage"]
    assert {path.stat().st_uid for path in made} == {os.getuid()}


def _labels_can_be_put(folder: Path) -> bool:
    try:
        os.setxattr(folder, selinux.ATTRIBUTE, b"x")
    except OSError:
        return False
    return True


def test_where_selinux_is_on_a_confined_container_may_use_its_files(make: MakeWorld, tmp_path: Path) -> None:
    if not _labels_can_be_put(tmp_path):
        pytest.skip("this user may not set security.selinux here")
    world = make("envvar")

    def start(name: str, device: str) -> list[Path]:
        uid = world.pod(name, {"main": [GpuSlice(A, mem=100)]})
        world.allocate(uid, "main", [device])
        world.starts.start([device])
        folder = world.sandboxes.directory(uid, "main")
        return [folder / "limits", folder / "usage", *world.granting.rollout.sources()]

    assert not [path for path in start("off", ID_A) if selinux.ATTRIBUTE in os.listxattr(path)]
    enforce = world.root / "host" / selinux.SELINUX / "enforce"
    enforce.parent.mkdir(parents=True)
    enforce.write_text("1")
    world.agent()
    mounted = start("on", f"{A}::1")
    simulator = world.granting.rollout.simulator
    assert simulator is not None
    for path in (*mounted, simulator / "libcuda.so.1"):
        assert os.getxattr(path, selinux.ATTRIBUTE) == selinux.CONTAINER_FILE.encode() + b"\0"


def test_starting_again_keeps_the_region_and_follows_the_record(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"main": [GpuSlice(A, mem=100)]})
    name = world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    inode = (world.sandboxes.directory(uid, "main") / "usage").stat().st_ino
    record = Allocation({"main": (GpuSlice(A, mem=200, cores=5),)})
    writes.patch_pod(world.client, "default", "p", {"annotations": {names.ALLOCATION: allocation.encode(record)}})
    until(lambda: (pod := world.pods.get(uid)) and "200" in pod.metadata.annotations[names.ALLOCATION])
    world.starts.start([ID_A])
    assert world.limits(uid).cards[0].memory == 200 * MIB
    assert (world.sandboxes.directory(uid, "main") / "usage").stat().st_ino == inode
    assert spec_env(world, name)["CUDA_DEVICE_SM_LIMIT"] == "5"


def test_an_allocation_that_comes_late_is_waited_for(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", None)
    world.allocate(uid, "main", [ID_A])
    text = allocation.encode(Allocation({"main": (GpuSlice(A, mem=100),)}))
    timer = threading.Timer(
        0.3, writes.patch_pod, (world.client, "default", "p", {"annotations": {names.ALLOCATION: text}})
    )
    timer.start()
    world.starts.start([ID_A])
    assert world.limits(uid).cards[0].memory == 100 * MIB


def test_a_pod_that_the_watch_has_not_told_yet_is_asked_for(make: MakeWorld) -> None:
    world = make()
    world.pods.stop()
    uid = world.pod("p", {"main": [GpuSlice(A, mem=100)]})
    assert list(world.starts.steer(1)) == [A]
    world.agent()
    world.pods.stop()
    world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    assert world.limits(uid).cards[0].memory == 100 * MIB


@pytest.mark.usefixtures("impatient")
def test_a_pod_that_nobody_placed_is_refused_told_and_evicted(make: MakeWorld) -> None:
    world = make()
    bare, owned = world.pod("bare", None), world.pod("owned", None, owner="ReplicaSet")
    for uid, device in ((bare, ID_A), (owned, ID_B)):
        name = world.allocate(uid, "main", [device])
        with pytest.raises(Refusal, match="vgpu-scheduler did not place it") as caught:
            world.starts.start([device])
        assert not caught.value.transient
        assert not cdi.path(world.places.cdi, name).exists()
        assert not world.sandboxes.directory(uid, "main").exists()
    until(lambda: len(world.events()) == 2)
    assert {event["reason"] for event in world.events()} == {"VgpuMismatch"}
    assert "schedulerName" in world.events()[0]["message"]
    until(
        lambda: (world.read_pod("owned") or {"metadata": {"deletionTimestamp": 1}})["metadata"].get("deletionTimestamp")
    )
    assert "deletionTimestamp" not in (world.read_pod("bare") or {})["metadata"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("slices", "text"),
    [
        ({"main": [GpuSlice(A, 100), GpuSlice(B, 100)]}, "1 cards, but its allocation has 2"),
        ({"main": [GpuSlice("GPU-cccc", 100)]}, "not a card of this node"),
        ({"other": [GpuSlice(A, 100)], "main": []}, "its allocation has 0"),
        ({"main": [GpuSlice(A, 100, cores=101)]}, "cores"),
    ],
)
def test_a_record_that_does_not_fit_is_never_a_limit(
    make: MakeWorld, slices: dict[str, list[GpuSlice]], text: str
) -> None:
    world = make()
    uid = world.pod("p", slices)
    name = world.allocate(uid, "main", [ID_A])
    with pytest.raises(Refusal, match=text):
        world.starts.start([ID_A])
    assert not cdi.path(world.places.cdi, name).exists()
    assert not (world.sandboxes.directory(uid, "main") / "limits").exists()


@pytest.mark.usefixtures("impatient")
def test_a_card_that_is_not_known_yet_ends_no_pod(make: MakeWorld) -> None:
    """An agent whose driver does not answer, before it knows what the previous agent published."""
    world = make()
    world.cards.found(Inventory(silent=(2,)))
    uid = world.pod("p", {"main": [GpuSlice("GPU-cccc", 100)]})
    world.allocate(uid, "main", [ID_A])
    with pytest.raises(Refusal, match="not a card of this node") as refused:
        world.starts.start([ID_A])
    assert refused.value.transient


@pytest.mark.usefixtures("impatient")
def test_a_malformed_record_is_refused_with_its_name(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"main": [GpuSlice(A, 100)]})
    world.allocate(uid, "main", [ID_A])
    writes.patch_pod(world.client, "default", "p", {"annotations": {names.ALLOCATION: "{"}})
    until(lambda: (found := world.pods.get(uid)) and found.metadata.annotations[names.ALLOCATION] == "{")
    with pytest.raises(Refusal, match=r"annotation vgpu\.io/allocation"):
        world.starts.start([ID_A])


@pytest.mark.usefixtures("impatient")
def test_ids_that_nobody_holds_are_refused(make: MakeWorld) -> None:
    world = make()
    with pytest.raises(Refusal, match="lists no container"):
        world.starts.start([ID_A])
    world.allocate("no-such-uid", "main", [ID_A])
    with pytest.raises(Refusal, match="no running pod"):
        world.starts.start([ID_A])


class SmallPodResources(PodResourcesListerServicer):
    """The kubelet's pod-resources with one container."""

    def __init__(self, pod: str, container: str, device_ids: list[str]) -> None:
        devices = podresources.ContainerDevices(resource_name=names.RESOURCE_GPU, device_ids=device_ids)
        holder = podresources.ContainerResources(name=container, devices=[devices])
        told = podresources.PodResources(name=pod, namespace="default", containers=[holder])
        self._answer = podresources.ListPodResourcesResponse(pod_resources=[told])

    def List(self, request: object, context: object) -> podresources.ListPodResourcesResponse:  # noqa: ARG002 signature of gRPC
        return self._answer


def test_without_a_checkpoint_pod_resources_tell_who_it_is(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"main": [GpuSlice(A, mem=100)]})
    name = world.allocate(uid, "main", [ID_A])
    (world.root / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint").write_text("{")
    (world.root / "kubelet" / "pod-resources").mkdir()
    server = grpc.server(ThreadPoolExecutor(1))
    add_PodResourcesListerServicer_to_server(SmallPodResources("p", "main", [ID_A]), server)
    server.add_insecure_port(f"unix://{world.root}/kubelet/pod-resources/kubelet.sock")
    server.start()
    try:
        world.starts.start([ID_A])
    finally:
        server.stop(None)
    assert spec_env(world, name)["CUDA_DEVICE_MEMORY_LIMIT_0"] == "100m"
    assert world.limits(uid).cards[0].memory == 100 * MIB


def test_init_and_app_container_with_the_same_ids_get_their_own_slices(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"first": [GpuSlice(A, 8000)], "main": [GpuSlice(A, 9000, cores=20)]}, init=["first"])
    first = world.allocate(uid, "first", [ID_A])
    main = world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    assert spec_env(world, first)["CUDA_DEVICE_MEMORY_LIMIT_0"] == "8000m"
    assert spec_env(world, main)["CUDA_DEVICE_MEMORY_LIMIT_0"] == "9000m"
    assert world.limits(uid, "first").cards[0].memory == 8000 * MIB
    assert world.limits(uid, "main").cards[0].memory == 9000 * MIB
    assert world.holdings.granted()[A].mem == 9000  # the peak: they never run at the same time


@pytest.mark.usefixtures("impatient")
def test_the_node_never_grants_more_than_the_card(make: MakeWorld) -> None:
    world = make()
    first = world.pod("first", {"main": [GpuSlice(A, mem=10000, cores=60)]})
    second = world.pod("second", {"main": [GpuSlice(A, mem=6000, cores=10)]})
    third = world.pod("third", {"main": [GpuSlice(A, mem=5000, cores=40)]})
    for number, uid in enumerate((first, second, third)):
        world.allocate(uid, "main", [f"{A}::{number}"])
    world.starts.start([f"{A}::0"])
    with pytest.raises(Refusal, match="15360 MiB of memory, 10000 held by other pods: 6000 more do not fit"):
        world.starts.start([f"{A}::1"])
    world.agent()  # a restart forgets nothing
    with pytest.raises(Refusal, match="6000 more do not fit"):
        world.starts.start([f"{A}::1"])
    world.starts.start([f"{A}::2"])
    world.finish_pod("first")
    until(lambda: (pod := world.pods.get(first)) and pod.finished)
    world.starts.start([f"{A}::1"])


def test_a_start_waits_for_the_predecessor_to_end(make: MakeWorld) -> None:
    world = make()
    world.allocate(world.pod("old", {"main": [GpuSlice(A, mem=10000)]}), "main", [ID_A])
    world.starts.start([ID_A])
    world.allocate(world.pod("new", {"main": [GpuSlice(A, mem=10000)]}), "main", [f"{A}::1"])
    timer = threading.Timer(0.4, world.delete_pod, ("old",))
    timer.start()
    world.starts.start([f"{A}::1"])


def test_ids_are_steered_to_the_cards_of_the_oldest_pod_that_waits(make: MakeWorld) -> None:
    world = make()
    assert list(world.starts.steer(1)) == []
    both = world.pod("both", {"first": [GpuSlice(A, 1)], "main": [GpuSlice(A, 1), GpuSlice(B, 1)]}, init=["first"])
    world.pod("young", {"main": [GpuSlice(B, 1)]})
    until(lambda: len(world.pods.all()) == 2)
    assert list(world.starts.steer(1)) == [A]
    assert list(world.starts.steer(2)) == [A, B]
    world.allocate(both, "first", [ID_A])
    assert list(world.starts.steer(1)) == [B]


@pytest.mark.parametrize(
    ("plugin", "flags"),
    [
        ("", (False, False)),
        ("fillsOn: engine, copiesOn: sms", (True, True)),
    ],
)
def test_what_makes_fills_and_copies_is_in_the_limits(make: MakeWorld, plugin: str, flags: tuple[bool, bool]) -> None:
    world = make(plugin=plugin)
    uid = world.pod("p", {"main": [GpuSlice(A, 1, cores=10)]})
    world.allocate(uid, "main", [ID_A])
    world.starts.start([ID_A])
    limits = world.limits(uid)
    assert (limits.fills_on_engine, limits.copies_on_sms) == flags


def test_what_is_left_of_a_pod_goes_with_it(make: MakeWorld) -> None:
    world = make()
    gone, stays = world.pod("gone", {"main": [GpuSlice(A, 1)]}), world.pod("stays", {"main": [GpuSlice(A, 1)]})
    names_given = [world.allocate(uid, "main", [f"{A}::{n}"]) for n, uid in enumerate((gone, stays))]
    for n in range(2):
        world.starts.start([f"{A}::{n}"])
    until(lambda: world.pods.synced)
    world.sweep.once(clean=True)
    assert world.sandboxes.directory(gone, "main").exists()
    world.delete_pod("gone")
    until(lambda: world.pods.get(gone) is None)
    world.sweep.once(clean=False)
    assert not world.sandboxes.directory(gone, "main").exists()
    assert world.sandboxes.directory(stays, "main").exists()
    assert [cdi.path(world.places.cdi, name).exists() for name in names_given] == [False, True]
    assert set(world.sandboxes.granted()) == {stays}


def test_metrics_know_a_container_before_it_starts(make: MakeWorld) -> None:
    world = make()
    uid = world.pod("p", {"first": [GpuSlice(A, 50)], "main": [GpuSlice(B, 100, cores=30)]}, init=["first"])
    until(lambda: world.pods.get(uid))
    world.sweep.once(clean=False)

    def limit(container: str, card: str) -> float | None:
        labels = {"node": NODE, "uuid": card, "namespace": "default", "pod": "p", "container": container}
        return world.exporter.registry.get_sample_value("vgpu_container_memory_limit_bytes", labels)

    assert (limit("first", A), limit("main", B)) == (50 * MIB, 100 * MIB)


def test_a_static_pod_is_refused_by_its_own_name(make: MakeWorld) -> None:
    """The kubelet knows the pod by the hash of its manifest; its mirror in the API server has another UID."""
    world = make()
    of_the_kubelet = "0123456789abcdef0123456789abcdef"
    mirror = {"kubernetes.io/config.hash": of_the_kubelet, "kubernetes.io/config.mirror": of_the_kubelet}
    uid = world.pod("static", {"main": [GpuSlice(A, 100)]})
    world.client.request(
        "PATCH",
        "/api/v1/namespaces/default/pods/static",
        body={"metadata": {"annotations": mirror}},
        content_type="application/merge-patch+json",
    )
    assert uid != of_the_kubelet
    world.allocate(of_the_kubelet, "main", [ID_A])
    until(lambda: any(pod.metadata.annotations.get("kubernetes.io/config.hash") for pod in world.pods.all()))
    with pytest.raises(Refusal, match="pod default/static is a static pod of the kubelet: no scheduler") as caught:
        world.starts.start([ID_A])
    assert not caught.value.transient


@pytest.mark.usefixtures("impatient")
def test_a_pod_without_a_mirror_may_be_a_static_one(make: MakeWorld) -> None:
    """Admission denies the mirror of a GPU pod, because it names its node."""
    world = make()
    world.allocate("unknown-uid", "main", [ID_A])
    with pytest.raises(Refusal, match=r"no running pod on this node for unknown-uid \(if this is a static pod"):
        world.starts.start([ID_A])
