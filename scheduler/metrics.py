"""Metrics of the scheduler (names: docs/reference.md)."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
DURATION = Histogram(
    "vgpu_scheduler_request_duration_seconds",
    "Time to answer one request",
    ["verb"],
    registry=REGISTRY,
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
UNSCHEDULABLE = Counter(
    "vgpu_scheduler_unschedulable",
    "Scheduling attempts that found no node, by reason (an attempt counts once for each reason found on any node)",
    ["reason"],
    registry=REGISTRY,
)
DRIFT = Gauge(
    "vgpu_scheduler_drift_slices",
    "Slices that the last comparison with the API server found wrong and corrected",
    registry=REGISTRY,
)
