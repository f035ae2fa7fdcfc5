"""The node's metrics: names, labels and values, read back by strict parsers of both formats."""

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from device_plugin.exporter import CardView, ContainerView, Exporter, Picture
from device_plugin.readiness import CARDS, KUBELET, METRICS, PATIENCE_SECONDS, Readiness
from vgpu.allocation import Held
from vgpu.devices import Gpu, GpuSlice
from vgpu.inventory import Reading
from vgpu.native import CardUsage
from vgpu.standin.services import free_port

CARD = {"node", "uuid", "index", "model"}
CONTAINER = {"node", "uuid", "namespace", "pod", "container"}
MIB = 1 << 20

#: name of a series → its labels and its value for the picture below
EXPECTED: dict[str, tuple[set[str], float]] = {
    "vgpu_node_conflict": ({"node"}, 1),
    "vgpu_node_unenforced": ({"node"}, 1),
    "vgpu_node_host_memory_bytes": ({"node"}, 500),
    "vgpu_node_unbacked": ({"node"}, 1),
    "vgpu_node_host_memory_used_bytes": ({"node"}, 7),
    "vgpu_card_info": (CARD, 1),
    "vgpu_card_memory_bytes": (CARD, 15360 * MIB),
    "vgpu_card_memory_used_bytes": (CARD, 123456),
    "vgpu_card_memory_allocated_bytes": (CARD, 3000 * MIB),
    "vgpu_card_memory_scaled_bytes": (CARD, 20480 * MIB),
    "vgpu_card_memory_guaranteed_bytes": (CARD, 2000 * MIB),
    "vgpu_card_cores_allocated_ratio": (CARD, 0.3),
    "vgpu_card_utilization_ratio": (CARD, 0.25),
    "vgpu_card_healthy": (CARD, 1),
    "vgpu_card_slices": (CARD, 2),
    "vgpu_card_xids_total": (CARD | {"xid"}, 1),
    "vgpu_card_foreign_memory_bytes": (CARD, 70),
    "vgpu_card_foreign_processes": (CARD, 2),
    "vgpu_container_memory_limit_bytes": (CONTAINER, 3000 * MIB),
    "vgpu_container_memory_guarantee_bytes": (CONTAINER, 2000 * MIB),
    "vgpu_container_memory_used_bytes": (CONTAINER, 1000),
    "vgpu_container_memory_kind_bytes": (CONTAINER | {"kind"}, 1000),
    "vgpu_container_host_memory_bytes": (CONTAINER, 7),
    "vgpu_container_host_memory_limit_bytes": (CONTAINER, 40),
    "vgpu_container_memory_resident_bytes": (CONTAINER, 993),
    "vgpu_container_memory_lent_bytes": (CONTAINER, 12),
    "vgpu_container_memory_owed_bytes": (CONTAINER, 5),
    "vgpu_container_core_limit_ratio": (CONTAINER, 0.3),
    "vgpu_container_gpu_seconds_total": (CONTAINER, 1.5),
    "vgpu_container_throttled_seconds_total": (CONTAINER, 0.5),
    "vgpu_container_launches_total": (CONTAINER, 11),
    "vgpu_container_oom_total": (CONTAINER, 3),
    "vgpu_container_processes": (CONTAINER, 2),
    "vgpu_container_untracked_bytes": (CONTAINER, 9),
    "vgpu_container_observed_gpu_seconds_total": (CONTAINER, 2.5),
}


@pytest.fixture
def exporter() -> Exporter:
    gpu = Gpu(uuid="GPU-a", index=0, model='Tesla "T4"', memory=20480, physical=15360)
    kinds = {"context": 0, "module": 0, "buffer": 1000, "array": 0, "pool": 0, "overhead": 0}
    usage = CardUsage(
        used=1000,
        host_used=7,
        resident=993,
        lent=12,
        by_kind=kinds,
        gpu_ns=1_500_000_000,
        throttled_ns=500_000_000,
        launches=11,
        refused=3,
        processes=2,
    )
    piece = GpuSlice("GPU-a", mem=3000, cores=30, phys=2000)
    made = Exporter("node-1")
    made.show(
        Picture(
            cards=(CardView(gpu, Held(2, 3000, 2000, 30), Reading(used=123456, utilization=0.25, minor=0), (30, 40)),),
            containers=(
                ContainerView(
                    "ns", "pod", "main", piece, usage, untracked=9, observed=2.5, host_limit=40, on_card=993, owed=5
                ),
                ContainerView("ns", "pod", "waiting", piece),
            ),
            host_memory=500,
            unbacked=True,
        )
    )
    made.observe("Allocate", 0.003)
    made.count_xid(gpu, 79)
    made.show_conflict(True)
    made.show_unsafe(True)
    return made


