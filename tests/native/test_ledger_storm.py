"""The ledger under pressure: many threads and processes, kill -9 at random moments, death between any two stores."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_programs import MIB, PATIENCE_S, Client, environment, program

from vgpu.native import CardLimit, Limits, Region

DEATH = "-DVGPU_DEATH_POINTS"


def region_in(directory: Path, memory: int) -> Region:
    directory.mkdir(exist_ok=True)
    return Region.create(directory, Limits((CardLimit("GPU-a", memory),)))


def hammer(directory: Path, seed: int, threads: int, rounds: int, most: int, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program("ledger_hammer", *flags), *map(str, (seed, threads, rounds, most))],
        env=environment({"VGPU_DIR": str(directory)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def report(process: subprocess.Popen[str]) -> dict[str, int]:
    """What a hammer prints at its end; it keeps its charges until `finish`."""
    assert process.stdout
    words = process.stdout.readline().split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def finish(process: subprocess.Popen[str]) -> None:
    _, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert process.returncode == 0


def reap_until(region: Region, processes: int) -> int:
    """Reaps until only `processes` are left; returns how many slots were freed.

    A slot counts as dead once its lock is free. A reader of /proc/PID/maps or /proc/PID/fd of a killed process keeps
    the process's files open a moment longer than the process lives, and with them the lock.
    """
    deadline = time.monotonic() + PATIENCE_S
    freed = region.reap()
    while len(region.usage().processes) > processes:
        assert time.monotonic() < deadline, region.usage()
        time.sleep(0.01)
        freed += region.reap()
    return freed


@pytest.mark.parametrize("limit", [1 << 40, 20_000], ids=["roomy", "tight"])
def test_totals_are_exact_after_threads_and_processes_have_hammered(tmp_path: Path, limit: int) -> None:
    with region_in(tmp_path, limit) as region:
        processes = [hammer(tmp_path, seed, 3, 30_000, 1000) for seed in range(4)]
        reports = [report(process) for process in processes]
        usage = region.usage()
        held = sum(r["held"] for r in reports)
        assert usage.cards[0].used == held <= limit
        assert sorted(p.used[0] for p in usage.processes) == sorted(r["held"] for r in reports)
        assert usage.cards[0].refused == sum(r["refused"] for r in reports)
        assert (sum(r["refused"] for r in reports) > 0) == (limit == 20_000)
        for process in processes:
            finish(process)
        assert reap_until(region, 0) == 4
        usage = region.usage()
        assert (usage.cards[0].used, usage.saturated, usage.processes) == (0, 0, ())


def test_limits_without_a_shared_folder_hold_for_threads(tmp_path: Path) -> None:
    process = subprocess.run(
        [program("ledger_hammer"), "1", "4", "20000", "1000"],
        env=environment({"CUDA_DEVICE_MEMORY_LIMIT": "20000"}),
        input="\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    words = process.stdout.split()
    numbers = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    assert numbers["held"] <= 20_000
    assert numbers["refused"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    with region_in(tmp_path, 20_000) as region:
        flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
        first, second = (hammer(tmp_path, seed, 3, 3000, 1000, *flags) for seed in (1, 2))
        held = report(first)["held"] + report(second)["held"]
        assert region.usage().cards[0].used == held
        finish(first)
        finish(second)


def test_of_two_that_ask_for_600_of_1024_mib_exactly_one_gets_it(tmp_path: Path) -> None:
    with region_in(tmp_path, 1024 * MIB) as region:
        result = subprocess.run(
            [program("ledger_lockstep"), "20000"],
            env=environment({"VGPU_DIR": str(tmp_path)}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        assert result.stdout == "none 0 one 20000 both 0 left 0\n"
        assert region.usage().saturated == 0


def test_kill_9_at_random_moments_loses_and_keeps_nothing(tmp_path: Path) -> None:
    chance = random.Random(20260)
    with region_in(tmp_path, 100_000) as region:
        survivors = [hammer(tmp_path, seed, 2, 200_000, 1000) for seed in (1, 2)]
        victims = [hammer(tmp_path, 10, 3, 0, 1000)]
        for storm in range(40):
            victims.append(hammer(tmp_path, 11 + storm, 3, 0, 1000))
            time.sleep(chance.uniform(0, 0.02))  # the moment is what is random
            victim = victims.pop(0)
            victim.kill()
            victim.communicate()
            if storm % 3 == 0:
                region.reap()
            assert region.usage().cards[0].used <= 100_000
        for victim in victims:
            victim.kill()
            victim.communicate()
        held = sum(report(process)["held"] for process in survivors)
        reap_until(region, 2)
        usage = region.usage()
        assert usage.cards[0].used == held == sum(p.used[0] for p in usage.processes)
        assert len(usage.processes) == 2
        for process in survivors:
            finish(process)
        reap_until(region, 0)
        usage = region.usage()
        assert (usage.cards[0].used, usage.saturated, usage.processes) == (0, 0, ())


# Death between any two stores

OWNER = ("charge 0 100m", "charge 0 200m", "release 0 104857600", "charge 0 2g", "release 1 104857600")


def died_at(client: Client, point: int, commands: tuple[str, ...]) -> bool:
    """Whether the client died on its way through `commands` at the point-th store."""
    assert client.ask(f"arm {point}") == "ok"
    for command in commands:
        if client.try_ask(command) is None:
            client.kill()
            return True
    return False


def deaths(directory: Path, commands: tuple[str, ...]) -> Iterator[tuple[int, Region]]:
    """A fresh region for every point at which a process that runs `commands` can die, after its death there."""
    point = 1
    while True:
        with region_in(directory / str(point), 1024 * MIB) as region:
            with Client({"VGPU_DIR": str(region.directory)}, DEATH) as owner:
                if not died_at(owner, point, commands):
                    return
            yield point, region
        point += 1


@pytest.mark.parametrize("neighbour_moves", [False, True], ids=["word untouched", "word moved on"])
def test_an_owner_may_die_at_any_store(tmp_path: Path, neighbour_moves: bool) -> None:
    last = 0
    for point, region in deaths(tmp_path, OWNER):
        last = point
        with Client({"VGPU_DIR": str(region.directory)}) as neighbour:
            held = 0
            if neighbour_moves:
                assert neighbour.charge("50m") is not None, f"point {point}"
                held = 50 * MIB
            neighbour.ask("reap 0")
            assert neighbour.used() == held, f"point {point}"
            assert neighbour.charge(1024 * MIB - held) is not None, f"point {point}"
            assert neighbour.charge(1) is None, f"point {point}"
            assert region.usage().process_count == 1, f"point {point}"
    assert last > 20  # the points are there at all


def test_a_reaper_may_die_at_any_store(tmp_path: Path) -> None:
    tried = 0
    for owner_point in (*range(5, 16), 100):  # after every store of a charge, and at rest
        reaper_point = 0
        while True:
            reaper_point += 1
            with region_in(tmp_path / f"{owner_point}-{reaper_point}", 1024 * MIB) as region:
                variables = {"VGPU_DIR": str(region.directory)}
                with (
                    Client(variables, DEATH) as owner,
                    Client(variables, DEATH) as reaper,
                    Client(variables) as next_one,
                ):
                    died_at(owner, owner_point, ("charge 0 100m", "charge 0 200m"))
                    owner.kill()
                    died = died_at(reaper, reaper_point, ("reap 0",))
                    reaper.kill()
                    next_one.ask("reap 0")
                    assert next_one.charge(1024 * MIB) is not None, f"points {owner_point}, {reaper_point}"
                    assert next_one.used() == 1024 * MIB, f"points {owner_point}, {reaper_point}"
                    usage = region.usage()
                    assert (usage.process_count, usage.saturated) == (1, 0), f"points {owner_point}, {reaper_point}"
            if not died:
                break
            tried += 1
    assert tried > 100


def test_a_late_reaper_leaves_the_slot_s_next_holder_alone(tmp_path: Path) -> None:
    with region_in(tmp_path, 1024 * MIB) as region:
        variables = {"VGPU_DIR": str(region.directory)}
        with Client(variables) as victim, Client(variables, DEATH) as late, Client(variables) as heir:
            victim.charge("100m")
            late.charge("1m")
            victim.kill()
            late.ask("halt 1")  # it has seen that the victim is dead
            late.send("reap 0")
            os.waitid(os.P_PID, late.pid, os.WSTOPPED)
            assert reap_until(region, 1) == 1
            assert heir.charge("200m") is not None
            assert [(p.slot, p.pid) for p in region.usage().processes] == [(0, heir.pid), (1, late.pid)]
            os.kill(late.pid, signal.SIGCONT)
            assert late.line() == "0"
            assert heir.used() == 201 * MIB
            assert heir.charge("823m") is not None
