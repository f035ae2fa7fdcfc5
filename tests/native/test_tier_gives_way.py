"""A container whose loan is taken back gives way, even if single blocks cannot move."""

from pathlib import Path

import pytest
from preloaded import MIB, environment, python

from vgpu.native import CardLimit, Limits, Region, simulator

GUARANTEE = 96 * MIB

#: all blocks are on the card, half of them on loan
PRELUDE = """
import os, time
from pathlib import Path
from driver_client import *
from vgpu.native import Region, simulator
cards = Path(os.environ["VGPU_SIM_DIR"])
region = Region.open(Path(os.environ["VGPU_DIR"]), writable=True)
region.lend(0, 128 << 20)
start()
blocks = [alloc(16 << 20)[1] for _ in range(12)]
usage = lambda: region.usage().cards[0]
assert (usage().host_used, usage().resident) == (0, 192 << 20)
def press(call=lambda: ok(cu.cuCtxSynchronize())):
    region.lend(0, 0)
    deadline = time.monotonic() + 20
    while usage().resident > 96 << 20 and time.monotonic() < deadline:
        call()
        time.sleep(0.001)
    return usage().resident >> 20, usage().host_used >> 20
"""


TEAM = """
class Team(Structure):  # CUmulticastObjectProp of cuda.h
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_ulonglong), ("flags", c_ulonglong)]
team, zero, size, flags = c_ulonglong(1), c_size_t(0), c_size_t(16 << 20), c_ulonglong(0)
"""


def program(folder: Path, script: str) -> list[str]:
    simulator.create(folder / "cards", "T4")
    (folder / "region").mkdir()
    limit = CardLimit(simulator.cards(folder / "cards")[0].uuid, 512 * MIB, GUARANTEE)
    limits = Limits((limit,), host_memory=512 * MIB, oversubscribe=True, movable=True)
    with Region.create(folder / "region", limits) as region:
        answer = python(PRELUDE + script, environment(folder, VGPU_DIR=str(folder / "region"), LIBCUDA_LOG_LEVEL="0"))
        truth = simulator.cards(folder / "cards")[0]
        region.reap()
        assert (truth.used, truth.host, region.usage().cards[0].resident) == (0, 0, 0)
    return answer


def test_blocks_that_were_freed_in_order_make_room(tmp_path: Path) -> None:
    """Nothing is allocated after them, and no call asks how much is free."""
    script = """
for block in blocks[:6]:
    ok(free_async(block))
ok(cu.cuCtxSynchronize())
print(*press())
"""
    assert program(tmp_path, script) == ["96 0"]


@pytest.mark.parametrize(("entry", "host"), [("cuMemMap", 96), ("cuMemcpyDtoD_v2", 96), ("cuMemUnmap", 112)])
def test_a_block_that_does_not_move_stops_no_other(tmp_path: Path, entry: str, host: int) -> None:
    """The block counts for the guarantee from then on. Memory that the driver does not unmap stays charged."""
    script = f"""
simulator.inject_error(cards, "{entry}", 999)
print(*press(), usage().host_used == simulator.cards(cards)[0].host)
array = c_void_p()
for height in (2816, 2048):  # 88 and 64 MiB
    print(cu.cuArrayCreate_v2(byref(array), byref(ArrayDescriptor(32768, height, UINT8, 1))))
"""
    assert program(tmp_path, script) == [f"96 {host} True", "2", "0"]


def test_what_the_driver_does_not_unmap_stays_charged(tmp_path: Path) -> None:
    script = """
before = simulator.cards(cards)[0].used
simulator.inject_error(cards, "cuMemUnmap", 999)
print(free(blocks[0]), free(blocks[0]))
print(usage().resident >> 20, before == simulator.cards(cards)[0].used)
print(alloc(16 << 20)[1] in blocks)
"""
    assert program(tmp_path, script)[1:] == ["192 True", "False"]


@pytest.mark.parametrize(
    "show",
    [
        "cu.cuMulticastBindAddr(team, zero, c_uint64(at), size, flags)",
        "cu.cuMulticastBindAddr_v2(team, 0, zero, c_uint64(at), size, flags)",
        "cu.cuPointerSetAttribute(byref(c_int(1)), 6, c_uint64(at))",  # SYNC_MEMOPS
    ],
)
def test_a_block_that_is_tied_to_its_place_stays(tmp_path: Path, show: str) -> None:
    """Other processes see it, or the driver was given its attributes. It counts for the guarantee from then on."""
    script = f"""{TEAM}
at = blocks[0]
cu.cuMulticastCreate(byref(team), byref(Team(1, 16 << 20, 0, 0)))
cu.cuMulticastAddDevice(team, 0)
{show}
print(*press())
array = c_void_p()
for height in (2816, 2048):  # 88 and 64 MiB
    print(cu.cuArrayCreate_v2(byref(array), byref(ArrayDescriptor(32768, height, UINT8, 1))))
"""
    assert program(tmp_path, script) == ["96 96", "2", "0"]


def test_a_block_in_host_memory_is_not_shown_to_others(tmp_path: Path) -> None:
    script = f"""{TEAM}
at = alloc(128 << 20)[1]
assert usage().host_used == 128 << 20
print(cu.cuMulticastBindAddr(team, zero, c_uint64(at), size, flags))
"""
    assert program(tmp_path, script) == ["801"]  # CUDA_ERROR_NOT_SUPPORTED


def test_room_that_is_guaranteed_is_used_and_what_is_lent_is_not(tmp_path: Path) -> None:
    """Blocks in host memory use it, though no kernel has touched them."""
    script = """
press()
low = usage().resident
for block in reversed(blocks):  # the first ones went down
    if usage().resident <= 48 << 20:
        break
    ok(free(block))
freed = usage().resident
region.lend(0, 64 << 20)
deadline = time.monotonic() + 20
while usage().resident < 80 << 20 and time.monotonic() < deadline:
    ok(cu.cuCtxSynchronize())
    time.sleep(0.001)
for _ in range(300):  # three times as long as room has to be idle: time enough to take what is lent, too
    ok(cu.cuCtxSynchronize())
    time.sleep(0.001)
print(low >> 20, freed >> 20, usage().resident >> 20, usage().host_used > 0)
"""
    (line,) = program(tmp_path, script)
    low, freed, resident, beyond = line.split()
    assert int(low) <= 96
    assert int(freed) <= 48
    assert 80 <= int(resident) <= 96
    assert beyond == "True"
