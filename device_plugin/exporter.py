"""`/metrics` of a node, from a picture that the sweep makes once a second.

A scrape therefore asks no other part and waits for nothing. Names and labels are those of the metrics reference; no
value that changes is ever a label.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from device_plugin import serving
from device_plugin.readiness import METRICS, Readiness
from vgpu.allocation import Held
from vgpu.devices import Gpu, GpuSlice
from vgpu.inventory import Reading
from vgpu.listener import Listener
from vgpu.native import CardUsage

MIB: Final = 1 << 20
_CARD: Final = ("node", "uuid", "index", "model")
_CONTAINER: Final = ("node", "uuid", "namespace", "pod", "container")


class CardView(msgspec.Struct, frozen=True):
    gpu: Gpu
    held: Held = Held()
    reading: Reading | None = None  #: None: the card does not answer
    foreign: tuple[int, ...] = ()  #: bytes of each process outside our containers


class ContainerView(msgspec.Struct, frozen=True):
    """One container on one card."""

    namespace: str
    pod: str
    container: str
    piece: GpuSlice
    usage: CardUsage | None = None  #: None: the container has not started yet
    untracked: int = 0  #: bytes that NVML counts beyond the charges
    observed: float = 0.0  #: seconds of GPU time that NVML counts
    host_limit: int = 0  #: bytes of host memory that the container may use behind the card
    on_card: int = 0  #: bytes of `usage` that are on the card itself
    owed: int = 0  #: bytes of the card that the container has to give back
    told: bool = True  #: whether its use is known, even if it is zero; else the container has no such metrics


class Picture(msgspec.Struct, frozen=True):
    cards: tuple[CardView, ...] = ()
    containers: tuple[ContainerView, ...] = ()
    host_memory: int = 0  #: bytes of the node's memory that stand behind its cards
    unbacked: bool = False  #: memory should be scaled, but is not


class Exporter(Collector):
    """Serves the latest picture and whether the agent is ready.

    `observe` records the durations of the kubelet's calls.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._picture = Picture()
        self._shown: float | None = time.monotonic()  # None: a node without cards has nothing to show
        self._unsafe = False
        self._conflict = False
        self.readiness = Readiness()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._durations = Histogram(
            "vgpu_allocate_duration_seconds",
            "Time that the agent took to answer the kubelet's Allocate and PreStartContainer",
            ("node", "call"),
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
        )

        self._xids: dict[tuple[str, ...], int] = {}  # labels → count; only the health thread uses this

    def serve(self, metrics_port: int, health_port: int, obstacle: Callable[[], str] = lambda: "") -> list[Listener]:
        """Answers HTTP on all addresses; raises OSError when a port is taken. `obstacle`: why no pods can start now."""
        return serving.serve(self.registry, lambda: self.readiness.left, obstacle, metrics_port, health_port)

    def show(self, picture: Picture, *, whole: bool = True, fresh: bool = True) -> None:
        """`whole`: the picture contains pods that have not started yet.

        `fresh`: the driver has answered for this picture.
        """
        self._picture = picture
        if fresh:
            self._shown = time.monotonic()
        if whole:
            self.readiness.done(METRICS)

    def idle(self) -> None:
        """Records that there are no cards: the exporter waits for no picture."""
        self._shown = None

    def expect(self) -> None:
        """Records that there are cards: from now on, the exporter waits for their picture."""
        if self._shown is None:
            self._shown = time.monotonic()

    def show_unsafe(self, unsafe: bool) -> None:
        """Records whether the container runtime's settings let containers bypass the limits."""
        self._unsafe = unsafe

    def show_conflict(self, conflict: bool) -> None:
        """Records whether another device plugin is in the way."""
        self._conflict = conflict

    def count_xid(self, gpu: Gpu | None, xid: int) -> None:
        """Counts one error of a card; None: the card is not shared by this agent."""
        if gpu is not None:
            labels = (self._node, gpu.uuid, str(gpu.index), gpu.model, str(xid))
            self._xids = {**self._xids, labels: self._xids.get(labels, 0) + 1}

    def observe(self, call: str, seconds: float) -> None:
        self._durations.labels(self._node, call).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        picture = self._picture
        yield _gauge(
            "vgpu_node_unenforced",
            "1: settings of the container runtime let containers bypass the limits",
            ("node",),
            [((self._node,), int(self._unsafe))],
        )
        yield _gauge(
            "vgpu_node_metrics_age_seconds",
            "Age of the figures of cards and containers, usually about a second; it grows while the driver hangs",
            ("node",),
            [] if self._shown is None else [((self._node,), time.monotonic() - self._shown)],
        )
        yield _gauge(
            "vgpu_node_conflict",
            "1: another device plugin serves the same resource or cards",
            ("node",),
            [((self._node,), int(self._conflict))],
        )
        yield _gauge(
            "vgpu_node_host_memory_bytes",
            "Host memory of the node behind its cards; 0: none",
            ("node",),
            [((self._node,), picture.host_memory)],
        )
        yield _gauge(
            "vgpu_node_unbacked",
            "1: the agent does not scale the cards' memory, since the node does not reserve the host memory for it",
            ("node",),
            [((self._node,), int(picture.unbacked))],
        )
        used = sum(one.usage.host_used for one in picture.containers if one.usage)
        yield _gauge(
            "vgpu_node_host_memory_used_bytes",
            "Host memory behind the node's cards that containers use",
            ("node",),
            [((self._node,), used)],
        )
        yield _counter("vgpu_card_xids", "Errors that the driver reported", (*_CARD, "xid"), list(self._xids.items()))
        yield from self._cards(picture.cards)
        yield from self._containers(picture.containers)

    def _cards(self, cards: Sequence[CardView]) -> Iterator[Metric]:
        rows = [((self._node, c.gpu.uuid, str(c.gpu.index), c.gpu.model), c) for c in cards]
        read = [(labels, card, card.reading) for labels, card in rows if card.reading]
        yield _gauge("vgpu_card_info", "A card of this node", _CARD, [(r, 1) for r, _ in rows])
        yield _gauge(
            "vgpu_card_memory_bytes", "Memory of the card", _CARD, [(r, c.gpu.physical_memory * MIB) for r, c in rows]
        )
        yield _gauge(
            "vgpu_card_memory_used_bytes", "Memory that all processes use", _CARD, [(r, now.used) for r, _, now in read]
        )
        yield _gauge(
            "vgpu_card_memory_allocated_bytes",
            "Sum of the limits of all slices",
            _CARD,
            [(r, c.held.mem * MIB) for r, c in rows],
        )
        yield _gauge(
            "vgpu_card_memory_scaled_bytes",
            "Largest sum of the slices' limits; more than the card's memory where the card has host memory behind it",
            _CARD,
            [(r, c.gpu.memory * MIB) for r, c in rows],
        )
        yield _gauge(
            "vgpu_card_memory_guaranteed_bytes",
            "Sum of the guaranteed parts of all slices",
            _CARD,
            [(r, c.held.phys * MIB) for r, c in rows],
        )
        yield _gauge(
            "vgpu_card_cores_allocated_ratio",
            "Sum of the guaranteed shares of the card's time of all slices",
            _CARD,
            [(r, c.held.cores / 100) for r, c in rows],
        )
        yield _gauge(
            "vgpu_card_utilization_ratio",
            "Share of the last sampling period in which a kernel ran",
            _CARD,
            [(r, now.utilization) for r, _, now in read],
        )
        yield _gauge("vgpu_card_healthy", "1: the card is healthy", _CARD, [(r, int(c.gpu.healthy)) for r, c in rows])
        yield _gauge("vgpu_card_slices", "Slices that pods hold", _CARD, [(r, c.held.slots) for r, c in rows])
        yield _gauge(
            "vgpu_card_foreign_memory_bytes",
            "Memory of processes outside vgpu's containers",
            _CARD,
            [(r, sum(c.foreign)) for r, c in rows],
        )
        yield _gauge(
            "vgpu_card_foreign_processes",
            "Processes on the card outside vgpu's containers",
            _CARD,
            [(r, len(c.foreign)) for r, c in rows],
        )

    def _containers(self, containers: Sequence[ContainerView]) -> Iterator[Metric]:
        rows = [((self._node, c.piece.uuid, c.namespace, c.pod, c.container), c) for c in containers]
        told = [(labels, c) for labels, c in rows if c.told]
        used = [(labels, c.usage or _UNUSED) for labels, c in told]
        yield _gauge(
            "vgpu_container_memory_limit_bytes",
            "Memory that the container may allocate",
            _CONTAINER,
            [(r, c.piece.mem * MIB) for r, c in rows],
        )
        yield _gauge(
            "vgpu_container_memory_guarantee_bytes",
            "Part of the limit that is guaranteed on the card",
            _CONTAINER,
            [(r, c.piece.guarantee * MIB) for r, c in rows],
        )
        yield _gauge(
            "vgpu_container_core_limit_ratio",
            "Share of the card's time that the container may use; 0: no limit",
            _CONTAINER,
            [(r, c.piece.cores / 100) for r, c in rows],
        )
        yield _gauge(
            "vgpu_container_memory_used_bytes",
            "Memory that the container uses",
            _CONTAINER,
            [(r, u.used) for r, u in used],
        )
        yield _gauge(
            "vgpu_container_memory_kind_bytes",
            "Memory that the container uses, by kind",
            (*_CONTAINER, "kind"),
            [((*r, kind), value) for r, u in used for kind, value in u.by_kind.items()],
        )
        yield _gauge(
            "vgpu_container_untracked_bytes",
            "Memory that the driver counts for the container and that vgpu did not charge",
            _CONTAINER,
            [(r, c.untracked) for r, c in told],
        )
        yield _counter(
            "vgpu_container_observed_gpu_seconds",
            "GPU time by the driver's samples, to compare with the charged GPU time",
            _CONTAINER,
            [(r, c.observed) for r, c in told],
        )
        yield _gauge(
            "vgpu_container_host_memory_bytes",
            "Part of the container's memory that is in host memory behind the card",
            _CONTAINER,
            [(r, u.host_used) for r, u in used],
        )
        yield _gauge(
            "vgpu_container_host_memory_limit_bytes",
            "Host memory behind the card that the container may use",
            _CONTAINER,
            [(r, c.host_limit) for r, c in rows],
        )
        yield _gauge(
            "vgpu_container_memory_resident_bytes",
            "Part of the container's memory that is on the card itself",
            _CONTAINER,
            [(r, c.on_card) for r, c in told],
        )
        yield _gauge(
            "vgpu_container_memory_lent_bytes",
            "Memory of the card lent to the container above its guarantee, until others need it",
            _CONTAINER,
            [(r, u.lent) for r, u in used],
        )
        yield _gauge(
            "vgpu_container_memory_owed_bytes",
            "Memory of the card that the container must give back, since it is guaranteed to others",
            _CONTAINER,
            [(r, c.owed) for r, c in told],
        )
        yield _gauge(
            "vgpu_container_processes",
            "Processes of the container that use the card",
            _CONTAINER,
            [(r, u.processes) for r, u in used],
        )
        yield _counter(
            "vgpu_container_gpu_seconds",
            "GPU time that vgpu charged the container",
            _CONTAINER,
            [(r, u.gpu_ns / 1e9) for r, u in used],
        )
        yield _counter(
            "vgpu_container_throttled_seconds",
            "Time that launches waited for the core limit",
            _CONTAINER,
            [(r, u.throttled_ns / 1e9) for r, u in used],
        )
        yield _counter("vgpu_container_launches", "Kernel launches", _CONTAINER, [(r, u.launches) for r, u in used])
        yield _counter(
            "vgpu_container_oom", "Allocations that the limit refused", _CONTAINER, [(r, u.refused) for r, u in used]
        )


_UNUSED: Final = CardUsage()
_Rows = Sequence[tuple[Sequence[str], float]]


def _gauge(name: str, text: str, labels: Sequence[str], rows: _Rows) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: Sequence[str], rows: _Rows) -> CounterMetricFamily:
    """A counter; prometheus_client appends `_total` to its name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
