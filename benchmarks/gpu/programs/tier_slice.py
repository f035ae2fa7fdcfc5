"""Fills a slice with more memory than its guarantee, and reports the result.

`tier_slice.py full LOAN`, `tier_slice.py contents PIECE ROUNDS LOAN`, `tier_slice.py pointers PIECE`; bytes. Prints
objects (`full` prints one at each stage), and waits for a line of input after each. Runs with tests/native on its path.
"""

import json
import os
import sys
import time
from ctypes import byref, c_size_t, c_uint64, create_string_buffer
from pathlib import Path

import kinds
import pynvml
from driver_client import MIB, alloc, cu, free, info, ok, start
from kernels import WORD, Kernels, maps_host

from vgpu.native import Region

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of cuda.h
FIRST = 32 * MIB
PATIENCE_S = 10.0  #: longest time for blocks to reach their place
EACH_TURN = 8  #: launches between two waits
SEEN = 4096  #: bytes at both ends of a block that are copied back
SEED = 0x9E3779B97F4A7C15


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def picture(region: Region) -> dict[str, object]:
    """The figures of the ledger, CUDA and NVML, bytes."""
    card = region.usage().cards[0]
    left, total = info()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(region.limits().cards[0].uuid))
    told = {"cuMemGetInfo": [total, total - left, left], "NVML": [memory.total, memory.used, memory.free]}
    return {
        "used": card.used, "resident": card.resident, "host": card.host_used, "refused": card.refused,
        "context": card.by_kind["context"], "told": told, "pid": os.getpid(), "maps_host": maps_host(),
    }  # fmt: skip


def filled() -> tuple[list[tuple[int, int]], int]:
    """Allocates blocks (pointer, bytes) of smaller and smaller sizes until no byte is left.

    Also returns the status of the last allocation.
    """
    held, size = [], FIRST
    while True:
        status, pointer = alloc(size)
        if status == 0:
            held.append((pointer, size))
        elif status != OUT_OF_MEMORY or size == 1:
            return held, status
        else:
            size //= 2


def full(region: Region, loan: int) -> None:
    """Fills the slice with a loan; then without the loan, while kernels run; then frees all."""
    movable = region.limits().movable
    region.lend(0, loan if movable else 0)
    kernels = Kernels()
    held, status = filled()
    say(**picture(region), status=status, asked=sum(size for _, size in held))
    if movable:
        guarantee = region.limits().cards[0].guarantee
        region.lend(0, 0)
        begun = time.monotonic()
        while region.usage().cards[0].resident > guarantee and time.monotonic() < begun + PATIENCE_S:
            kernels.add(*held[0], 1)
            ok(cu.cuCtxSynchronize())
        took = time.monotonic() - begun
        say(**picture(region), seconds=took)
    for pointer, _ in held:
        ok(free(pointer))
    kernels.end()
    say(**picture(region))


class Block:
    """Two halves, each with a word of its own, to which kernels add."""

    def __init__(self, kernels: Kernels, number: int, size: int) -> None:
        self.kernels, self.half = kernels, size // 2
        status, self.pointer = alloc(size)
        self.granted = status == 0
        self.values = [(2 * number + half + 1) * SEED % 2**64 for half in range(2)]
        for half in range(2) if self.granted else ():
            kernels.fill(self.pointer + half * self.half, self.half, self.values[half])

    def add(self) -> None:
        self.kernels.add(self.pointer, 2 * self.half, 1)
        self.values = [(value + 1) % 2**64 for value in self.values]

    def wrong(self) -> int:
        """Number of halves and ends with a wrong value."""
        bad = 0
        for half, value in enumerate(self.values):
            at = self.pointer + half * self.half
            bad += self.kernels.sum(at, self.half) != self.half // WORD * value % 2**64
            seen = create_string_buffer(SEEN)
            ok(cu.cuMemcpyDtoH_v2(seen, c_uint64(at + half * (self.half - SEEN)), c_size_t(SEEN)))
            bad += seen.raw != value.to_bytes(WORD, "little") * (SEEN // WORD)
        return bad


def contents(region: Region, size: int, rounds: int, loan: int) -> None:
    """Adds to all blocks while room is lent and taken back in turns, and checks all blocks after each turn."""
    kernels = Kernels()
    guarantee = region.limits().cards[0].guarantee
    blocks = [Block(kernels, number, size) for number in range(max(0, info()[0] - size) // size)]
    answer = {"blocks": len(blocks), "bytes": size, "granted": all(block.granted for block in blocks)}
    answer |= {"maps_host": maps_host()}
    up = down = wrong = 0
    host = region.usage().cards[0].host_used
    answer["host"] = host
    for turn in range(rounds if answer["granted"] and answer["maps_host"] else 0):
        region.lend(0, 0 if turn % 2 else loan)
        deadline, settled = time.monotonic() + PATIENCE_S, False
        while not settled and time.monotonic() < deadline:
            for number, block in enumerate(blocks):
                block.add()
                if number % EACH_TURN == 0:
                    ok(cu.cuCtxSynchronize())
            card = region.usage().cards[0]
            up, down, host = up + max(0, host - card.host_used), down + max(0, card.host_used - host), card.host_used
            settled = card.resident <= guarantee if turn % 2 else card.resident >= guarantee + loan // 2
        wrong += sum(block.wrong() for block in blocks)
    say(**answer, up=up, down=down, wrong=wrong, rounds=rounds)


def pointers(region: Region, size: int) -> None:
    """Compares a block on the card with a block in host memory."""
    blocks = []
    while region.usage().cards[0].host_used < size:
        status, pointer = alloc(size)
        ok(status)
        blocks.append(pointer)
    card, spare, host = blocks[0], blocks[1], blocks[-1]
    handle = create_string_buffer(64)  # CUipcMemHandle of cuda.h
    say(
        card=kinds.attributes(card, size),
        host=kinds.attributes(host, size),
        refused={"card": kinds.refused(card, spare), "host": kinds.refused(host, spare)},
        ipc=cu.cuIpcGetMemHandle(byref(handle), c_uint64(host)),
    )


def main() -> None:
    what, *numbers = sys.argv[1], *map(int, sys.argv[2:])
    start()
    pynvml.nvmlInit()
    with Region.open(Path(os.environ["VGPU_DIR"]), writable=True) as region:
        {"full": full, "contents": contents, "pointers": pointers}[what](region, *numbers)


main()
