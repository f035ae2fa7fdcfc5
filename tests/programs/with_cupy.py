"""CuPy: its memory pools, copies, streams and kernels that NVRTC compiles, all through the CUDA runtime."""

import cupy
import numpy as np
from steps import step

MIB = 1 << 20
pool = cupy.get_default_memory_pool()


def told(name: str) -> int:
    free, total = cupy.cuda.runtime.memGetInfo()
    step(name, free, total)
    return int(free)


def refused(size: int) -> bool:
    try:
        cupy.empty(size, dtype=np.uint8)
    except cupy.cuda.memory.OutOfMemoryError:
        return True
    return False


free = told("started")
assert cupy.cuda.runtime.getDeviceProperties(0)["totalGlobalMem"] == 1000 * MIB
array = cupy.empty(100 * MIB, dtype=np.uint8)
told("100 MiB")
assert refused(free + 1)
rest = cupy.empty(free - 100 * MIB, dtype=np.uint8)
assert told("full") == 0
assert refused(1)
del array, rest
pool.free_all_blocks()
assert told("freed") == free
numbers = cupy.asarray(np.arange(1000))
assert (numbers.get() == np.arange(1000)).all()
stream = cupy.cuda.Stream()
with stream:
    ordered = cupy.cuda.MemoryAsyncPool().malloc(10 * MIB)
stream.synchronize()
told("stream-ordered")
kernel = cupy.RawKernel('extern "C" __global__ void spin_1ms(float *to) { to[0] = 1; }', "spin_1ms")
kernel((1,), (1,), (cupy.empty(4, dtype=np.float32),))
total = numbers + 1  # a kernel of CuPy's own
cupy.cuda.Device().synchronize()
told("kernels")