def samples(exporter: Exporter) -> Iterator[Sample]:
    for family in parse_text(generate_latest(exporter.registry).decode()):
        yield from family.samples


def test_every_series_of_the_reference_is_there_with_its_labels_and_value(exporter: Exporter) -> None:
    found = {
        sample.name: sample
        for sample in samples(exporter)
        if sample.labels.get("container") != "waiting" and sample.labels.get("kind", "buffer") == "buffer"
    }
    for name, (labels, value) in EXPECTED.items():
        assert set(found[name].labels) == labels, name
        assert found[name].value == pytest.approx(value), name
    assert {"vgpu_allocate_duration_seconds_bucket"} <= set(found)


def test_a_container_that_has_not_started_has_every_series_at_zero(exporter: Exporter) -> None:
    waiting = {s.name: s.value for s in samples(exporter) if s.labels.get("container") == "waiting"}
    assert waiting["vgpu_container_memory_limit_bytes"] == 3000 * MIB
    assert waiting["vgpu_container_memory_used_bytes"] == 0
    assert {name for name in EXPECTED if name.startswith("vgpu_container")} == set(waiting)


def test_figures_that_are_not_made_anew_grow_old(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    (age,) = (sample.value for sample in samples(exporter) if sample.name == "vgpu_node_metrics_age_seconds")
    assert age >= 100
    exporter.show(Picture())
    (age,) = (sample.value for sample in samples(exporter) if sample.name == "vgpu_node_metrics_age_seconds")
    assert age == 0


def test_a_driver_that_never_answered_is_seen_by_the_age(monkeypatch: pytest.MonkeyPatch) -> None:
    def age() -> list[float]:
        return [sample.value for sample in samples(exporter) if sample.name == "vgpu_node_metrics_age_seconds"]

    exporter, now = Exporter("n"), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    assert age() >= [100]
    exporter.idle()  # a node without cards has none
    assert age() == []
    exporter.expect()
    assert age() == [0]


def test_a_card_that_does_not_answer_has_no_reading_and_keeps_the_rest() -> None:
    exporter = Exporter("n")
    exporter.show(Picture(cards=(CardView(Gpu(uuid="GPU-a", index=0, model="T4", memory=1, healthy=False)),)))
    found = {sample.name: sample.value for sample in samples(exporter)}
    assert found["vgpu_card_healthy"] == 0
    assert "vgpu_card_memory_used_bytes" not in found


def test_strict_openmetrics_and_the_naming_rules(exporter: Exporter) -> None:
    families = list(parse_openmetrics(exposition.generate_latest(exporter.registry).decode()))
    assert len(families) > 15
    for family in families:
        assert re.fullmatch(r"vgpu_[a-z_]+", family.name)
        assert family.documentation
        assert not family.name.endswith("_total")  # promtool: only counters, where the library appends it
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name.endswith("_total")


def bindable(address: str) -> bool:
    """Where IPv6 is switched off, a socket can be made, but not bound to an address."""
    if not socket.has_dualstack_ipv6():
        return False
    with socket.socket(socket.AF_INET6) as one:
        try:
            one.bind((address, 0))
        except OSError:
            return False
    return True


def test_served_by_http(exporter: Exporter) -> None:
    port = free_port()
    exporter.serve(port, free_port())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b'vgpu_container_memory_limit_bytes{container="main"' in answer.read()
    if bindable("::1"):
        with urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=10) as answer:
            assert answer.status == 200


def test_ready_when_cards_containers_and_kubelet_are_known() -> None:
    exporter, port = Exporter("n"), free_port()
    exporter.serve(free_port(), port)

    def said() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    ready = 200, "ok\n"
    assert said() == (503, f"{CARDS}\n")
    exporter.readiness.idle()  # a node without cards
    assert said() == ready
    exporter.readiness.found_cards()
    assert said() == (503, f"{METRICS}; {KUBELET}\n")
    exporter.readiness.done(KUBELET)
    exporter.show(Picture(), whole=False)
    assert said() == (503, f"{METRICS}\n")
    exporter.show(Picture())
    assert said() == ready
    exporter.show(Picture(), whole=False)
    assert said() == ready


def test_no_roll_out_waits_for_ever_for_a_kubelet_or_driver(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    readiness = Readiness()
    clock[0] += 10 * PATIENCE_SECONDS
    assert readiness.left == CARDS
    readiness.found_cards()
    readiness.done(METRICS)
    clock[0] += PATIENCE_SECONDS - 1
    assert readiness.left == KUBELET
    clock[0] += 2
    assert [readiness.left, readiness.left] == ["", ""]
    assert [record.getMessage() for record in caplog.records] == [f"reporting ready after 60 s, although {KUBELET}"]
