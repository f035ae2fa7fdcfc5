"""The doctor's findings: it finds every fault with a remedy, and calls nothing else wrong."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from scheduler import pki
from vgpu import names
from vgpu.devices import Gpu, Inventory, encode_inventory
from vgpu.doctor import cluster, host
from vgpu.doctor.cluster import AGENT, SCHEDULER, Cluster, Part, Trial, Webhook
from vgpu.doctor.findings import Finding, some
from vgpu.doctor.host import Host, Kubelet
from vgpu.kube.objects import Condition, Meta, Node, NodeInfo, NodeStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MATERIAL = pki.renewed(None, ["vgpu-scheduler.gpu.svc"], NOW)
OTHER = pki.renewed(None, ["vgpu-scheduler.gpu.svc"], NOW)
ELSEWHERE = pki.renewed(None, ["somebody.else.svc"], NOW)
HOOK = Webhook("vgpu-scheduler", "gpu/vgpu-scheduler", MATERIAL.authorities.encode())
STOCK = "registry.k8s.io/kube-scheduler:v1.36.3"


def node(name: str = "n1", *, capacity: str = "20", runtime: str = "containerd://2.3.7", **more: Any) -> Node:
    cards = Inventory(
        tuple(Gpu(f"GPU-{name}-{n}", n, "Tesla T4", 15360) for n in range(2)), driver="550.54", cuda="12.4"
    )
    notes = {names.DEVICES: encode_inventory(cards), names.MODE: more.pop("mode", "cdi: it is known")}
    status = NodeStatus(
        {names.RESOURCE_GPU: capacity}, nodeInfo=NodeInfo(more.pop("kubelet", "v1.36.3"), runtime), **more
    )
    return Node(Meta(name=name, annotations=notes), status=status)


HEALTHY = Cluster(
    version="v1.36.3",
    webhooks=(HOOK,),
    parts=(
        Part(SCHEDULER, "gpu/vgpu-scheduler-1", "n0", True, "0.1.0", (STOCK, "vgpu/vgpu:0.1.0")),
        Part(AGENT, "gpu/vgpu-device-plugin-1", "n1", True, "0.1.0", ("vgpu/vgpu:0.1.0",)),
    ),
    nodes=(node(), Node(Meta(name="n0"))),
    trial=Trial(True),
    served=MATERIAL.certificate.encode(),
)


def examine(facts: Cluster) -> list[Finding]:
    return cluster.examine(facts, NOW + timedelta(days=1), "0.1.0")


def changed(**fields: Any) -> Cluster:
    return msgspec.structs.replace(HEALTHY, **fields)


def part(at: int, **fields: Any) -> tuple[Part, ...]:
    return tuple(
        msgspec.structs.replace(each, **fields) if number == at else each
        for number, each in enumerate(HEALTHY.parts or ())
    )


def test_a_healthy_cluster_is_all_ok() -> None:
    found = examine(HEALTHY)
    assert {each.verdict for each in found} == {"ok"}, found
    areas = {each.area for each in found}
    assert areas == {
        "kubernetes", "scheduler", "webhook", "certificate", "agents", "plugin", "runtime", "settings", "conflict",
        "versions",
    }  # fmt: skip
    text = "\n".join(map(str, found))
    assert "registered on 1 nodes; 2 cards" in text
    assert "driver 550.54 (CUDA 12.4) on n1" in text
    assert "containerd://2.3.7 with kubelet v1.36.3 on n1: cards reach containers by cdi: it is known" in text


@pytest.mark.parametrize(
    ("runtime", "mode"),
    [
        ("containerd://2.3.7", "cdi: w"),
        ("containerd://1.7.20", "cdi: w"),
        ("containerd://1.6.20~ds1", "device-specs: w"),
        ("cri-o://1.28.2", "cdi: w"),
        ("docker://27.1", "envvar: w"),
        ("other://1.0", "cdi: w"),
    ],
)
def test_how_cards_come_is_what_the_agent_tells(runtime: str, mode: str) -> None:
    facts = changed(nodes=(node(runtime=runtime, mode=mode),))
    (found,) = (each for each in examine(facts) if each.area == "runtime")
    assert (found.verdict, found.sentence.partition("containers by ")[2]) == ("ok", mode)


def test_what_no_agent_has_told_is_not_looked_at() -> None:
    bare = node()
    del bare.metadata.annotations[names.MODE]
    found = examine(changed(nodes=(bare, node("n2"))))
    seen = {(each.area, each.verdict) for each in found if each.area in ("runtime", "settings")}
    assert seen == {("runtime", "ok"), ("runtime", "unseen"), ("settings", "ok"), ("settings", "unseen")}


CALLED = 'failed calling webhook "pods.vgpu.io": connection refused'
GONE = 'failed calling webhook "pods.vgpu.io": failed to call webhook: service "vgpu-scheduler" not found'
DISTRUSTED = 'failed calling webhook "pods.vgpu.io": x509: certificate signed by unknown authority'
FOREIGN = Part("", "kube-system/nv", "n1", images=("nvcr.io/nvidia/k8s-device-plugin:v0.17.0",))
UNENFORCED = [Condition(names.CONDITION_UNENFORCED, "True", message="set X in FILE of the node")]
CONTESTED = [Condition(names.CONDITION_CONFLICT, "True", message="another one")]


@pytest.mark.parametrize(
    ("facts", "area", "said", "todo"),
    [
        (changed(version="v1.29.4"), "kubernetes", "v1.29.4 has no", "1.30"),
        (changed(parts=()), "scheduler", "no pod of the scheduler", "helm install"),
        (changed(parts=part(0, ready=False)), "scheduler", "none of its 1", "describe pod -n gpu vgpu-scheduler-1"),
        (changed(webhooks=(), trial=None), "webhook", "no MutatingWebhookConfiguration", "helm upgrade"),
        (changed(trial=Trial(error=CALLED)), "webhook", "connection refused", "Service gpu/vgpu-scheduler"),
        (changed(trial=Trial(error=GONE)), "webhook", "cannot call the webhook", "gpu/vgpu-scheduler is missing"),
        (changed(service=False), "webhook", "an open connection", "Service gpu/vgpu-scheduler is missing"),
        (changed(service=False, trial=Trial(error=GONE)), "webhook", "cannot call the webhook", "run helm upgrade"),
        (changed(trial=Trial(error=DISTRUSTED)), "webhook", "unknown authority", "caBundle"),
        (changed(trial=Trial(namespace="a")), "webhook", "in namespace a bypasses", "vgpu.io/webhook: ignore"),
        (changed(webhooks=(msgspec.structs.replace(HOOK, bundle=b""),)), "certificate", "is empty", "log"),
        (changed(webhooks=(msgspec.structs.replace(HOOK, bundle=b"x"),)), "certificate", "no certificates", "log"),
        (changed(served=OTHER.certificate.encode()), "certificate", "has signed the certificate", "log"),
        (changed(served=b"nonsense"), "certificate", "contains no certificate", "log"),
        (
            changed(
                served=ELSEWHERE.certificate.encode(),
                webhooks=(msgspec.structs.replace(HOOK, bundle=ELSEWHERE.authorities.encode()),),
            ),
            "certificate",
            "not for vgpu-scheduler.gpu.svc",
            "log",
        ),
        (changed(parts=(HEALTHY.parts or ())[:1]), "agents", "no pod of the node agent", "nodeSelector"),
        (changed(parts=part(1, ready=False)), "agents", "not ready on n1", "-n gpu vgpu-device-plugin-1"),
        (
            changed(parts=(*(HEALTHY.parts or ()), FOREIGN)),
            "conflict",
            "kube-system/nv",
            "remove it",
        ),
        (changed(nodes=(node(capacity="8"),)), "conflict", "offers 8 of nvidia.com/gpu, but its cards have", "another"),
        (changed(nodes=(node(capacity="0"),)), "plugin", "2 cards but offers no nvidia.com/gpu", "kubeletRoot"),
        (changed(nodes=(node(allocatable={names.RESOURCE_GPU: "0"}),)), "plugin", "has lost the plugin", "its log"),
        (changed(nodes=(Node(Meta(name="n1")),)), "plugin", "none of the 1 nodes publishes GPUs", "runtimeClassName"),
        (
            changed(nodes=(node(), Node(Meta(name="b", annotations={names.DEVICES: "{"})))),
            "plugin",
            "cannot read annotation vgpu.io/devices of node b",
            "the same version",
        ),
        (changed(nodes=(node(conditions=UNENFORCED),)), "settings", "n1: set X in FILE", "VgpuUnenforced"),
        (changed(nodes=(node(conditions=CONTESTED),)), "conflict", "n1: another one", "VgpuConflict"),
        (changed(nodes=(node(runtime="docker://27.1"),)), "runtime", "docker://27.1", "at auto"),
        (changed(nodes=(node(runtime="containerd://1.6.20~ds1"),)), "runtime", "does not support CDI names", "at auto"),
        (changed(nodes=(node(runtime="cri-o://1.27.0"),)), "runtime", "does not support CDI names", "at auto"),
        (changed(nodes=(node(kubelet="v1.29.1"),)), "runtime", "kubelet v1.29.1", "1.30"),
        (changed(parts=part(1, version="0.2.0")), "versions", "0.1.0, 0.2.0", "rollout status"),
        (changed(version="v1.35.1"), "versions", "kube-scheduler v1.36.3 with API server v1.35.1", "helm upgrade"),
        (changed(version="v1.38.1"), "versions", "kube-scheduler v1.36.3 with API server v1.38.1", "helm upgrade"),
    ],
)  # fmt: skip
def test_a_fault_is_told_with_what_to_do(facts: Cluster, area: str, said: str, todo: str) -> None:
    bad = [each for each in examine(facts) if each.verdict == "wrong" and each.area == area]
    assert len(bad) == 1, examine(facts)
    assert said in bad[0].sentence
    assert todo in bad[0].todo
    assert "\n" not in str(bad[0])
    assert str(bad[0]).startswith("WRONG ")


@pytest.mark.parametrize(
    ("days", "said"), [(75, "has not renewed it"), (91, "expired on"), (366 * 5, "every authority")]
)
def test_a_certificate_that_runs_out_is_told_before(days: int, said: str) -> None:
    found = cluster.examine(HEALTHY, NOW + timedelta(days=days), "0.1.0")
    assert [said in each.sentence for each in found if each.area == "certificate"] == [True]


def test_what_may_not_be_read_is_said_and_is_no_fault() -> None:
    refused = {what: f"{what} is forbidden" for what in ("version", "webhooks", "pods", "nodes", "trial", "secret")}
    found = examine(Cluster(refused=refused))
    assert {each.verdict for each in found} == {"unseen"}
    assert "conflict" in {each.area for each in found}
    text = "\n".join(map(str, found))
    assert all(f"{what} is forbidden" in text for what in refused if what != "secret")
    (told,) = [each for each in examine(changed(served=None, refused=refused)) if each.area == "certificate"]
    assert told.verdict == "ok"
    assert "secret is forbidden" in told.sentence


def test_a_refused_dry_run_is_not_a_webhook_that_fails() -> None:
    found = examine(changed(trial=Trial(error="pods is forbidden: no right (403 Forbidden)")))
    assert [(each.verdict, "no right" in each.sentence) for each in found if each.area == "webhook"] == [
        ("unseen", True)
    ]


def test_another_release_names_its_own_resource() -> None:
    hook = msgspec.structs.replace(HOOK, resource="example.com/gpu")
    found = examine(changed(webhooks=(hook,)))
    assert any("offers no example.com/gpu" in each.sentence for each in found if each.area == "plugin")


GOOD = Host(
    inventory=Inventory((Gpu("GPU-1", 0, "Tesla T4", 14912),), driver="550.54", cuda="12.4"),
    library="/lib/libvgpu.so",
    state="/run/vgpu/local",
    kubelet=Kubelet("/var/lib/kubelet/device-plugins", ("kubelet.sock", "vgpu.sock"), ("nvidia.com/gpu",)),
    toolkit="/etc/nvidia-container-runtime/config.toml",
    settings=dict(host.SAFE),
    rolled_out=("libvgpu-0123.so",),
)


def local(facts: Host, *, alone: bool = True) -> list[Finding]:
    return host.examine(facts, resource="nvidia.com/gpu", alone=alone)


def test_a_healthy_machine_is_all_ok() -> None:
    assert {each.verdict for each in local(GOOD)} == {"ok"}, local(GOOD)
    assert {each.area for each in local(GOOD)} == {"driver", "library", "vgpu run", "plugin", "settings"}


@pytest.mark.parametrize(
    ("fields", "area", "said"),
    [
        ({"inventory": None, "no_inventory": "no NVIDIA driver"}, "driver", "no NVIDIA driver"),
        ({"inventory": Inventory()}, "driver", "lists no card"),
        ({"library": "", "no_library": "libvgpu.so is not built"}, "library", "is not built"),
        ({"state": "", "no_state": "/x must be a directory"}, "vgpu run", "/x must be"),
        ({"kubelet": Kubelet("/k", ("kubelet.sock",), ())}, "plugin", "only nothing"),
        ({"kubelet": Kubelet("/k", ("nvidia-gpu.sock",), ("nvidia.com/gpu",))}, "conflict", "nvidia-gpu.sock in /k"),
        ({"rolled_out": ()}, "library", "no GPU container can start"),
        ({"settings": {}}, "settings", "shows every card"),
        ({"settings": None}, "settings", "cannot read"),
    ],
)
def test_a_fault_of_the_machine_is_told(fields: dict[str, Any], area: str, said: str) -> None:
    found = local(msgspec.structs.replace(GOOD, **fields))
    bad = [each for each in found if each.verdict == "wrong"]
    assert [(each.area, said in each.sentence) for each in bad] == [(area, True)], found
    assert bad[0].todo


def test_a_workstation_needs_no_card_and_a_checkpoint_of_root_is_not_seen() -> None:
    bare = Host(no_inventory="no NVIDIA driver", library="/l", state="/s", kubelet=Kubelet("/k", refused="denied"))
    found = local(bare, alone=False)
    assert {(each.area, each.verdict) for each in found if each.verdict != "ok"} == {
        ("driver", "unseen"),
        ("plugin", "unseen"),
    }
    assert {each.verdict for each in local(msgspec.structs.replace(bare, simulate="T4x2", kubelet=None))} == {"ok"}


def test_long_lists_are_cut() -> None:
    assert some(list("abc")) == "a, b, c"
    assert some(list("abcde")) == "a, b, c and 2 more"
