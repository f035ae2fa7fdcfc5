"""The two files of a region: making, opening and changing them; killed processes and containers that misbehave."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_programs import MIB, Client

from vgpu.native import CardLimit, Limits, Region

LIMITS = Limits(
    (
        CardLimit("GPU-11111111-2222-3333-4444-555555555555", 3000 * MIB, 1500 * MIB, 300 * MIB, 30, 60),
        CardLimit("MIG-" + "f" * 43, None),
        CardLimit("", 0),
    ),
    core_policy="elastic",
    priority=1,
    host_memory=7,
    burst_ms=20,
    allow_disable_control=True,
    oversubscribe=True,
    kill_on_oom=True,
    fills_on_engine=True,
    copies_on_sms=True,
)


def test_limits_come_back_as_they_were_written(tmp_path: Path) -> None:
    with Region.create(tmp_path, LIMITS) as region:
        assert region.limits() == LIMITS
        other = Limits((CardLimit("GPU-b", 5),), host_memory=None)
        region.set_limits(other)
        assert region.limits() == other
    with Region.open(tmp_path) as region:
        assert region.limits() == other


def test_files_are_readable_by_all_writable_where_processes_write_and_sparse(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        Region.create(tmp_path, LIMITS).close()
    finally:
        os.umask(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limits", "usage"]
    assert (tmp_path / "limits").stat().st_mode & 0o777 == 0o644
    usage = (tmp_path / "usage").stat()
    assert usage.st_mode & 0o777 == 0o666
    assert usage.st_size > 30 * MIB
    assert usage.st_blocks * 512 < MIB


def test_a_second_region_in_a_folder_is_refused(tmp_path: Path) -> None:
    with (
        Region.create(tmp_path, LIMITS) as region,
        pytest.raises(FileExistsError, match="the directory already has a region"),
    ):
        Region.create(tmp_path, Limits(()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limits", "usage"]
    with Region.open(tmp_path) as region:
        assert region.limits() == LIMITS


def test_a_maker_that_died_half_way_is_followed_by_another(tmp_path: Path) -> None:
    with Region.create(tmp_path, LIMITS):
        (tmp_path / "limits").unlink()  # as if killed between the two files
    with Region.create(tmp_path, LIMITS) as region:
        assert region.usage().processes == ()


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits(tuple(CardLimit("", None) for _ in range(17))), "limits name 17 cards; allowed: at most 16"),
        (Limits((CardLimit("G" * 48, None),)), "cards[0].uuid has 48 bytes; allowed: at most 47"),
        (Limits((CardLimit("", -1),)), "cards[0].memory is -1; allowed: 0 to"),
        (Limits((CardLimit("", 2**64),)), "cards[0].memory is 18446744073709551616; allowed"),
        (Limits((CardLimit("", 10, 11),)), "cards[0].guarantee is 11; allowed: 0 to 10"),
        (Limits((CardLimit("", None), CardLimit("", None, cores=101))), "cards[1].cores is 101; allowed: 0 to 100"),
        (Limits((CardLimit("", None, cores_ceiling=101),)), "cards[0].cores_ceiling is 101; allowed: 0 to 100"),
        (Limits((), burst_ms=19), "burst_ms is 19; allowed: 20 to 100, or 0 for 50"),
        (Limits((), burst_ms=101), "burst_ms is 101; allowed: 20 to 100, or 0 for 50"),
        (Limits((), priority=2), "priority is 2; allowed: 0 to 1"),
        (Limits((), core_policy="best"), "core_policy is 'best'; allowed: fixed, elastic, none"),
    ],
)
def test_limits_that_make_no_sense_are_refused(tmp_path: Path, limits: Limits, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Region.create(tmp_path, limits)
    with Region.create(tmp_path, LIMITS) as region:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            region.set_limits(limits)
        assert region.limits() == LIMITS


# Opening what is no region


def spoil(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


SPOILED: dict[str, Callable[[Path], None]] = {
    "limits, magic": lambda d: spoil(d / "limits", 0, b"x"),
    "limits, version": lambda d: spoil(d / "limits", 8, b"\x09"),
    "limits, boot": lambda d: spoil(d / "limits", 16, b"00000000-"),
    "limits, size": lambda d: os.truncate(d / "limits", 100),
    "usage, magic": lambda d: spoil(d / "usage", 0, b"x"),
    "usage, version": lambda d: spoil(d / "usage", 8, b"\x09"),
    "usage, boot": lambda d: spoil(d / "usage", 16, b"00000000-"),
    "usage, empty": lambda d: os.truncate(d / "usage", 0),
    "usage, longer": lambda d: os.truncate(d / "usage", 100 * MIB),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_file_is_not_opened(tmp_path: Path, how: str) -> None:
    Region.create(tmp_path, LIMITS).close()
    SPOILED[how](tmp_path)
    with pytest.raises(OSError, match="not a region of this version and this boot") as caught:
        Region.open(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EPROTO, str(tmp_path))


def test_missing_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the directory has no region: '.*nowhere'"):
        Region.open(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="a region needs an existing directory"):
        Region.create(tmp_path / "nowhere", LIMITS)
    Region.create(tmp_path, LIMITS).close()
    (tmp_path / "usage").unlink()
    with pytest.raises(FileNotFoundError):
        Region.open(tmp_path)


def test_a_reader_cannot_change_anything(tmp_path: Path) -> None:
    Region.create(tmp_path, LIMITS).close()
    with Region.open(tmp_path) as region:
        with pytest.raises(OSError, match="opened read-only"):
            region.set_limits(LIMITS)
        with pytest.raises(OSError, match="opened read-only"):
            region.reap()
        assert len(region.usage().cards) == 3


def test_a_closed_region_says_so(tmp_path: Path) -> None:
    region = Region.create(tmp_path, LIMITS)
    region.close()
    region.close()
    with pytest.raises(ValueError, match="is closed"):
        region.usage()


def test_a_container_that_cuts_its_file_short_does_not_end_the_agent(tmp_path: Path) -> None:
    with Region.create(tmp_path, LIMITS) as region:
        os.truncate(tmp_path / "usage", 0)
        with pytest.raises(OSError, match="truncated"):
            region.usage()
        with pytest.raises(OSError, match="truncated"):
            region.reap()
        assert region.limits() == LIMITS


def test_a_container_that_fills_its_file_with_noise_does_not_end_the_agent(tmp_path: Path) -> None:
    with Region.create(tmp_path, LIMITS) as region:
        spoil(tmp_path / "usage", 64, os.urandom(2 * MIB))
        assert len(region.usage().cards) == 3
        region.reap()


# Changing limits


WRITER = """
import sys
from pathlib import Path
from vgpu.native import CardLimit, Limits, Region
with Region.open(Path(sys.argv[1]), writable=True) as region:
    print("ready", flush=True)
    value = 0
    while True:
        value += 1
        region.set_limits(Limits(tuple(CardLimit(f"GPU-{value}", value) for _ in range(16)), host_memory=value))
