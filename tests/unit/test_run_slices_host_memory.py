"""What `vgpu run` may promise of a machine's memory: to all commands together, no more than exists."""

from pathlib import Path

import msgspec
import pytest

from vgpu.devices import GpuSlice
from vgpu.resources import GpuRequest
from vgpu.workstation.host_memory import HostMemory, bounded, promised, read
from vgpu.workstation.place import Demand, NoRoom

DEMAND = Demand(GpuRequest(1, 20000), memory_mode="static")


def asking(amount: int) -> Demand:
    return msgspec.structs.replace(DEMAND, host_memory=amount)


def test_what_is_asked_for_has_to_be_there_beside_what_others_were_promised() -> None:
    machine = HostMemory(total=24000, available=20000)
    assert machine.most == 22800
    assert bounded(asking(22800), machine) == asking(22800)
    refused = bounded(asking(22801), machine)
    assert refused == NoRoom(
        "--host-memory asks for 22801 MiB, but this machine can promise 22800 MiB "
        "(24000 MiB less a reserve of 1200 MiB)"
    )
    beside = msgspec.structs.replace(machine, promised=12800)
    assert bounded(asking(10000), beside) == asking(10000)
    refused = bounded(asking(10001), beside)
    assert isinstance(refused, NoRoom)
    assert "this machine can promise 22800 MiB, of which 12800 MiB are promised to running commands" in refused.sentence


def test_without_a_word_it_is_half_of_what_is_available_and_promised_to_nobody() -> None:
    def half(**machine: int) -> int | None:
        found = bounded(DEMAND, HostMemory(total=24000, **machine))
        assert isinstance(found, Demand)
        return found.host_memory

    assert half(available=20000) == 10000
    assert half(available=20000, promised=10000, unused=10000) == 5000
    assert half(available=10000, promised=10000, unused=0) == 5000, "what is used is not available any more"
    assert half(available=20000, promised=22000, unused=0) == 800, "never more than can be promised"
    assert half(available=20000, promised=22000, unused=22000) == 0


def test_a_command_that_asked_for_no_amount_is_promised_no_more_than_its_memory() -> None:
    slices = [GpuSlice("a", 3000, phys=1000), GpuSlice("b", 3000)]
    assert promised(None, asking(10000), slices) == 6000
    assert promised(None, asking(5000), slices) == 5000
    assert promised(10000, asking(10000), slices) == 10000


def test_who_may_have_none_is_promised_none() -> None:
    plain = Demand(GpuRequest(1, 20000))
    assert bounded(plain, HostMemory(24000, 20000)) == plain
    assert promised(None, plain, [GpuSlice("a", 20000)]) == 0


@pytest.mark.parametrize(("total", "reserve"), [(1000, 256), (24000, 1200), (512000, 4096)])
def test_the_reserve_is_the_library_s(total: int, reserve: int) -> None:
    assert HostMemory(total, total).reserve == reserve
    assert HostMemory(100, 100).most == 0


def test_it_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       24684084 kB\nMemFree:         8119800 kB\nMemAvailable:   21465800 kB\n")
    assert read(file) == HostMemory(24105, 20962)
    file.write_text("MemTotal:       24684084 kB\n")
    assert read(file).available == 0
