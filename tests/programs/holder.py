"""Holds 100 MiB while others look."""

import ctypes

from steps import step

driver = ctypes.CDLL("libcuda.so.1")
free, total = ctypes.c_size_t(), ctypes.c_size_t()
assert driver.cuInit(0) == 0
assert driver.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(100 << 20)) == 0
assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
step("holding", free.value, total.value)