"""


def test_a_killed_writer_leaves_whole_limits(tmp_path: Path) -> None:
    with Region.create(tmp_path, Limits((CardLimit("GPU-0", 0),) * 16)) as region:
        last = 0
        for _ in range(8):
            with subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE) as writer:
                assert writer.stdout
                assert writer.stdout.readline() == b"ready\n"
                end = time.monotonic() + 0.05  # how long it is watched before it dies, not a state to wait for
                while time.monotonic() < end:
                    self_consistent(region.limits())
                writer.kill()
            last = max(last, self_consistent(region.limits()))
        assert last > 0


def self_consistent(limits: Limits) -> int:
    value = limits.host_memory
    assert value is not None
    assert limits.cards == (CardLimit(f"GPU-{value}", value),) * 16
    return value


def test_a_writer_may_die_at_any_store(tmp_path: Path) -> None:
    old, new = 1024 * MIB, 2048 * MIB
    seen: list[int | None] = []
    with Region.create(tmp_path, Limits((CardLimit("GPU-a", old),) * 16)) as region:
        while True:
            with Client({}, "-DVGPU_DEATH_POINTS") as writer:
                writer.ask(f"arm {1 + len(seen) * 7}")  # every seventh word of many
                survived = writer.try_ask(f"publish {tmp_path} 2g") is not None
            cards = region.limits().cards
            assert len(set(cards)) == 1
            if survived:
                break
            seen.append(cards[0].memory)
        assert seen[0] == old
        assert seen == sorted(seen, key=lambda memory: memory == new)
        assert region.limits().cards[0].memory == new


def test_a_process_that_runs_sees_every_change_whole(tmp_path: Path) -> None:
    with (
        Region.create(tmp_path, Limits((CardLimit("GPU-a", 1),))) as region,
        Client({"VGPU_DIR": str(tmp_path)}) as client,
    ):
        for memory in range(2, 30):
            region.set_limits(Limits((CardLimit("GPU-a", memory, cores=memory),)))
            assert (client.ask("limit 0"), client.ask("cores 0")) == (str(memory), str(memory))


# VGPU_DIR: the first process makes the region


def test_processes_that_race_to_make_a_region_share_one(tmp_path: Path) -> None:
    for trial in range(10):
        directory = tmp_path / str(trial)
        directory.mkdir()
        variables = {"VGPU_DIR": str(directory), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
        clients = [Client(variables) for _ in range(4)]
        for client in clients:
            client.send("mode")
            client.send("charge 0 600m")
        assert [client.line() for client in clients] == ["region"] * 4
        assert sorted(str(client.line())[:2] for client in clients) == ["ok", "re", "re", "re"]
        for client in clients:
            client.__exit__(None, None, None)
        assert sorted(path.name for path in directory.iterdir()) == ["limits", "usage"]


@pytest.mark.parametrize("point", [1, 2], ids=["before usage is there", "before limits are there"])
@pytest.mark.parametrize("fate", ["arm", "halt"])
def test_a_maker_may_die_or_be_late(tmp_path: Path, fate: str, point: int) -> None:
    variables = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    with Client(variables, "-DVGPU_DEATH_POINTS") as first, Client(variables) as second:
        first.ask(f"{fate} {point}")
        first.send("mode")
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert not (tmp_path / "limits").exists()
        assert second.ask("mode") == "region"
        assert second.charge("600m") is not None
        if fate == "halt":
            os.kill(first.pid, signal.SIGCONT)
            assert first.line() == "region"
            assert first.charge("600m") is None
            assert sorted(path.name for path in tmp_path.iterdir()) == ["limits", "usage"]
        else:
            assert second.charge("424m") is not None
