"""Fills, or copies within the card, without a pause: `engines.py fill|copy SECONDS BYTES`.

Begins after a line of input. Prints {} when it is ready, then GB/s. Runs with tests/native on its path.

Prints {} when it is ready, then GB/s. Runs with tests/native on its path.
"""

import json
import sys
import time
from ctypes import byref, c_size_t, c_uint, c_uint64

from driver_client import cu, ok, start
from graph_client import make_stream

BATCH = 8  # calls between two waits


def main() -> None:
    kind, seconds, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    start()
    stream = make_stream()
    blocks = [c_uint64(), c_uint64()]
    for block in blocks:
        ok(cu.cuMemAlloc_v2(byref(block), c_size_t(size)))

    def work() -> None:
        if kind == "fill":
            ok(cu.cuMemsetD32Async(blocks[0], c_uint(1), c_size_t(size // 4), stream))
        else:
            ok(cu.cuMemcpyDtoDAsync_v2(blocks[1], blocks[0], c_size_t(size), stream))

    work()
    ok(cu.cuStreamSynchronize(stream))
    print("{}", flush=True)
    sys.stdin.readline()
    done, begun = 0, time.monotonic()
    while time.monotonic() < begun + seconds:
        for _ in range(BATCH):
            work()
        ok(cu.cuStreamSynchronize(stream))
        done += BATCH
    print(json.dumps({"rate": done * size / (time.monotonic() - begun) / 1e9, "calls": done}), flush=True)
    sys.stdin.readline()


main()
