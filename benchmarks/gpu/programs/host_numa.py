"""Whether memory of a NUMA node of the host (HOST_NUMA) works here.

Prints a line before each step, because a driver may end the process. Runs with tests/native on its path.
"""

import json
from collections.abc import Callable
from ctypes import c_size_t, c_uint64, create_string_buffer

from driver_client import cu, ok, reserve, start
from kernels import GRANULE, HOST_NODE, HOST_NUMA, Kernels, attribute, create, give_access, map_at, maps_host

VALUE = 0x0123456789ABCDEF


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def step(name: str, work: Callable[[], object]) -> None:
    say(begins=name)
    try:
        work()
    except AssertionError as error:  # driver_client's: the driver's status
        say(failed=name, why=str(error))
        raise SystemExit(0) from None


def main() -> None:
    start()
    kernels = Kernels()
    say(attribute=maps_host(), node=attribute(HOST_NODE))
    made: list[int] = []

    def make() -> None:
        status, handle = create(HOST_NUMA, GRANULE)
        ok(status)
        made.append(handle)

    step("cuMemCreate", make)
    address = reserve(GRANULE)
    step("cuMemMap", lambda: map_at(address, GRANULE, made[0]))
    step("cuMemSetAccess", lambda: give_access(address, GRANULE))

    def touch() -> None:
        kernels.fill(address, GRANULE, VALUE)
        total = kernels.sum(address, GRANULE)
        assert total == GRANULE // 8 * VALUE % 2**64, "wrong words"

    def copy() -> None:
        here = create_string_buffer(GRANULE)
        ok(cu.cuMemcpyDtoH_v2(here, c_uint64(address), c_size_t(GRANULE)))
        assert here.raw[:8] == VALUE.to_bytes(8, "little"), "wrong bytes"

    step("a kernel", touch)
    step("a copy", copy)
    ok(cu.cuMemUnmap(c_uint64(address), c_size_t(GRANULE)))
    ok(cu.cuMemRelease(c_uint64(made[0])))
    say(done=True)


main()
