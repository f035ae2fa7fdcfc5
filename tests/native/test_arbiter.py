"""The arbiter over open regions: what it publishes for the containers' work, one look at a time."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import pytest
from preloaded import HERE, compiled, run

from vgpu.native import CardLimit, Limits, Region
from vgpu.native.arbiter import Arbiter

SOURCES = HERE.parents[1] / "libvgpu" / "src"
INCLUDES = (f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}")
MS = 1_000_000
LONG = 1800 * MS  #: work until then: no test takes that long from one line to the next
CARD = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
OTHER = "GPU-bbbbbbbb-0000-0000-0000-000000000000"


class Told(msgspec.Struct, frozen=True):
    """What the arbiter has published for one container and card."""

    age_ns: int  #: of the heartbeat; -1: none
    neighbours: int
    share: int
    yields: int
    refund_ns: int


class Container:
    """Writes what a limited container writes."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.region = Region.create(directory, limits)
        self._client = subprocess.Popen(
            [compiled("../arbiter_client.c", *INCLUDES), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, command: str, card: int = 0, *times: int) -> Told:
        assert self._client.stdin
        assert self._client.stdout
        self._client.stdin.write(f"{command} {card} {' '.join(map(str, times))}\n")
        self._client.stdin.flush()
        return Told(*map(int, self._client.stdout.readline().split()))

    def told(self, card: int = 0) -> Told:
        return self.do("told", card)

    def works(self, card: int = 0) -> None:
        self.do("want", card, LONG)

    def rests(self, card: int = 0) -> None:
        self.do("want", card, -LONG)

    def close(self) -> None:
        self.region.close()
        self._client.kill()
        self._client.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def limits(cores: int, policy: str = "elastic", *, priority: int = 0, ceiling: int = 0, uuid: str = CARD) -> Limits:
    card = CardLimit(uuid, None, cores=cores, cores_ceiling=ceiling)
    return Limits((card,), core_policy=policy, priority=priority)  # type: ignore[arg-type]  # a plain str


@contextmanager
def world(folder: Path, *limits_of: Limits) -> Iterator[tuple[Arbiter, list[Container]]]:
    containers = [Container(folder / f"c{number}", each) for number, each in enumerate(limits_of)]
    arbiter = Arbiter()
    try:
        arbiter.follow(container.directory for container in containers)
        arbiter.look()
        yield arbiter, containers
    finally:
        arbiter.stop()
        for container in containers:
            container.close()


def test_arithmetic_of_refunds() -> None:
    run([compiled("../arbiter_units.c", *INCLUDES, str(SOURCES / "arbiter/busy.c"), "-lm")], {})


def test_idle_time_is_lent_and_given_back(tmp_path: Path) -> None:
    with world(tmp_path, limits(20), limits(30), limits(50)) as (arbiter, (a, b, c)):
        a.works()
        b.works()
        arbiter.look()
        assert [each.told().share for each in (a, b, c)] == [40, 60, 50]
        assert [each.told().neighbours for each in (a, b, c)] == [1, 1, 2]
        c.works()
        arbiter.look()
        assert [each.told().share for each in (a, b, c)] == [20, 30, 50]
        a.rests()
        b.rests()
        arbiter.look()
        assert c.told().share == 100


def test_the_heartbeat_goes_on_and_ends_with_the_arbiter(tmp_path: Path) -> None:
    with world(tmp_path, limits(20)) as (arbiter, (a,)):
        arbiter.start()
        deadline = time.monotonic() + 30
        before = arbiter.state().passes
        while arbiter.state().passes < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert a.told().age_ns >= 0
        assert arbiter.state().containers == 1
        arbiter.stop()
        assert a.told().age_ns == -1


def test_a_container_that_is_no_longer_followed_is_told_so(tmp_path: Path) -> None:
    with world(tmp_path, limits(20), limits(30)) as (arbiter, (a, b)):
        b.works()
        arbiter.look()
        assert a.told().neighbours == 1
        arbiter.follow([a.directory])
        arbiter.look()
        assert (a.told().neighbours, b.told().age_ns) == (0, -1)
        assert a.told().age_ns >= 0
        assert arbiter.state().containers == 1


def test_a_region_made_anew_counts_as_new(tmp_path: Path) -> None:
    with world(tmp_path, limits(20), limits(30)) as (arbiter, (a, _)):
        for name in ("limits", "usage"):
            (a.directory / name).unlink()
        with Container(a.directory, limits(70)) as again:
            again.works()
            arbiter.look()
            assert again.told().age_ns == -1
            arbiter.follow([again.directory])
            arbiter.look()
            assert (again.told().share, arbiter.state().containers, arbiter.state().active) == (100, 1, 1)


def test_what_is_no_region_is_left_out_until_it_is_one(tmp_path: Path) -> None:
    with world(tmp_path) as (arbiter, _):
        (tmp_path / "later").mkdir()
        arbiter.follow([tmp_path / "later", tmp_path / "never"])
        arbiter.look()
        assert arbiter.state().containers == 0
        with Container(tmp_path / "later", limits(10)) as later:
            arbiter.follow([tmp_path / "later", tmp_path / "never"])
            arbiter.look()
            assert later.told().age_ns >= 0


def test_changed_limits_are_followed(tmp_path: Path) -> None:
    with world(tmp_path, limits(20), limits(30)) as (arbiter, (a, b)):
        a.works()
        b.works()
        a.region.set_limits(limits(60, ceiling=62))
        arbiter.look()
        assert (a.told().share, b.told().share) == (62, 38)
        a.region.set_limits(limits(60, uuid=OTHER))
        arbiter.look()
        assert (a.told().share, a.told().neighbours, b.told().share) == (100, 0, 100)


def test_cards_are_told_apart(tmp_path: Path) -> None:
    both = Limits((CardLimit(OTHER, None, cores=40), CardLimit(CARD, None, cores=50)), core_policy="elastic")
    with world(tmp_path, both, limits(20)) as (arbiter, (a, b)):
        a.works(0)
        b.works()
        arbiter.look()
        assert (a.told(0).share, a.told(0).neighbours, b.told().share) == (100, 0, 100)
        a.works(1)
        arbiter.look()
        assert (a.told(0).share, a.told(1).share, b.told().neighbours) == (100, 71, 1)


def test_high_priority_makes_low_priority_yield(tmp_path: Path) -> None:
    with world(tmp_path, limits(30, "fixed"), limits(50, "fixed", priority=1)) as (arbiter, (high, low)):
        low.works()
        arbiter.look()
        assert low.told().yields == 0
        high.works()
        arbiter.look()
        assert (high.told().yields, low.told().yields) == (0, 1)
        high.rests()
        arbiter.look()
        assert low.told().yields == 0


def test_a_measurement_that_others_were_inside_of_is_refunded(tmp_path: Path) -> None:
    with world(tmp_path, limits(30), limits(50), limits(10)) as (arbiter, (a, b, c)):
        a.do("run", 0, -8000 * MS, -4000 * MS)
        arbiter.look()
        assert a.told().refund_ns == 0
        b.do("run", 0, -6000 * MS, -3000 * MS)  # not quite 2 s of both: the two lines are not read at once
        c.do("run", 0, -2500 * MS, -1000 * MS)
        arbiter.look()
        refunded = a.told().refund_ns, b.told().refund_ns
        assert 0 < sum(refunded) <= 2000 * MS
        assert abs(refunded[1] - refunded[0]) <= 2 * MS  # they took turns
        assert c.told().refund_ns == 0
        refund = a.told().refund_ns
        a.do("take")
        arbiter.look()
        assert a.told().refund_ns == refund


def test_short_launches_inside_of_a_long_one_are_refunded(tmp_path: Path) -> None:
    with world(tmp_path, limits(30), limits(50)) as (arbiter, (long, short)):
        begun = time.monotonic_ns()
        for _ in range(4):
            time.sleep(0.005)  # work of some milliseconds between two looks
            short.do("use", 0, 1 * MS)
            arbiter.look()
        # from well before them: the client reckons from when it is told
        long.do("run", 0, begun - time.monotonic_ns() - 200 * MS, 0)
        arbiter.look()
        assert 3 * MS < long.told().refund_ns <= 4 * MS
        assert short.told().refund_ns == 0


@pytest.mark.parametrize("command", [("open", -5 * MS), ("run", -5 * MS, -9 * MS), ("run", -5 * MS, LONG)])
def test_half_a_measurement_and_nonsense_count_for_nothing(tmp_path: Path, command: tuple[str, int]) -> None:
    with world(tmp_path, limits(30), limits(50)) as (arbiter, (a, b)):
        a.do(command[0], 0, *command[1:])
        a.do("run", 0, -100 * MS, -50 * MS)
        for _ in range(3):
            arbiter.look()
        b.do("run", 0, -9000 * MS, 0)
        arbiter.look()
        assert 24 * MS <= b.told().refund_ns <= 26 * MS


def test_more_measurements_than_the_ring_holds_lose_the_oldest(tmp_path: Path) -> None:
    with world(tmp_path, limits(30), limits(50)) as (arbiter, (a, b)):
        for number in range(100):
            a.do("run", 0, (5 * number - 1001) * MS, (5 * number - 1000) * MS)
        b.do("run", 0, -9000 * MS, 0)
        arbiter.look()
        assert abs(b.told().refund_ns - 64 * MS) <= 2


def test_a_container_that_cuts_its_file_short_harms_nobody(tmp_path: Path) -> None:
    with world(tmp_path, limits(50), limits(50)) as (arbiter, (a, b)):
        a.works()
        b.works()
        arbiter.look()
        assert b.told().share == 50
        (a.directory / "usage").open("r+b").truncate(0)
        b.do("run", 0, -10 * MS, -5 * MS)
        arbiter.look()
        arbiter.look()
        assert (b.told().share, b.told().neighbours) == (100, 0)


def test_work_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    with world(tmp_path, limits(30), limits(70)) as (arbiter, (a, b)):
        a.works()
        b.do("want", 0, 365 * 86400 * 1000 * MS)  # nothing waits for a year
        arbiter.look()
        assert a.told().share == 100
        b.do("use", 0, 100 * MS)  # charged at the launch: it is under way
        arbiter.look()
        assert a.told().share == 30
        deadline = time.monotonic() + 30
        while a.told().share == 30:
            assert time.monotonic() < deadline
            a.works()
            arbiter.look()


def test_unused_guarantees_are_lent_while_the_card_has_time_left(tmp_path: Path) -> None:
    with world(tmp_path, limits(30), limits(70)) as (arbiter, (a, b)):
        deadline = time.monotonic() + 30
        while not ((told := a.told()).share > 80 and told.neighbours):  # b has work, and uses nothing worth mentioning
            assert time.monotonic() < deadline
            a.do("throttled", 0, 1)
            a.works()
            b.do("want", 0, 0)
            arbiter.look()
        assert b.told().share >= 70
        b.do("throttled", 0, 1)
        b.works()
        arbiter.look()
        assert a.told().share == 30
