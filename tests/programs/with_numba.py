"""numba-cuda: device arrays, a managed array, a compiled kernel."""

import warnings

import numpy as np
from numba import cuda
from steps import step

MIB = 1 << 20
warnings.simplefilter("ignore")
context = cuda.current_context()


def told(name: str) -> int:
    free, total = context.get_memory_info()
    step(name, free, total)
    return free


def refused(size: int) -> bool:
    try:
        cuda.device_array(size, dtype=np.uint8)
    except Exception as refusal:  # noqa: BLE001  # its type is an implementation detail; the text is what a user sees
        return "OUT_OF_MEMORY" in str(refusal)
    return False


free = told("started")
assert refused(free + 1)
array = cuda.device_array(100 * MIB, dtype=np.uint8)
told("100 MiB")
rest = cuda.device_array(free - 100 * MIB, dtype=np.uint8)
assert told("full") == 0
assert refused(1)
del array, rest
context.deallocations.clear()
assert told("freed") == free
numbers = cuda.to_device(np.arange(1000))
assert numbers.copy_to_host()[999] == 999
managed = cuda.managed_array(MIB, dtype=np.uint8)
told("managed")


@cuda.jit
def kernel(target):  # type: ignore[no-untyped-def]  # compiled by numba
    target[cuda.grid(1)] = 1


kernel[1, 32](numbers)
cuda.synchronize()
