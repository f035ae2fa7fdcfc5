"""Ways out of a managed container: by the card's own count, no route gives one byte more than the slice."""

import time
from pathlib import Path
from subprocess import Popen

import pytest
from redteam.clients import compile_into
from redteam.container import MIB, ROOT, Container, available
from redteam.route import Route, shortfall
from redteam.routes import ROUTES

from vgpu.native import Region

pytestmark = pytest.mark.skipif(available() != "", reason=available())


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_into(tmp_path_factory.mktemp("clients"))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_no_byte_more(route: Route, tmp_path: Path, clients: Path) -> None:
    if route.root and not ROOT:
        pytest.skip("needs several user ids in the container (root)")
    container = Container(tmp_path, clients)
    container.run(route.script, before=route.before, **route.variables)
    assert shortfall(route, container.peak, container.limit) == ""


def test_an_agent_outside_tells_the_living_from_the_dead(tmp_path: Path, clients: Path) -> None:
    """From another pid namespace: a daemon that holds neither descriptors nor locks, and then ends."""
    container = Container(tmp_path, clients)
    script = """
daemon = Other("-n")
print(daemon.got > 0)
input()
open("/run/scratch/end", "w").close()
input()
"""
    with container.start(script) as process, Region.open(container.region, writable=True) as region:
        assert process.stdout
        assert process.stdout.readline() == "True\n"
        assert region.reap() == 0
        assert region.usage().cards[0].used == container.limit
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
        end = time.monotonic() + 30
        while region.reap() == 0:
            assert time.monotonic() < end, "an ended daemon keeps its memory"
        assert region.usage().cards[0].used == 0
        process.communicate("\n", timeout=30)


def tell(process: Popen[str], line: str = "") -> str:
    """Lets a container's script continue; returns its next line."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_a_limit_that_sinks_below_use_stops_allocations_and_breaks_nothing(tmp_path: Path, clients: Path) -> None:
    container = Container(tmp_path, clients, limit=800 * MIB)
    script = """
one = started()
blocks = [one.alloc(100 * MIB)[1] for _ in range(6)]
print(len(blocks))
while True:
    input()
    status, pointer = one.alloc(1)
    if status == 0:
        one.free(pointer)
    print(status, one.free(blocks.pop()), other())
"""
    with container.start(script) as process:
        assert process.stdout
        assert process.stdout.readline() == "6\n"
        used = container.used
        container.resize(used - 250 * MIB)
        answers = [tell(process) for _ in range(4)]
        # over by 250, by 150, by 50; then 50 MiB are free, too few for the context of another process
        assert answers == ["2 0 0", "2 0 0", "2 0 0", "0 0 " + answers[3].split()[2]]
        assert container.peak == used
        container.resize(800 * MIB)
        assert tell(process).split()[:2] == ["0", "0"]
        process.communicate("", timeout=30)
    assert container.peak <= 800 * MIB


def test_two_containers_on_one_card_each_get_their_own(tmp_path: Path, clients: Path) -> None:
    first = Container(tmp_path / "first", clients, limit=700 * MIB)
    second = Container(tmp_path / "second", clients, limit=300 * MIB, cards=first.cards)
    script = "one = started()\ninput()\nprint(one.fill())\ninput()\nprint(one.fill())\ninput()"
    with first.start(script) as one, second.start(script) as two:
        for process in (one, two):
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        got = [int(process.stdout.readline()) for process in (one, two) if process.stdout]
        context = 700 * MIB - got[0]
        assert got == [700 * MIB - context, 300 * MIB - context]
        assert first.used == 1000 * MIB
        assert [tell(process) for process in (one, two)] == ["0", "0"]
        for process in (one, two):
            process.communicate("\n", timeout=30)
    assert first.peak == 1000 * MIB
