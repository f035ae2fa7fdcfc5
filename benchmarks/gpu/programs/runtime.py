"""Charge of a slice for the CUDA runtime: `runtime.py UUID LIBCUDART|torch`, for any Python.

Prints {"missing": why} where this cannot be tried, else bytes that NVML reports as used: with the runtime's context,
with an allocation as well, after cudaDeviceReset, and with a context again.
"""

import ctypes
import importlib.util
import json
import sys
from pathlib import Path

MIB = 1 << 20
SIZE = 64 * MIB


class Memory(ctypes.Structure):
    """nvmlMemory_t of nvml.h."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def used():
    nvml, handle, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), Memory()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByUUID(sys.argv[1].encode(), ctypes.byref(handle))
    status = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if status:
        raise SystemExit(f"nvmlDeviceGetMemoryInfo answers {status}")
    return memory.used


def missing(why):
    print(json.dumps({"missing": why}), flush=True)
    raise SystemExit


def of_torch():
    """PyTorch's loaded runtime, its version, and bytes that PyTorch's allocator holds now."""
    if importlib.util.find_spec("torch") is None:
        missing("torch")
    import torch

    if not torch.version.cuda:
        missing("PyTorch is built without CUDA")
    kept = torch.zeros(1, device="cuda")  # freed together with its context
    reserved = torch.cuda.memory_reserved()
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    if not maps:
        missing("PyTorch has loaded no libcudart.so: it may be linked in")
    return ctypes.CDLL(maps.pop()), f"PyTorch {torch.__version__}", reserved, kept


def main():
    if sys.argv[2] == "torch":
        cudart, what, reserved, _ = of_torch()
    else:
        cudart, what, reserved = ctypes.CDLL(sys.argv[2]), Path(sys.argv[2]).name, 0
        count = ctypes.c_int()
        status = cudart.cudaGetDeviceCount(ctypes.byref(count))
        if status:
            missing(f"cudaGetDeviceCount of {what} answers {status}")
    pointer = ctypes.c_void_p()

    def call(name, *arguments):
        status = getattr(cudart, name)(*arguments)
        if status:
            raise SystemExit(f"{name} answers {status}")

    call("cudaFree", None)
    context = used() - reserved
    call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(SIZE))
    full = used()
    call("cudaDeviceReset")
    after = used()
    call("cudaFree", None)
    print(json.dumps({"what": what, "context": context, "full": full, "size": SIZE, "reserved": reserved,
                      "after": after, "again": used()}), flush=True)  # fmt: skip


main()
