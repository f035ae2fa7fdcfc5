"""Keeps the card busy with kernels of one length and reports its share of the card's time.

`share.py LENGTH WARM_S MEASURED_S [LAUNCHER]`, LENGTH such as 100us, LAUNCHER launch.c as a library. Prints the time of
one kernel, begins after a line of input, prints the launches that ran. Runs with tests/native on its path.

The kernel counts its own time on the card: the steps of %globaltimer (ns; PTX ISA, special registers), without steps so
long that another process must have had the card. So a launch takes LENGTH of the card's time, even with neighbours. The
simulator uses the number in the name instead.
"""

import json
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from ctypes import CDLL, addressof, byref, c_char_p, c_float, c_int, c_uint64, c_void_p, cast

from driver_client import cu, ok, start

NS = {"us": 1_000, "ms": 1_000_000}
BATCH_NS = 1_000_000  # launches between two events: enough to make the cost of an event negligible
IN_FLIGHT = 3  # batches: the card never waits for the host, and stops soon after the host does
SINGLES = 5
PTX = """\
.version 6.0
.target sm_70
.address_size 64
.visible .entry spin_{name}(.param .u64 length, .param .u64 longest)
{{
    .reg .pred %p<3>;
    .reg .b64 %t<8>;
    ld.param.u64 %t0, [length];
    ld.param.u64 %t1, [longest];
    mov.u64 %t2, %globaltimer;
    mov.u64 %t3, %t2;
    mov.u64 %t4, 0;
again:
    mov.u64 %t5, %globaltimer;
    sub.u64 %t6, %t5, %t3;
    mov.u64 %t3, %t5;
    setp.lt.u64 %p0, %t6, 20000;
    @%p0 add.u64 %t4, %t4, %t6;
    sub.u64 %t7, %t5, %t2;
    setp.gt.u64 %p1, %t7, %t1;
    @%p1 bra done;
    setp.lt.u64 %p2, %t4, %t0;
    @%p2 bra again;
done:
    ret;
}}
"""


class Work:
    """A kernel of a known length, in a context of its own or in the current one."""

    def __init__(self, name: str, context: c_void_p | None = None) -> None:
        found = re.fullmatch(r"([1-9][0-9]*)(us|ms)", name)
        if found is None:
            raise SystemExit(f"{name!r}: a length such as 100us or 2ms")
        self.length = int(found[1]) * NS[found[2]]
        self.context = context or start()
        module, self.function = c_void_p(), c_void_p()
        ok(cu.cuModuleLoadData(byref(module), c_char_p(PTX.format(name=name).encode())))
        ok(cu.cuModuleGetFunction(byref(self.function), module, f"spin_{name}".encode()))
        # On a card whose clock ticks in such long steps, the kernel must still come to an end.
        self.numbers = c_uint64(self.length), c_uint64(20 * self.length)
        self.parameters = (c_void_p * 2)(*(addressof(number) for number in self.numbers))

        self.many: Callable[[int], int] | None = None

    def use(self, launcher: str) -> None:
        """Makes launches go through launch.c."""
        many, launch = CDLL(launcher).launch_many, cast(cu.cuLaunchKernel, c_void_p)
        self.many = lambda count: many(launch, self.function, self.parameters, c_int(count))

    def launches(self, count: int) -> None:
        if self.many is not None:
            ok(self.many(count))
            return
        for _ in range(count):
            self.launch()

    def launch(self) -> None:
        ok(cu.cuLaunchKernel(self.function, 1, 1, 1, 32, 1, 1, 0, None, self.parameters, None))

    def single_ms(self) -> float:
        """The shortest of several launches, by events."""
        first, last, took, shortest = event(), event(), c_float(), float("inf")
        for _ in range(SINGLES):
            ok(cu.cuEventRecord(first, None))
            self.launch()
            ok(cu.cuEventRecord(last, None))
            ok(cu.cuEventSynchronize(last))
            ok(cu.cuEventElapsedTime(byref(took), first, last))
            shortest = min(shortest, took.value)
        return shortest

    def rate(self, warm: float, measured: float) -> dict[str, float]:
        """Launches that ended after the warm-up, and their seconds by the card's clock.

        Both are from the end of one batch to the end of a later one. `each_ms`: the shortest time per launch in one
        batch; these launches waited only for the card.
        """
        batch = max(1, BATCH_NS // self.length)
        spare, flying = [event() for _ in range(IN_FLIGHT + 1)], deque()
        before, between, shortest = spare.pop(), c_float(), float("inf")
        launches, took_ms, counting = 0, 0.0, False
        ok(cu.cuEventRecord(before, None))
        begins = time.monotonic() + warm
        while time.monotonic() < begins + measured or launches == 0:
            if not spare:
                mark = flying.popleft()
                ok(cu.cuEventSynchronize(mark))
                ok(cu.cuEventElapsedTime(byref(between), before, mark))
                shortest = min(shortest, between.value / batch)
                if counting:
                    launches += batch
                    took_ms += between.value
                counting = time.monotonic() >= begins
                spare.append(before)
                before = mark
            self.launches(batch)
            mark = spare.pop()
            ok(cu.cuEventRecord(mark, None))
            flying.append(mark)
        ok(cu.cuCtxSynchronize())
        return {"launches": launches, "seconds": took_ms / 1000, "each_ms": shortest}


def event() -> c_void_p:
    made = c_void_p()
    ok(cu.cuEventCreate(byref(made), 0))
    return made


def main() -> None:
    name, warm, measured = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    work = Work(name)
    if sys.argv[4:]:
        work.use(sys.argv[4])
    print(json.dumps({"single_ms": work.single_ms(), "length_ms": work.length / 1e6}), flush=True)
    sys.stdin.readline()
    print(json.dumps(work.rate(warm, measured)), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
