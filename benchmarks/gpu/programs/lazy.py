"""Cost of the first launch of a kernel: `lazy.py`. Prints one object, ms by the host's clock and by events.

With lazy loading (the default from CUDA 12.2 on), a function's code is loaded at its first use. Runs with tests/native
on its path.
"""

import json
import time
from collections.abc import Callable
from ctypes import addressof, byref, c_char_p, c_float, c_int, c_uint64, c_void_p
from statistics import median

from driver_client import cu, ok, start
from share import event

COUNT = 128  # kernels of one module: more than the credit of an idle time
LINES = 200  # instructions of each kernel, so that loading takes time
MODES = {1: "EAGER", 2: "LAZY"}  # CUmoduleLoadingMode of cuda.h
SHAPE = 1, 1, 1, 32, 1, 1, 0
LINE = "    fma.rn.f32 %f1, %f1, %f2, %f1;\n"


def text(prefix: str) -> bytes:
    """Kernels that end at once: their work is behind a condition that is never true."""
    kernels = "".join(
        f".visible .entry {prefix}{number}_10us(.param .u64 out)\n{{\n"
        "    .reg .pred %p;\n    .reg .b64 %a;\n    .reg .f32 %f<3>;\n    ld.param.u64 %a, [out];\n"
        "    setp.eq.u64 %p, %a, 0;\n    @%p bra done;\n"
        f"    ld.global.f32 %f1, [%a];\n    mov.f32 %f2, 0f3F80000{number % 8};\n{LINE * LINES}"
        "    st.global.f32 [%a], %f1;\ndone:\n    ret;\n}\n"
        for number in range(COUNT)
    )
    return f".version 6.0\n.target sm_70\n.address_size 64\n{kernels}".encode()


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begun)


class Module:
    """A module and its times, ms."""

    def __init__(self, prefix: str) -> None:
        module, self.functions = c_void_p(), [c_void_p() for _ in range(COUNT)]
        ptx = text(prefix)
        self.load = timed(lambda: ok(cu.cuModuleLoadData(byref(module), c_char_p(ptx))))
        self.get = [
            timed(lambda f=f, n=n: ok(cu.cuModuleGetFunction(byref(f), module, f"{prefix}{n}_10us".encode())))
            for n, f in enumerate(self.functions)
        ]

    def launches(self) -> dict[str, float]:
        """One launch of each kernel: the medians of the call and of a pair of events around it, and the sum."""
        first, last, took, nothing = event(), event(), c_float(), c_uint64(0)
        parameters = (c_void_p * 1)(addressof(nothing))
        calls, pairs, begun = [], [], time.perf_counter()
        for function in self.functions:
            ok(cu.cuEventRecord(first, None))
            calls.append(timed(lambda f=function: ok(cu.cuLaunchKernel(f, *SHAPE, None, parameters, None))))
            ok(cu.cuEventRecord(last, None))
            ok(cu.cuEventSynchronize(last))
            ok(cu.cuEventElapsedTime(byref(took), first, last))
            pairs.append(took.value)
        return {"call": median(calls), "pair": median(pairs), "sum": 1000 * (time.perf_counter() - begun)}


def main() -> None:
    start()
    mode = c_int()
    asked = getattr(cu, "cuModuleGetLoadingMode", None)
    known = asked and asked(byref(mode)) == 0
    one = Module("first")
    answer = {
        "mode": MODES.get(mode.value, str(mode.value)) if known else "EAGER",
        "count": COUNT,
        "load": one.load,
        "get": median(one.get),
        "first": one.launches(),
        "second": one.launches(),
    }
    other = Module("loaded")
    load = getattr(cu, "cuFuncLoad", None)
    if load is not None:
        answer["funcload"] = median(timed(lambda f=f: ok(load(f))) for f in other.functions)
        answer["after"] = other.launches()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
