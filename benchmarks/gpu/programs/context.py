"""Makes contexts, one after the other: `context.py`. Prints each context, and goes on after a line of input.

Runs with tests/native on its path.
"""

import json
import os
import sys
from ctypes import byref, c_uint, c_void_p

from driver_client import cu, device, ok


def say(what: str) -> None:
    print(json.dumps({"pid": os.getpid(), "made": what}), flush=True)
    sys.stdin.readline()


ok(cu.cuInit(0))
first, second = c_void_p(), c_void_p()
ok(cu.cuDevicePrimaryCtxRetain(byref(first), device()))
say("primary")
ok(cu.cuCtxCreate_v2(byref(second), c_uint(0), device()))
say("second")
