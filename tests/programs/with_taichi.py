"""Taichi: its own device memory pool and kernels compiled to PTX, through libcuda.so opened by that name."""

import ctypes

import taichi as ti
from steps import step

driver = ctypes.CDLL("libcuda.so.1")


def told(name: str) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    step(name, free.value, total.value)
    return free.value


ti.init(arch=ti.cuda, device_memory_GB=0.3, offline_cache=False, log_level=ti.ERROR)
assert ti.cfg.arch == ti.cuda
numbers = ti.field(ti.f32, shape=1 << 20)
numbers.fill(1.0)
ti.sync()
told("kernels")
array = ti.ndarray(ti.u8, shape=64 << 20)
told("array")
