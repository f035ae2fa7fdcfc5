"""The accounts of a container whose memory may lie in host memory: allocated, on the card, not on the card."""

import random
import time
from pathlib import Path

import pytest
from ledger_programs import MIB, Client
from test_ledger_storm import DEATH, died_at, finish, hammer, report

from vgpu.native import CardLimit, Limits, Region

MEMORY, GUARANTEE, HOST = 100_000, 60_000, 50_000


def region_in(directory: Path, *, movable: bool = False, scale: int = 1) -> Region:
    directory.mkdir(parents=True, exist_ok=True)
    card = CardLimit("GPU-a", MEMORY * scale, GUARANTEE * scale)
    return Region.create(directory, Limits((card,), host_memory=HOST * scale, oversubscribe=True, movable=movable))


def client_in(region: Region, *flags: str) -> Client:
    return Client({"VGPU_DIR": str(region.directory)}, *flags)


def test_memory_on_the_card_is_tested_against_both_limits(tmp_path: Path) -> None:
    with region_in(tmp_path) as region, client_in(region) as client:
        ticket = client.charge(GUARANTEE)
        assert client.charge(1) is None
        assert client.ask("accounts 0") == f"{GUARANTEE} 0 {GUARANTEE}"
        assert client.ask(f"allocate 0 {MEMORY - GUARANTEE}") == "ok 1"
        assert client.ask("allocate 0 1") == "refused"
        assert client.ask("accounts 0") == f"{MEMORY} 0 {GUARANTEE}"
        client.release(ticket or 0, 100)
        assert client.ask("accounts 0") == f"{MEMORY - 100} 0 {GUARANTEE - 100}"
        (process,) = region.usage().processes
        assert (process.used, process.host, process.resident) == ((MEMORY - 100,), (0,), (GUARANTEE - 100,))
        card = region.usage().cards[0]
        assert (card.used, card.host_used, card.resident, card.lent) == (MEMORY - 100, 0, GUARANTEE - 100, 0)


def test_the_parts_of_a_block_have_limits_of_their_own(tmp_path: Path) -> None:
    with region_in(tmp_path) as region, client_in(region) as client:
        assert client.ask("allocate 0 1000") == "ok 0"
        assert client.ask(f"resident 0 {GUARANTEE - 99} 100") == "refused"
        assert client.ask(f"resident 0 {GUARANTEE - 100} 100") == "ok 1"
        assert client.ask("beside 0 1000 0") == "refused"
        client.release(1, GUARANTEE - 100)
        assert client.ask("beside 0 1000 0") == "ok 2"
        assert client.ask("accounts 0") == "1000 0 1000"
        client.release(2, 1000)
        assert client.ask(f"host-charge 0 {HOST}") == "ok 3"
        assert client.ask("host-charge 0 1") == "refused"
        assert client.ask("accounts 0") == f"0 {HOST} 0"
        assert region.usage().cards[0].refused == 0


def test_what_is_lent_comes_on_top_of_the_guarantee(tmp_path: Path) -> None:
    with region_in(tmp_path, movable=True) as region, client_in(region) as client:
        assert client.ask(f"resident 0 {GUARANTEE} 0") == "ok 0"
        region.lend(0, 1000)
        assert client.ask("resident 0 1001 0") == "refused"
        assert client.ask("resident 0 1000 0") == "ok 1"
        region.lend(0, 500)  # what is held already stays: it is the library's to give way
        assert client.ask("resident 0 1 0") == "refused"
        client.release(1, 501)
        assert client.ask("resident 0 1 0") == "ok 2"
        assert region.usage().cards[0].lent == 500
        assert region.limits().movable
        with pytest.raises(OSError, match="read-only"), Region.open(tmp_path) as looker:
            looker.lend(0, 1)


def test_what_is_lent_is_for_memory_that_can_move(tmp_path: Path) -> None:
    with region_in(tmp_path, movable=True) as region, client_in(region) as client:
        region.lend(0, 30_000)
        ticket = client.charge(GUARANTEE - 1000)
        assert client.charge(1001) is None
        assert client.ask("allocate 0 1001") == "ok 1"
        assert client.ask("beside 1 1001 0") == "refused"
        assert client.ask("fixed 0") == f"{GUARANTEE - 1000}"
        assert client.ask("resident 0 20000 0") == "ok 2"
        assert client.ask("stays 2 20000") == "ok"  # such as when it is exported
        assert client.ask("fixed 0") == f"{GUARANTEE + 19_000}"
        client.release(ticket or 0, 21_000)
        assert client.ask("beside 1 1001 0") == "ok 3"
        assert client.charge(1000) is None
        client.release(2, 20_000)
        assert client.ask("fixed 0") == f"{GUARANTEE - 22_000 + 1001}"
        assert client.ask("accounts 0") == f"{GUARANTEE - 22_000 + 1001} 0 {GUARANTEE - 22_000 + 1001}"


