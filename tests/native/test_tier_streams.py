"""Memory of the tier that is allocated and freed in the order of streams, repeatedly."""

from pathlib import Path

from preloaded import MIB, environment, python

from vgpu.native import CardLimit, Limits, Region, simulator

#: what is on the card stays there, so that all else lies in host memory
PRELUDE = """
import os
from pathlib import Path
from driver_client import *
from vgpu.native import Region
region = Region.open(Path(os.environ["VGPU_DIR"]))
usage = lambda: region.usage().cards[0]
start()
full = [alloc(16 * MIB)[1] for _ in range(6)]
kernel = function("spin_10ms")
def stream():
    made = c_void_p()
    ok(cu.cuStreamCreate(byref(made), 1))
    return made.value
"""


def program(folder: Path, script: str, *, movable: bool = False, **variables: str) -> list[str]:
    """Runs a script in a container with a guarantee of 96 of 512 MiB, after it has filled the guarantee."""
    simulator.create(folder / "cards", "T4")
    (folder / "region").mkdir()
    card = CardLimit(simulator.cards(folder / "cards")[0].uuid, 512 * MIB, 96 * MIB)
    with Region.create(folder / "region", Limits((card,), host_memory=512 * MIB, oversubscribe=True, movable=movable)):
        return python(PRELUDE + script, environment(folder, VGPU_DIR=str(folder / "region")) | variables)


def test_a_loop_on_one_stream_needs_the_memory_of_one_round(tmp_path: Path) -> None:
    """Also where the program does not wait for the card; the stream's remaining work with the memory is still done."""
    script = """
one, rounds, size = stream(), 40, 32 * MIB
seen = c_void_p()
ok(cu.cuMemHostAlloc(byref(seen), c_size_t(rounds * 4), 0))
before, pointers = usage().used, set()
for i in range(rounds):
    status, pointer = alloc_async(size, one)
    ok(status)
    pointers.add(pointer)
    ok(cu.cuMemsetD32Async(c_uint64(pointer + size - 4), i + 1, c_size_t(1), c_void_p(one)))
    ok(launch(kernel, one))
    ok(cu.cuMemcpyDtoHAsync_v2(c_void_p(seen.value + 4 * i), c_uint64(pointer + size - 4), c_size_t(4), c_void_p(one)))
    ok(free_async(pointer, one))
print((usage().used - before) // MIB, len(pointers))
ok(cu.cuCtxSynchronize())
print(list((c_uint * rounds).from_address(seen.value)) == list(range(1, rounds + 1)))
info()
print((usage().used - before) // MIB)
"""
    assert program(tmp_path, script, movable=True) == ["32 1", "True", "0"]


def test_what_other_streams_have_freed_is_waited_for(tmp_path: Path) -> None:
    """Sizes that change all the time, on streams in turns."""
    script = """
streams = [stream(), stream()]
for i in range(40):
    status, pointer = alloc_async((100 + i) * MIB, streams[i % 2])
    ok(status)
    ok(launch(kernel, streams[i % 2]))
    ok(free_async(pointer, streams[i % 2]))
status, pointer = alloc(400 * MIB)
print(status, usage().used <= 512 * MIB)
"""
    assert program(tmp_path, script) == ["0 True"]


def test_what_is_never_freed_is_refused(tmp_path: Path) -> None:
    """One block that is about to be freed does not delay a hopeless request for longer than necessary."""
    script = """
one = stream()
status, pointer = alloc_async(32 * MIB, one)
ok(launch(kernel, one))
ok(free_async(pointer, one))
print(alloc_async(600 * MIB, one)[0], alloc(417 * MIB)[0], usage().used // MIB, alloc(416 * MIB)[0])
"""
    assert program(tmp_path, script, LIBCUDA_LOG_LEVEL="0") == ["2 2 96 0"]
