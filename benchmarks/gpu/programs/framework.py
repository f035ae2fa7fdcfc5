"""One framework at its limit: `framework.py NAME`, for any Python; it needs only that framework.

Prints {"missing": NAME} where the framework is not installed. Otherwise prints the reported memory, the memory that it
got, the error that ended it, and whether a product of matrices is right. `framework.py torch-rate WARM_S MEASURED_S`:
products of matrices per second.
"""

import importlib.util
import json
import sys
import time

MIB = 1 << 20
STEP = 64 * MIB
SIDE = 512


def say(**what):
    print(json.dumps(what), flush=True)


def until_refused(take, refusals):
    """Bytes that `take` got in steps, and the name of the exception that ended it."""
    held, got, size = [], 0, STEP * 4
    while True:
        try:
            held.append(take(size))
            got += size
        except refusals as error:
            if size <= 2 * MIB:
                return held, got, type(error).__name__, str(error)[:200]
            size //= 2


def with_torch():
    import torch

    ones = torch.ones(SIDE, SIDE, device="cuda")
    right = bool(((ones @ ones) == SIDE).all().item())
    free, total = torch.cuda.mem_get_info()
    held, got, kind, text = until_refused(
        lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.cuda.OutOfMemoryError
    )
    del held
    torch.cuda.empty_cache()
    again = torch.empty(STEP, dtype=torch.uint8, device="cuda").numel() == STEP
    say(version=torch.__version__, total=total, free=free, got=got, kind=kind, text=text, right=right, again=again)


def with_cupy():
    import cupy

    ones = cupy.ones((SIDE, SIDE), dtype=cupy.float32)
    right = bool(((ones @ ones) == SIDE).all())
    free, total = cupy.cuda.runtime.memGetInfo()
    held, got, kind, text = until_refused(
        lambda size: cupy.empty(size, dtype=cupy.uint8), cupy.cuda.memory.OutOfMemoryError
    )
    del held
    cupy.get_default_memory_pool().free_all_blocks()
    again = cupy.empty(STEP, dtype=cupy.uint8).size == STEP
    say(version=cupy.__version__, total=total, free=free, got=got, kind=kind, text=text, right=right, again=again)


def with_jax():
    import jax
    import numpy

    device = jax.devices("gpu")[0]
    ones = jax.device_put(numpy.ones((SIDE, SIDE), numpy.float32), device)
    right = bool((numpy.asarray(ones @ ones) == SIDE).all())
    free, total = driver_memory()
    held, got, kind, text = until_refused(
        lambda size: jax.device_put(numpy.zeros(size, numpy.uint8), device).block_until_ready(), Exception
    )
    if "RESOURCE_EXHAUSTED" not in text and "memory" not in text.lower():
        raise SystemExit(f"ended by {kind}: {text}")
    del held
    again = jax.device_put(numpy.zeros(STEP, numpy.uint8), device).size == STEP
    say(version=jax.__version__, total=total, free=free, got=got, kind=kind, text=text, right=right, again=again)


def with_triton():
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def add(left, right, out, count, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < count
        tl.store(out + at, tl.load(left + at, mask=inside) + tl.load(right + at, mask=inside), mask=inside)

    left, other = torch.rand(10000, device="cuda"), torch.rand(10000, device="cuda")
    out = torch.empty_like(left)
    add[(triton.cdiv(10000, 1024),)](left, other, out, 10000, block=1024)
    right = bool(torch.equal(out, left + other))
    free, total = torch.cuda.mem_get_info()
    say(version=triton.__version__, total=total, free=free, right=right, again=True)


def driver_memory():
    """Free and total bytes by cuMemGetInfo, in the context that the framework made current, or in an own context."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxPushCurrent_v2(context)
    driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    driver.cuDevicePrimaryCtxRelease_v2(0)
    return free.value, total.value


def torch_rate(warm, measured):
    import torch

    left = torch.rand(4096, 4096, device="cuda", dtype=torch.float16)

    def products(seconds):
        done, begun = 0, time.monotonic()
        while time.monotonic() < begun + seconds:
            for _ in range(4):
                left @ left
            torch.cuda.synchronize()
            done += 4
        return done / (time.monotonic() - begun)

    products(warm)
    say(rate=products(measured), version=torch.__version__)


PROGRAMS = {"torch": with_torch, "cupy": with_cupy, "jax": with_jax, "triton": with_triton}
NEEDS = {"triton": ("triton", "torch"), "torch-rate": ("torch",)}
name = sys.argv[1]
absent = [module for module in NEEDS.get(name, (name,)) if importlib.util.find_spec(module) is None]
if not absent and "torch" in NEEDS.get(name, (name,)):
    import torch

    absent = [] if torch.version.cuda else ["PyTorch is built without CUDA"]
if absent:
    say(missing=", ".join(absent))
elif name == "torch-rate":
    torch_rate(float(sys.argv[2]), float(sys.argv[3]))
else:
    PROGRAMS[name]()