def test_a_container_that_can_move_is_one_with_a_tier(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="movable is set; allowed: only with oversubscribe"):
        Region.create(tmp_path, Limits((CardLimit("GPU-a", 100),), movable=True))


def test_overhead_is_on_the_card(tmp_path: Path) -> None:
    with region_in(tmp_path) as region:
        region.charge_overhead(0, 1000)
        assert (region.usage().cards[0].used, region.usage().cards[0].resident) == (1000, 1000)
        region.charge_overhead(0, 0)
        assert (region.usage().cards[0].used, region.usage().cards[0].resident) == (0, 0)


def test_a_killed_process_s_room_on_the_card_is_found(tmp_path: Path) -> None:
    with region_in(tmp_path) as region, client_in(region) as victim, client_in(region) as other:
        assert victim.charge(GUARANTEE) is not None
        assert other.ask("allocate 0 1000") == "ok 0"
        assert other.ask("beside 0 1000 0") == "refused"
        victim.kill()
        assert other.ask("beside 0 1000 0") == "ok 1"
        assert other.ask("accounts 0") == "1000 0 1000"


def test_totals_are_exact_after_threads_and_processes_have_hammered(tmp_path: Path) -> None:
    with region_in(tmp_path) as region:
        processes = [hammer(tmp_path, seed, 3, 30_000, 1000) for seed in range(4)]
        reports = [report(process) for process in processes]
        card = region.usage().cards[0]
        for account, said in (("held", card.used), ("resident", card.resident), ("host", card.host_used)):
            assert said == sum(r[account] for r in reports), account
        assert card.used == card.resident + card.host_used
        assert card.host_used > 0
        assert card.resident > 0
        for process in processes:
            finish(process)
        assert region.reap() == 4
        card = region.usage().cards[0]
        assert (card.used, card.resident, card.host_used, region.usage().saturated) == (0, 0, 0, 0)


def test_kill_9_at_random_moments_loses_and_keeps_nothing(tmp_path: Path) -> None:
    chance = random.Random(20261)
    with region_in(tmp_path) as region:
        survivors = [hammer(tmp_path, seed, 2, 150_000, 1000) for seed in (1, 2)]
        victims = [hammer(tmp_path, 10, 3, 0, 1000)]
        for storm in range(30):
            victims.append(hammer(tmp_path, 11 + storm, 3, 0, 1000))
            time.sleep(chance.uniform(0, 0.02))  # the moment is what is random
            victim = victims.pop(0)
            victim.kill()
            victim.communicate()
            card = region.usage().cards[0]
            assert card.used <= MEMORY
            assert card.resident <= GUARANTEE
            assert card.host_used <= HOST
        for victim in victims:
            victim.kill()
            victim.communicate()
        reports = [report(process) for process in survivors]
        region.reap()
        card = region.usage().cards[0]
        for account, said in (("held", card.used), ("resident", card.resident), ("host", card.host_used)):
            assert said == sum(r[account] for r in reports), account
        for process in survivors:
            finish(process)
        region.reap()
        card = region.usage().cards[0]
        assert (card.used, card.resident, card.host_used, region.usage().saturated) == (0, 0, 0, 0)


#: on the card, in two parts, refused by either account, moved, given back
BLOCKS = (
    f"charge 0 {10_000 * MIB}",
    f"charge 0 {50_001 * MIB}",
    f"charge 0 {90_001 * MIB}",
    f"allocate 0 {1000 * MIB}",
    f"beside 1 {1000 * MIB} 0",
    f"release 2 {1000 * MIB}",
    f"allocate 0 {2000 * MIB}",
    f"host-charge 0 {2000 * MIB}",
    f"resident 0 {2000 * MIB} 0",
    f"release 4 {2000 * MIB}",
    f"release 0 {10_000 * MIB}",
)


def test_an_owner_may_die_at_any_store(tmp_path: Path) -> None:
    point, died = 0, True
    while died:
        point += 1
        with region_in(tmp_path / str(point), scale=MIB) as region, client_in(region, DEATH) as owner:
            died = died_at(owner, point, BLOCKS)
            owner.kill()
            with client_in(region) as neighbour:
                neighbour.ask("reap 0")
                assert neighbour.ask("accounts 0") == "0 0 0", f"point {point}"
                assert neighbour.ask("fixed 0") == "0", f"point {point}"
                assert neighbour.charge(GUARANTEE * MIB) is not None, f"point {point}"
            assert region.usage().saturated == 0, f"point {point}"
    assert point > 60  # the points are there at all
