"""Memory that a program allows its kernels beside their own: heap, printf and stacks (cuCtxSetLimit)."""

from pathlib import Path

import pytest
from preloaded import environment, python

PRELUDE = """
from driver_client import *
STACK, PRINTF, HEAP = 0, 1, 2
def allow(limit, size):
    return cu.cuCtxSetLimit(limit, c_size_t(size))
def charged():
    left, total = info()
    return (total - left) // MIB
context = start()
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="1000m")


def test_what_is_allowed_beyond_the_usual_is_charged_until_less_is(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
print(allow(HEAP, 8 * MIB), allow(PRINTF, MIB), allow(STACK, 1024), charged())
print(allow(HEAP, 608 * MIB), charged(), allow(HEAP, 1009 * MIB), charged())
print(allow(PRINTF, 101 * MIB), charged(), alloc(301 * MIB)[0])
print(allow(HEAP, 108 * MIB), charged(), allow(HEAP, 0), charged())
""",
        env,
    )
    assert lines == ["0 0 0 0", "0 600 2 600", "0 700 2", "0 200 0 100"]


def test_a_change_is_charged_by_what_it_adds(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
print(allow(HEAP, 608 * MIB), allow(HEAP, 808 * MIB), charged(), allow(HEAP, 1008 * MIB), charged())
print(allow(HEAP, 908 * MIB), charged(), alloc(101 * MIB)[0], alloc(100 * MIB)[0], allow(HEAP, 909 * MIB), charged())
print(allow(HEAP, 108 * MIB), charged(), allow(PRINTF, 2 * MIB), charged(), allow(HEAP, 8 * MIB), charged())
""",
        env,
    )
    assert lines == ["0 0 800 0 1000", "0 900 2 0 2 1000", "0 200 0 201 0 101"]


def test_stacks_are_those_of_all_threads_at_once(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
processors, threads = c_int(), c_int()
ok(cu.cuDeviceGetAttribute(byref(processors), 16, 0)), ok(cu.cuDeviceGetAttribute(byref(threads), 39, 0))
all = processors.value * threads.value
print(allow(STACK, 1024 + 500 * MIB // all), abs(charged() - 500) <= 1, allow(STACK, 1024 + 1500 * MIB // all))
print(allow(STACK, (1 << 64) - 1), allow(STACK, 1024), charged())
""",
        env,
    )
    assert lines == ["0 True 2", "2 0 0"]


def test_it_goes_with_its_context_and_is_not_charged_where_the_driver_refuses(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
print(allow(99, 500 * MIB), charged(), allow(HEAP, 508 * MIB), charged())
ok(cu.cuCtxDestroy_v2(context))
start()
print(charged(), alloc(1000 * MIB)[0])
""",
        env,
    )
    assert lines == ["215 0 0 500", "0 0"]
