"""Of containers that share ids: which one starts next."""

import pytest

from device_plugin.cri import Run
from device_plugin.init_order import starting
from vgpu.allocation import Kind

RUNS, DONE, FAILED = Run(), Run(True, 0), Run(True, 1)
PLAIN = [("first", Kind.INIT), ("second", Kind.INIT), ("main", Kind.APP), ("other", Kind.APP)]
SIDECAR = [("first", Kind.INIT), ("proxy", Kind.SIDECAR), ("second", Kind.INIT), ("main", Kind.APP)]


@pytest.mark.parametrize(
    ("order", "sharing", "runs", "expected"),
    [
        (PLAIN, "first main", {}, "first"),
        (PLAIN, "first main", {"first": RUNS}, "first"),
        (PLAIN, "first main", {"first": FAILED}, "first"),
        (PLAIN, "first main", {"first": DONE}, "main"),
        (PLAIN, "first second main", {"first": DONE}, "second"),
        (PLAIN, "first second main", {"first": DONE, "second": FAILED}, "second"),
        (PLAIN, "first second main", {"second": FAILED}, "second"),  # the first one's instance was collected
        (PLAIN, "first second main", {"second": DONE}, "main"),
        (PLAIN, "first main", {"first": DONE, "second": RUNS}, "main"),
        (PLAIN, "first main", {"main": FAILED}, "main"),  # an app container starts again, nothing is left of the first
        (PLAIN, "first main", {"first": FAILED, "other": RUNS}, "main"),
        (PLAIN, "first second", {"first": DONE}, "second"),
        (PLAIN, "first second", {"first": DONE, "second": DONE}, "second"),
        (SIDECAR, "first proxy", {}, "first"),
        (SIDECAR, "first proxy", {"first": FAILED}, "first"),
        (SIDECAR, "first proxy", {"first": DONE}, "proxy"),
        (SIDECAR, "first proxy", {"first": DONE, "proxy": FAILED}, "proxy"),
        (SIDECAR, "first proxy", {"proxy": Run(True, 0)}, "proxy"),
        (SIDECAR, "first proxy", {"first": DONE, "proxy": DONE, "second": FAILED}, "proxy"),
        (SIDECAR, "first proxy", {"first": DONE, "proxy": DONE, "second": DONE, "main": RUNS}, "proxy"),
        (SIDECAR, "second main", {"first": DONE, "proxy": RUNS}, "second"),
        (SIDECAR, "second main", {"first": DONE, "proxy": RUNS, "second": DONE}, "main"),
    ],
)
def test_the_next_one_follows_from_what_has_run(
    order: list[tuple[str, Kind]], sharing: str, runs: dict[str, Run], expected: str
) -> None:
    assert starting(order, sharing.split(), runs) == expected
    assert starting(order, sharing.split()[::-1], runs) == expected
