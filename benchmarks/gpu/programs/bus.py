"""Cost of host memory on this card without the library: `bus.py BYTES TURNS`.

Prints one object: GB/s of kernels and copies on each kind of memory, milliseconds of the steps of a move, the driver's
answers about the pointers, and the copies and fills that it accepts. Runs with tests/native on its path.
"""

import json
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from functools import partial

import kinds
from driver_client import cu, ok, reserve, start
from kernels import CARD, GRANULE, HOST_NUMA, Kernels, create, give_access, map_at, maps_host

MAPPED_FOR_ALL = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
VALUE = 0x0123456789ABCDEF


class Memory:
    """Memory of one kind with a pointer for kernels."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size, self.handle, pointer = kind, size, 0, c_uint64()
        if kind == "card":
            ok(cu.cuMemAlloc_v2(byref(pointer), c_size_t(size)))
        elif kind == "pinned":
            host = c_void_p()
            ok(cu.cuMemHostAlloc(byref(host), c_size_t(size), c_uint(MAPPED_FOR_ALL)))
            ok(cu.cuMemHostGetDevicePointer_v2(byref(pointer), host, c_uint(0)))
        else:
            status, self.handle = create(HOST_NUMA, size)
            ok(status)
            pointer.value = reserve(size)
            map_at(pointer.value, size, self.handle)
            give_access(pointer.value, size)
        self.pointer = pointer.value


def speeds(kernels: Kernels, memory: Memory, turns: int) -> dict[str, object]:
    """GB/s by the card's clock, and whether all words were right afterwards."""
    at = memory.pointer, memory.size
    fill = kernels.shortest_ms(lambda: kernels.fill(*at, VALUE), turns)
    read = kernels.shortest_ms(lambda: kernels.read(*at), turns)
    add = kernels.shortest_ms(lambda: kernels.add(*at, 1), turns)
    words = memory.size // 8
    right = kernels.sum(*at) == words * (VALUE + turns + 1) % 2**64
    return {"read": rate(memory.size, read), "write": rate(memory.size, fill), "both": rate(2 * memory.size, add),
            "right": right}  # fmt: skip


def rate(size: int, milliseconds: float) -> float:
    return size / milliseconds / 1e6


def copies(kernels: Kernels, card: Memory, other: Memory, turns: int) -> dict[str, float]:
    """GB/s of the driver's copies between the card and other memory."""
    size = c_size_t(card.size)
    here, there = c_uint64(card.pointer), c_uint64(other.pointer)
    to_card = kernels.shortest_ms(lambda: ok(cu.cuMemcpyDtoDAsync_v2(here, there, size, None)), turns)
    from_card = kernels.shortest_ms(lambda: ok(cu.cuMemcpyDtoDAsync_v2(there, here, size, None)), turns)
    return {"to card": rate(card.size, to_card), "from card": rate(card.size, from_card)}


class Timed:
    """Shortest times of steps by the host's clock, ms."""

    def __init__(self) -> None:
        self.steps: dict[str, float] = {}

    def __call__(self, step: str, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        took = 1000 * (time.perf_counter() - begun)
        self.steps[step] = min(took, self.steps.get(step, took))


def moves(kernels: Kernels, size: int, turns: int) -> dict[str, dict[str, float]]:
    """Steps of a move in either direction, as the library makes them.

    The pointer stays, and the memory behind it changes.
    """
    base, window = reserve(size), reserve(size)
    status, held = create(CARD, size)
    ok(status)
    map_at(base, size, held)
    give_access(base, size)
    kernels.fill(base, size, VALUE)
    ok(cu.cuCtxSynchronize())
    taken = {"from card": Timed(), "to card": Timed()}
    for _ in range(turns):
        for direction, timed in taken.items():
            made: list[int] = []
            timed("create", partial(make, made, HOST_NUMA if direction == "from card" else CARD, size))
            timed("window", partial(mapped, window, size, made[0]))
            timed("copy", partial(copied, window, base, size))
            ok(cu.cuMemUnmap(c_uint64(window), c_size_t(size)))
            timed("remap", partial(exchanged, base, size, made[0]))
            timed("release", partial(release, held))
            held = made[0]
    right = kernels.sum(base, size) == size // 8 * VALUE % 2**64
    ok(cu.cuMemUnmap(c_uint64(base), c_size_t(size)))
    release(held)
    for address in (base, window):
        ok(cu.cuMemAddressFree(c_uint64(address), c_size_t(size)))
    return {direction: timed.steps | {"right": right} for direction, timed in taken.items()}


def make(made: list[int], kind: int, size: int) -> None:
    status, handle = create(kind, size)
    ok(status)
    made.append(handle)


def mapped(address: int, size: int, handle: int) -> None:
    map_at(address, size, handle)
    give_access(address, size)


def exchanged(address: int, size: int, handle: int) -> None:
    ok(cu.cuMemUnmap(c_uint64(address), c_size_t(size)))
    mapped(address, size, handle)


def copied(to: int, source: int, size: int) -> None:
    ok(cu.cuMemcpyDtoD_v2(c_uint64(to), c_uint64(source), c_size_t(size)))
    ok(cu.cuStreamSynchronize(None))


def release(handle: int) -> None:
    ok(cu.cuMemRelease(c_uint64(handle)))


def main() -> None:
    size, turns = int(sys.argv[1]) // GRANULE * GRANULE, int(sys.argv[2])
    start()
    kernels = Kernels()
    card, pinned = Memory("card", size), Memory("pinned", size)
    spare = Memory("card", GRANULE)
    found = [card, pinned] + ([Memory("HOST_NUMA", size)] if maps_host() else [])
    sizes = sorted({GRANULE, max(GRANULE, size // 4 // GRANULE * GRANULE), size}) if maps_host() else []
    answer = {
        "bytes": size,
        "maps_host": maps_host(),
        "speeds": {memory.kind: speeds(kernels, memory, turns) for memory in found},
        "copies": {memory.kind: copies(kernels, card, memory, turns) for memory in found[1:]},
        "moves": {str(one): moves(kernels, one, turns) for one in sizes},
        "pointers": {memory.kind: kinds.attributes(memory.pointer, memory.size) for memory in found},
        "kinds": {memory.kind: kinds.refused(memory.pointer, spare.pointer) for memory in found},
    }
    print(json.dumps(answer), flush=True)


main()
