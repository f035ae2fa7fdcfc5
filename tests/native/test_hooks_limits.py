"""Memory that a program reserves for its kernels in addition to their own: heap, printf and stacks (cuCtxSetLimit)."""

import signal
import sys
from pathlib import Path

import pytest
from preloaded import environment, python, run

from vgpu.native import CardLimit, Limits, Region, simulator

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


@pytest.mark.parametrize("region", [False, True], ids=["environment", "region"])
def test_who_asks_for_it_is_ended_when_an_allocation_is_refused(tmp_path: Path, region: bool) -> None:
    variables = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1000m", "LIBCUDA_LOG_LEVEL": "1"}
    if region:
        simulator.create(tmp_path / "cards", "T4")
        card = simulator.cards(tmp_path / "cards")[0]
        Region.create(tmp_path, Limits((CardLimit(card.uuid, 1000 << 20),))).close()
        variables = {"VGPU_DIR": str(tmp_path), "LIBCUDA_LOG_LEVEL": "1"}
    script = "from driver_client import *\nstart()\nprint(alloc(999 << 20)[0], alloc(1001 << 20)[0], flush=True)"
    for asks, code, said in (
        ("true", -signal.SIGKILL, "ACTIVE_OOM_KILLER asked for it"),
        ("false", 0, "refused"),
        ("maybe", 0 if region else 1, "ACTIVE_OOM_KILLER=maybe: neither on nor off"),
    ):
        env = environment(tmp_path, **variables, ACTIVE_OOM_KILLER=asks)
        env["LIBCUDA_LOG_LEVEL"] = "2"
        done = run([sys.executable, "-c", script], env, code=code)
        assert said in done.stderr, done.stderr
