"""What limited processes may charge, which processes share an account, and whose memory is freed when."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_programs import MIB, Client

from vgpu.native import CardLimit, Limits, Region

GIB = 1024 * MIB


def one_card(memory: int | None = GIB) -> Limits:
    return Limits((CardLimit("GPU-a", memory),))


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return Region.create(tmp_path, one_card())


def in_region(region: Region) -> Client:
    return Client({"VGPU_DIR": str(region.directory)})


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the state was never reached"
        time.sleep(0.001)


def test_an_exact_fit_is_granted_and_one_byte_more_refused(region: Region) -> None:
    with in_region(region) as client:
        assert client.ask("mode") == "region"
        assert client.charge(GIB) is not None
        assert client.used() == GIB
        assert client.charge(1) is None
        assert client.used() == GIB
    assert region.usage().cards[0].refused == 1


def test_a_huge_request_is_refused_without_a_trace(region: Region) -> None:
    with in_region(region) as client:
        assert client.charge(2**64 - 1) is None
        assert client.charge(2**63) is None
        ticket = client.charge(GIB)
        assert ticket is not None
        assert client.charge(2**64 - 1) is None
        client.release(ticket, GIB)
        assert client.used() == 0


def test_processes_share_one_account(region: Region) -> None:
    with in_region(region) as first, in_region(region) as second:
        ticket = first.charge("600m")
        assert ticket is not None
        assert second.charge("600m") is None
        assert second.charge("424m") is not None
        assert second.used() == first.used() == GIB
        first.release(ticket, 600 * MIB)
        assert second.charge("600m") is not None


def test_cards_have_accounts_of_their_own(tmp_path: Path) -> None:
    limits = Limits((CardLimit("GPU-a", 100), CardLimit("GPU-b", 200), CardLimit("GPU-c", None)))
    with Region.create(tmp_path, limits) as region, in_region(region) as client:
        assert [client.charge(150, card) is not None for card in (0, 1, 2, 3, 15, 16, 99)] == [
            False, True, True, False, False, False, False,
        ]  # fmt: skip
        assert [card.used for card in region.usage().cards] == [0, 150, 150]


def test_device_and_host_bytes_are_told_apart(tmp_path: Path) -> None:
    limits = Limits((CardLimit("GPU-a", 100),), host_memory=50)
    with Region.create(tmp_path, limits) as region, in_region(region) as client:
        assert client.ask("host-charge 0 50") == "ok 0"
        assert client.ask("host-charge 0 1") == "refused"
        assert client.charge(100) == 1
        assert (region.usage().cards[0].used, region.usage().cards[0].host_used) == (100, 50)


def test_what_the_driver_has_taken_is_charged_even_above_the_limit(region: Region) -> None:
    with in_region(region) as client:
        assert client.ask("force 0 2g") == "ok 0"
        assert client.used() == 2 * GIB
        assert client.charge(1) is None
        client.release(0, 2 * GIB)
        assert client.charge(GIB) is not None


def test_parts_are_released_and_never_more_than_was_charged(region: Region) -> None:
    with in_region(region) as client:
        ticket = client.charge(100)
        assert ticket is not None
        client.release(ticket, 30)
        assert client.used() == 70
        client.release(ticket, 1000)
        assert client.used() == 0
    assert region.usage().saturated == 1


def test_limits_change_under_a_running_process(region: Region) -> None:
    with in_region(region) as client:
        assert client.charge(GIB) is not None
        region.set_limits(one_card(2 * GIB))
        ticket = client.charge(GIB)
        assert ticket is not None
        region.set_limits(one_card(GIB))
        assert client.ask("limit 0") == str(GIB)
        client.release(ticket, GIB)
        assert client.charge(1) is None


def test_a_killed_process_leaves_its_memory_to_whoever_is_refused(region: Region) -> None:
    with in_region(region) as victim, in_region(region) as other:
        assert victim.charge(GIB) is not None
        assert other.charge(1) is None
        victim.kill()
        assert other.used() == GIB
        assert other.charge(GIB) is not None
    assert region.usage().saturated == 0


def test_the_agent_reaps_too(region: Region) -> None:
    with in_region(region) as victim:
        victim.charge("1m")
        usage = region.usage()
        assert [(p.pid, p.used) for p in usage.processes] == [(victim.pid, (MIB,))]
        assert usage.cards[0].processes == 1
        assert region.reap() == 0
        victim.kill()
        assert region.reap() == 1
    usage = region.usage()
    assert usage.processes == ()
    assert usage.cards[0].used == 0


def test_a_slot_is_used_again(region: Region) -> None:
    for _ in range(3):
        with in_region(region) as client:
            client.charge("1m")
            assert [p.slot for p in region.usage().processes] == [0]
            client.kill()
            assert region.reap() == 1


def test_a_slot_is_found_when_the_dead_hold_all_of_them(region: Region) -> None:
    with in_region(region) as client:
        assert client.ask("occupy dead") == "ok"
        assert region.usage().process_count == 1016
        assert client.charge("1m") is not None
        assert client.used() == MIB
    assert region.usage().process_count == 1


def test_without_a_free_slot_nothing_is_granted(region: Region, capfd: pytest.CaptureFixture[str]) -> None:
    variables = {"VGPU_DIR": str(region.directory), "LIBCUDA_LOG_LEVEL": "1"}
    with in_region(region) as crowd, Client(variables) as late:
        assert crowd.ask("occupy living") == "ok"
        assert late.charge(1) is None
        assert "no slot in the region: all are taken by living processes" in capfd.readouterr().err
        crowd.kill()
        assert late.charge("1g") is not None


def test_statistics_are_the_process_s_own_and_go_with_it(region: Region) -> None:
    with in_region(region) as client:
        assert client.charge(607) is not None
        client.ask("kind 0 0 10")
        client.ask("kind 0 0 -3")
        client.ask("time 0 5000 3")
        client.ask("throttled 0 700")
        usage = region.usage()
        assert usage.cards[0].by_kind == usage.processes[0].by_kind[0]
        assert usage.cards[0].by_kind["buffer"] == 600
        assert usage.cards[0].by_kind["context"] == 7
        process, card = usage.processes[0], usage.cards[0]
        assert (process.gpu_ns, process.launches, process.throttled_ns) == ((5000,), (3,), (700,))
        assert (card.gpu_ns, card.launches, card.throttled_ns) == (5000, 3, 700)
        client.kill()
    region.reap()
    card = region.usage().cards[0]
    assert set(card.by_kind.values()) == {0}
    assert (card.gpu_ns, card.launches, card.throttled_ns) == (5000, 3, 700)
    with in_region(region) as client:  # the next process in that slot begins at nothing
        assert client.charge(1) is not None
        process = region.usage().processes[0]
        assert (process.gpu_ns, process.launches, process.throttled_ns) == ((0,), (0,), (0,))


# Fork, exec and odd ways to live on


def test_a_forked_child_has_a_slot_of_its_own(region: Region) -> None:
    with in_region(region) as client:
        ticket = client.charge("1m")
        child = int(client.ask("fork").removeprefix("child "))
        client.release(ticket or 0, MIB)  # the parent's charge: nothing happens
        assert client.used() == MIB
        assert client.charge("2m") is not None
        assert {p.pid: p.used for p in region.usage().processes} == {client.pid: (MIB,), child: (2 * MIB,)}


def test_a_killed_child_s_memory_is_freed_while_its_parent_lives(region: Region) -> None:
    with in_region(region) as client:
        client.charge("1m")
        child = int(client.ask("fork").removeprefix("child "))
        assert client.charge("2m") is not None
        os.kill(child, signal.SIGKILL)
        until(lambda: region.reap() == 1)
        assert client.used() == MIB  # the parent answers
        assert [p.pid for p in region.usage().processes] == [client.pid]


def test_children_keep_a_killed_parent_s_memory(region: Region) -> None:
    with in_region(region) as parent:
        parent.charge("1m")
        child = int(parent.ask("spawn").removeprefix("child "))
        parent.kill()
        try:
            assert region.reap() == 0
            assert region.usage().cards[0].used == MIB
        finally:
            os.kill(child, signal.SIGKILL)
        until(lambda: region.reap() == 1)
    assert region.usage().cards[0].used == 0


@pytest.mark.parametrize("before", [(), ("fork",), ("close-fds", "charge 0 2g")], ids=["first", "child", "reopened"])
def test_exec_frees_what_the_old_program_held(region: Region, before: tuple[str, ...]) -> None:
    with in_region(region) as client, in_region(region) as other:
        for command in ("mode", *before):
            client.ask(command)
        assert client.charge("600m") is not None
        client.ask("exec")
        assert client.ask("mode") == "region"  # mapped again: same pid, same start time
        assert other.charge(GIB) is not None
        assert client.charge(1) is None


def test_exec_of_a_forgetful_program_frees_it_too(region: Region) -> None:
    with in_region(region) as client, in_region(region) as other:
        assert client.charge("600m") is not None
        client.ask("exec")
        client.ask("size 1")  # runs, and has no region mapped
        assert other.charge(GIB) is not None


def test_a_daemon_that_closes_its_descriptors_keeps_its_memory(region: Region) -> None:
    with in_region(region) as daemon, in_region(region) as other:
        ticket = daemon.charge("600m")
        daemon.ask("close-fds")
        assert other.charge("600m") is None
        assert region.reap() == 0
        daemon.release(ticket or 0, 100 * MIB)
        assert daemon.charge("600m") is None  # a refusal looks at the others' locks: the file is opened again
        assert daemon.used() == 500 * MIB
        daemon.kill()
        assert other.charge(GIB) is not None


CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def may_make_namespaces() -> bool:
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_make_namespaces(), reason="needs the right to make pid and mount namespaces (root)")
def test_the_agent_finds_processes_of_another_pid_namespace(region: Region) -> None:
    with Client({"VGPU_DIR": str(region.directory)}, through=CONTAINER) as daemon:
        daemon.charge("600m")
        (process,) = region.usage().processes
        assert process.pid == 1
        assert process.pid_namespace != os.stat("/proc/self/ns/pid").st_ino
        daemon.ask("close-fds")  # its lock is gone: only /proc tells that it lives
        assert region.reap() == 0
        daemon.kill()
        until(lambda: region.reap() == 1)
    assert region.usage().cards[0].used == 0


def test_a_process_whose_main_thread_has_left_keeps_its_memory(region: Region) -> None:
    with in_region(region) as client:
        client.charge("1m")
        client.ask("leave-main")
        assert client.used() == MIB
        assert region.reap() == 0
        assert client.used() == MIB


def test_reaping_at_intervals(region: Region) -> None:
    with in_region(region) as client, in_region(region) as victim:
        assert client.ask("reap 60000") == "0"
        victim.charge("1m")
        assert client.ask("reap 60000") == "0"  # too soon
        victim.kill()
        assert client.ask("reap 60000") == "1"  # somebody has waited for its end, and may ask
