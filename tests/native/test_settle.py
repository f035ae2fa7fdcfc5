"""Memory that the driver takes for a process by itself, charged to the container by the agent."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from preloaded import MIB, environment

from device_plugin.overhead import Identity, identity_of, overheads
from vgpu.native import CardLimit, Limits, ProcessUsage, Region, simulator

AGENT = """
from pathlib import Path
from device_plugin.sandbox import Entry
from device_plugin.overhead import Settler
settler = Settler()
entries = [Entry("uid", "main", Path({region!r}))]
while input() == "settle":
    settler.once(entries)
    print("settled", flush=True)
"""
PROGRAM = """
from driver_client import *
start()
alloc(100 * MIB)
print("begun", flush=True)
while True:
    try:
        print(eval(input()), flush=True)
    except EOFError:
        break
"""


class Talk:
    """A program that answers each line by one."""

    def __init__(self, script: str, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()


@contextmanager
def talk(script: str, env: dict[str, str]) -> Iterator[Talk]:
    talking = Talk(script, env)
    try:
        yield talking
    finally:
        talking.process.kill()
        talking.process.communicate()


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    simulator.create(tmp_path / "cards", "T4")
    card = simulator.cards(tmp_path / "cards")[0]
    (tmp_path / "region").mkdir()
    limit = CardLimit(card.uuid, 1000 * MIB, context_bytes=card.context_bytes)
    with Region.create(tmp_path / "region", Limits((limit,))) as made:
        yield made


def test_modules_are_charged_to_the_container(tmp_path: Path, region: Region) -> None:
    env = environment(tmp_path, VGPU_DIR=str(tmp_path / "region"))
    card = simulator.cards(tmp_path / "cards")[0]
    agent_env = environment(tmp_path, preload=False)
    with talk(AGENT.format(region=str(tmp_path / "region")), agent_env) as agent, talk(PROGRAM, env) as program:
        assert program.hear() == "begun"
        plain = region.usage().cards[0].used
        assert plain == card.context_bytes + 100 * MIB
        assert program.ask("function('spin_5ms') is not None") == "True"
        agent.ask("settle")
        assert region.usage().cards[0].used == plain, "one reading may have met an allocation on its way"
        agent.ask("settle")
        used = region.usage().cards[0]
        assert used.used == plain + card.module_bytes == simulator.cards(tmp_path / "cards")[0].used
        assert used.by_kind["overhead"] == card.module_bytes > 0
        rest = 1000 * MIB - used.used
        assert program.ask(f"info()[0], alloc({rest + 1})[0], alloc({rest})[0]") == f"({rest}, 2, 0)"
        region.reap()
        assert region.usage().cards[0].used == 1000 * MIB, "the agent's slot is no dead one"
        program.process.kill()
        program.process.wait()
        agent.ask("settle")
        region.reap()
        assert region.usage().cards[0].used == 0


def test_an_agent_that_was_killed_leaves_a_charge_that_can_be_taken_back(tmp_path: Path, region: Region) -> None:
    other = f"""
from pathlib import Path
from vgpu.native import Region
Region.open(Path({str(tmp_path / "region")!r}), writable=True).charge_overhead(0, 300 << 20)
print("charged", flush=True)
input()
"""
    with talk(other, environment(tmp_path, preload=False)) as agent:
        assert agent.hear() == "charged"
        region.reap()
        assert region.usage().cards[0].used == 300 * MIB
    assert region.usage().cards[0].used == 300 * MIB
    assert region.reap() == 1
    assert region.usage().cards[0].used == 0


def test_charges_grow_shrink_and_stay_apart_by_card(region: Region) -> None:
    for amount in (5 * MIB, 7 * MIB, MIB, 0, 2000 * MIB):
        region.charge_overhead(0, amount)
        assert region.usage().cards[0].used == amount
    with pytest.raises(OSError, match="Invalid argument"):
        region.charge_overhead(16, 1)
    with Region.open(region.directory) as reader, pytest.raises(OSError, match="read-only"):
        reader.charge_overhead(0, 1)


def usage(pid: int, *used: int) -> ProcessUsage:
    return ProcessUsage(pid, 0, 4, 9, used, (), (0,), (0,), (0,))


def test_the_larger_of_two_readings_of_the_charges_counts() -> None:
    limits = Limits((CardLimit("a", None), CardLimit("b", None)))
    memory = {"a": {Identity(1, 4, 9): 100, Identity(2, 4, 9): 70}, "b": {Identity(1, 4, 9): 5, Identity(1, 5, 9): 50}}
    assert overheads(limits, [], memory, []) == [0, 0], "nobody of this container"
    assert overheads(limits, [usage(1, 90, 5)], memory, [usage(1, 60, 6)]) == [10, 0]
    assert overheads(limits, [usage(1, 0, 0)], memory, [usage(1, 100, 0), usage(2, 50, 0)]) == [20, 5]


def test_only_charges_of_the_card_itself_are_compared_with_the_driver() -> None:
    limits = Limits((CardLimit("a", 1000, guarantee=400),), oversubscribe=True)
    paid = msgspec.structs.replace(usage(1, 900), host=(600,), resident=(300,))
    assert overheads(limits, [paid], {"a": {Identity(1, 4, 9): 350}}, [paid]) == [50]


def test_who_a_process_is_inside(tmp_path: Path) -> None:
    assert identity_of(4, tmp_path) is None
    folder = tmp_path / "4"
    (folder / "ns").mkdir(parents=True)
    (folder / "ns" / "pid").touch()
    (folder / "status").write_text("Name:\tx\nNSpid:\t4\t17\n")
    (folder / "stat").write_text("4 (a) b) S " + " ".join(str(n) for n in range(1, 40)))
    assert identity_of(4, tmp_path) == Identity(17, (folder / "ns" / "pid").stat().st_ino, 19)
