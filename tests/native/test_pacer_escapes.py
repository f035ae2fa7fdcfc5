"""Programs whose work is hard to measure stay within their share, and are metered as the simulator itself counts."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from core_share import busy, make_region, within
from preloaded import compiled

from vgpu.native import Region, simulator
from vgpu.native.arbiter import Arbiter

LIMIT = 20
#: of programs that repeat, and of many that launch once and end, in percent of the card
BAR, BAR_ONCE = 21.5, 25
#: a busy machine launches less
LEAST = 1
#: metered GPU time may be that much off, and launches are paid before they run
TOLERANCE, AHEAD_NS = 0.02, 100_000_000
#: of them, those that are charged an upper bound, which is too much by that part
BOUNDED = {"context-each": 0.5, "primary-each": 0.5}
WINDOW_S = 2.5

#: manner of libvgpu/tests/clients/escapes.c: kernel and count
MANNERS = {
    "plain": ("spin_10ms", 1),
    "capture-relaxed": ("spin_10ms", 1),
    "capture-global": ("spin_10ms", 1),
    "contexts": ("spin_10ms", 17),
    "contexts-in-turn": ("spin_10ms", 20),
    "many-kinds": ("spin_10ms", 20000),
    "seldom-long-awaited": ("spin_arg_us", 400),
    "unlike": ("spin_10ms", 1),
    "unlike-and-waits": ("spin_10ms", 1),
    "context-each": ("spin_20ms", 1),
    "primary-each": ("spin_20ms", 1),
    "stream-each": ("spin_10ms", 1),
    "module-each": ("spin_10ms", 1),
    "thread-each": ("spin_10ms", 1),
    "host-functions": ("spin_10ms", 1),
    "foreign-stream": ("spin_10ms", 1),
    "no-context": ("spin_10ms", 1),
}
#: of MANNERS: those that also run with an arbiter
WITH_ARBITER = ("capture-relaxed", "contexts", "seldom-long-awaited", "unlike", "context-each")
#: kernels under a driver whose launches return late
LATE = {"spin_50ms": ("plain", 1), "spin_24ms": ("plain", 1), "spin_10us_50ms": ("plain", 1), "grows": ("grows", 20)}
#: how a process of one launch ends, and how many there are
ENDS = {
    "once-exits": ("spin_200ms", 8),
    "once-returns": ("spin_60ms", 12),
    "once-is-killed": ("spin_20ms", 30),
    "once-polls": ("spin_100ms", 10),
    "long-at-last": ("spin_arg_us", 10),
}


@dataclass
class Books:
    """Differences between two looks, ns."""

    passed: int = 0
    busy: int = 0
    metered: int = 0

    @property
    def share(self) -> float:
        return self.busy / self.passed * 100

    def agree(self, slack_ns: int, above: float = TOLERANCE) -> bool:
        return -self.busy * TOLERANCE <= self.metered - self.busy + slack_ns <= self.busy * above + 2 * slack_ns


@contextmanager
def watched(folder: Path, region: Region) -> Iterator[Books]:
    books = Books()
    begun, before, metered = time.monotonic_ns(), busy(folder), region.usage().cards[0].gpu_ns
    yield books
    region.reap()
    books.passed, books.busy = time.monotonic_ns() - begun, busy(folder) - before
    books.metered = region.usage().cards[0].gpu_ns - metered


@contextmanager
def arbiter_of(region: Region) -> Iterator[None]:
    """A real arbiter, as in the agent."""
    arbiter = Arbiter()
    arbiter.follow([region.directory])
    arbiter.start()
    try:
        yield
    finally:
        arbiter.stop()


@contextmanager
def repeating(env: dict[str, str], manner: str, kernel: str, count: int) -> Iterator[None]:
    program = compiled("escapes.c", driver=True)
    process = subprocess.Popen([program, manner, kernel, str(count)], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def measured(folder: Path, region: Region) -> Books:
    """Measures after the program has spent its credit."""
    deadline = time.monotonic() + WINDOW_S
    with watched(folder, region) as books:
        while time.monotonic() < deadline:
            time.sleep(0.05)
    return books


@pytest.mark.parametrize(
    ("manner", "arbitrated"), [(manner, False) for manner in MANNERS] + [(manner, True) for manner in WITH_ARBITER]
)
def test_no_manner_of_launching_escapes(tmp_path: Path, manner: str, arbitrated: bool) -> None:
    kernel, count = MANNERS[manner]
    with (
        make_region(tmp_path, cores=LIMIT) as region,
        arbiter_of(region) if arbitrated else nullcontext(),
        repeating(within(tmp_path, region), manner, kernel, count),
    ):
        measured(tmp_path, region)
        books = measured(tmp_path, region)
        assert LEAST < books.share < BAR
        assert books.agree(AHEAD_NS, BOUNDED.get(manner, TOLERANCE)), books


@pytest.mark.parametrize("kernel", LATE)
@pytest.mark.parametrize("limit", [20, 50])
def test_launches_that_return_late_are_paid_as_long_as_they_can_have_run(
    tmp_path: Path, kernel: str, limit: int
) -> None:
    manner, count = LATE[kernel]
    with (
        make_region(tmp_path, cores=limit) as region,
        repeating(within(tmp_path, region, VGPU_SIM_LAUNCH_QUEUE_MS="20"), manner, kernel, count),
    ):
        measured(tmp_path, region)
        books = measured(tmp_path, region)
        assert LEAST < books.share < limit * 1.05 + 0.5
        assert books.agree(AHEAD_NS, above=0.25), books  # a bound


@pytest.mark.parametrize("arbitrated", [False, True], ids=["alone", "arbiter"])
@pytest.mark.parametrize("manner", ENDS)
def test_processes_that_launch_once_and_end_pay(tmp_path: Path, manner: str, arbitrated: bool) -> None:
    kernel, processes = ENDS[manner]
    program = compiled("escapes.c", driver=True)
    with (
        make_region(tmp_path, cores=LIMIT) as region,
        arbiter_of(region) if arbitrated else nullcontext(),
        watched(tmp_path, region) as books,
    ):
        for _ in range(processes):
            subprocess.run([program, manner, kernel], env=within(tmp_path, region), check=False)
    assert books.share < BAR_ONCE
    assert books.metered > books.busy * 0.98


def test_a_program_that_goes_on_as_another_pays(tmp_path: Path) -> None:
    program = compiled("escapes.c", driver=True)
    with make_region(tmp_path, cores=LIMIT) as region, watched(tmp_path, region) as books:
        subprocess.run([program, "once-goes-on", "spin_100ms", "10"], env=within(tmp_path, region), check=True)
    assert books.share < BAR_ONCE
    assert books.agree(AHEAD_NS), books


def test_what_an_agent_charges_is_paid_back(tmp_path: Path) -> None:
    with make_region(tmp_path, cores=LIMIT) as region, repeating(within(tmp_path, region), "plain", "spin_10ms", 1):
        measured(tmp_path, region)
        before = region.usage().cards[0].gpu_ns
        region.debit(0, 400_000_000)
        assert region.usage().cards[0].gpu_ns >= before + 400_000_000
        assert measured(tmp_path, region).share < LIMIT - 0.4 / WINDOW_S * 100 * 0.75
        measured(tmp_path, region)
        region.debit(0, 1 << 62)  # launches wait for ten seconds, not for ever
        region.debit(0, 1 << 62)
        deadline = time.monotonic() + 30
        assert measured(tmp_path, region).share < 5
        seen = busy(tmp_path)
        while busy(tmp_path) <= seen + 50_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(("kernel", "limit"), [("spin_5us", 50), ("spin_10us", 80), ("spin_20us", 20)])
def test_what_events_take_of_the_card_is_nobodys_time(tmp_path: Path, kernel: str, limit: int) -> None:
    with (
        make_region(tmp_path, cores=limit) as region,
        repeating(within(tmp_path, region, VGPU_SIM_TIME="event=2500ns"), "asynch", kernel, 1),
    ):
        measured(tmp_path, region)
        books = measured(tmp_path, region)
        # a machine that is busy launches less; metered as if events were kernels, the 5 us would be 7.5
        assert books.share < limit * 1.05
        assert books.metered < books.busy * 1.1


def test_a_flood_on_many_streams_teaches_what_a_launch_takes(tmp_path: Path) -> None:
    """There are more launches at once than events.

    Launches without an event must not make the others look free of cost, until the driver's own samples show the
    missing time.
    """
    with make_region(tmp_path, cores=80) as region, repeating(within(tmp_path, region), "flood", "spin_100us", 8):
        windows = [measured(tmp_path, region) for _ in range(3)]
    # a busy machine may begin with too little to know; what is charged too late then is paid back within the windows
    assert sum(books.busy for books in windows) < 0.85 * sum(books.passed for books in windows)


@pytest.mark.parametrize("loads", ["use", "get"])
def test_loading_code_is_nobodys_time(tmp_path: Path, loads: str) -> None:
    program = compiled("escapes.c", driver=True)
    env = {"VGPU_SIM_TIME": f"load=30ms,loads={loads}"}
    with make_region(tmp_path, cores=LIMIT) as region:
        subprocess.run([program, "once-exits", "spin_1ms"], env=within(tmp_path, region, **env), check=True)
        with watched(tmp_path, region) as books:
            for _ in range(5):
                subprocess.run([program, "once-exits", "spin_10ms"], env=within(tmp_path, region, **env), check=True)
    assert books.metered < books.busy + 5 * 20_000_000


@pytest.mark.parametrize("entry", ["cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventElapsedTime"])
def test_what_events_cannot_tell_is_charged_as_long_as_it_can_have_run(tmp_path: Path, entry: str) -> None:
    program = compiled("escapes.c", driver=True)
    with make_region(tmp_path, cores=LIMIT) as region:
        subprocess.run([program, "once-exits", "spin_1ms"], env=within(tmp_path, region), check=True)
        with watched(tmp_path, region) as books:
            for _ in range(3):
                simulator.inject_error(tmp_path / "cards", entry, 999)
                subprocess.run([program, "once-exits", "spin_100ms"], env=within(tmp_path, region), check=True)
    assert books.busy * 0.98 < books.metered < books.busy * 1.3
