"""Blocks end when nothing uses them any more, for any answer of the driver meanwhile."""

from pathlib import Path

import pytest
from preloaded import MIB, environment, python

from vgpu.native import CardLimit, Limits, Region, simulator

PRELUDE = """
import os
from pathlib import Path
from driver_client import *
from vgpu.native import Region, simulator
cards = Path(os.environ["VGPU_SIM_DIR"])
held = lambda: Region.open(Path(os.environ["VGPU_DIR"])).usage().cards[0].host_used // MIB
start()
status, pointer = alloc(100 * MIB)
kernel, stream, event = function("busy_300ms"), c_void_p(), c_void_p()
ok(cu.cuStreamCreate(byref(stream), 1))
ok(cu.cuEventCreate(byref(event), 2))
"""


def program(folder: Path, script: str, *, movable: bool = False, **variables: str) -> list[str]:
    """Runs a script in a container with almost no guarantee: its block is in host memory."""
    simulator.create(folder / "cards", "T4")
    (folder / "region").mkdir()
    card = CardLimit(simulator.cards(folder / "cards")[0].uuid, 256 * MIB, 32 * MIB)
    limits = Limits((card,), host_memory=256 * MIB, oversubscribe=True, movable=movable)
    with Region.create(folder / "region", limits):
        return python(PRELUDE + script, environment(folder, VGPU_DIR=str(folder / "region")) | variables)


@pytest.mark.parametrize("code", [900, 999], ids=["a capture has begun", "unknown"])
def test_a_block_that_was_freed_in_order_stays_until_its_event_has_passed(tmp_path: Path, code: int) -> None:
    """No other answer of the driver means that the stream has reached the event."""
    script = f"""
ok(launch(kernel, stream.value))
ok(cu.cuEventRecord(event, stream))
ok(free_async(pointer, stream.value))
simulator.inject_error(cards, "cuEventQuery", {code})
info()
print(held(), cu.cuEventQuery(event))
ok(cu.cuStreamSynchronize(stream))
info()
print(held())
"""
    assert program(tmp_path, script) == ["100 600", "0"]


def test_a_block_that_was_freed_in_order_ends_in_whatever_context_it_is_asked_for(tmp_path: Path) -> None:
    script = """
ok(free_async(pointer, stream.value))
ok(cu.cuStreamSynchronize(stream))
ok(cu.cuCtxSetCurrent(None))
other = context()
info()
print(held())
"""
    assert program(tmp_path, script) == ["0"]


def test_a_free_beside_a_capture_that_has_just_begun_waits_all_the_same(tmp_path: Path) -> None:
    script = """
ok(launch(kernel, stream.value))
ok(cu.cuEventRecord(event, stream))
simulator.inject_error(cards, "cuCtxSynchronize", 900)
print(free(pointer), held(), cu.cuEventQuery(event), free(pointer))
"""
    assert program(tmp_path, script) == ["0 0 0 1"]


@pytest.mark.parametrize("movable", [False, True], ids=["static", "movable"])
def test_a_child_knows_nothing_of_what_its_parent_launched(tmp_path: Path, movable: bool) -> None:
    """The child cannot use the driver, and gets an error: it does not die."""
    script = """
from ctypes import addressof
image = b".version 8.0\\n.target sm_70\\n.address_size 64\\n.visible .entry touch_fill_3us(" \\
    b".param .u64 to, .param .u64 words, .param .u64 value) { ret; }\\n"
module, kernel = c_void_p(), c_void_p()
ok(cu.cuModuleLoadData(byref(module), c_char_p(image)))
ok(cu.cuModuleGetFunction(byref(kernel), module, c_char_p(b"touch_fill_3us")))
values = (c_uint64 * 3)(pointer, 16, 7)
parameters = (c_void_p * 3)(*(addressof(values) + 8 * i for i in range(3)))
def touch(times):
    return [cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, parameters, None) for _ in range(times)]
assert set(touch(37)) == {0}
for call in (lambda: cu.cuMemsetD8_v2(c_uint64(pointer), 0, c_size_t(64)), lambda: touch(1)[0], cu.cuCtxSynchronize):
    child = os.fork()
    if not child:
        os._exit(max(call() for _ in range(40)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(touch(1)[0])
"""
    assert program(tmp_path, script, movable=movable) == ["3", "3", "3", "0"]  # CUDA_ERROR_NOT_INITIALIZED
