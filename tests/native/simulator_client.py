"""What test scripts on simulated cards use: NVIDIA's own bindings, and a few short forms."""

import json
import os
import sys
import time

from cuda.bindings import driver as cu

MIB = 1 << 20
PTX = ".version 8.0\n.target sm_75\n.address_size 64\n"

__all__ = [
    "MIB",
    "PTX",
    "code",
    "context",
    "cu",
    "elapsed",
    "free",
    "kernel",
    "launch",
    "ok",
    "os",
    "report",
    "time",
    "wait",
]


def ok(result):
    """The values of a call that must succeed."""
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else tuple(values)


def code(result):
    """The number of the error of a call."""
    return result[0].value


def report(value):
    print(json.dumps(value), flush=True)


def wait():
    """Waits until the test sends a line."""
    return sys.stdin.readline().strip()


def context(device=0):
    """Makes the primary context of a device current."""
    ok(cu.cuInit(0))
    made = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(made))
    return made


def free():
    return ok(cu.cuMemGetInfo())[0]


def kernel(name):
    module = ok(
        cu.cuModuleLoadData((PTX + f".visible .entry {name}(.param .u64 p, .param .u32 n)\n{{ ret; }}").encode())
    )
    return ok(cu.cuModuleGetFunction(module, name.encode()))


def launch(function, stream=0, blocks=1):
    ok(cu.cuLaunchKernel(function, blocks, 1, 1, 32, 1, 1, 0, stream, 0, 0))


def elapsed(work, stream=0):
    """Milliseconds on the card by a pair of events."""
    begin, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
    ok(cu.cuEventRecord(begin, stream))
    work()
    ok(cu.cuEventRecord(end, stream))
    ok(cu.cuEventSynchronize(end))
    return ok(cu.cuEventElapsedTime(begin, end))
