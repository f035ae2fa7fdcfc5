"""Room on a card that blocks make for each other, and for memory that must be on the card."""

from pathlib import Path

from preloaded import MIB, environment, python

from vgpu.native import CardLimit, Limits, Region, simulator

WORD = """
import os, time
from ctypes import addressof
from pathlib import Path
from driver_client import *
from vgpu.native import Region, simulator
start()
"""


def program(folder: Path, guarantee: int, script: str) -> list[str]:
    """Runs a script under a limit of 12000 MiB in movable mode."""
    simulator.create(folder / "cards", "T4")
    (folder / "region").mkdir()
    limit = CardLimit(simulator.cards(folder / "cards")[0].uuid, 12000 * MIB, guarantee * MIB)
    limits = Limits((limit,), host_memory=8000 * MIB, oversubscribe=True, movable=True)
    with Region.create(folder / "region", limits):
        return python(WORD + script, environment(folder, VGPU_DIR=str(folder / "region")))


def test_a_block_larger_than_any_budget_comes_up(tmp_path: Path) -> None:
    """Once the bus could have carried the block: budgets alone end at 4 GiB."""
    lines = program(
        tmp_path,
        512,
        """
region = Region.open(Path(os.environ["VGPU_DIR"]), writable=True)
module, kernel = c_void_p(), c_void_p()
text = b".version 7.0\\n.target sm_75\\n.address_size 64\\n.visible .entry spin_100us(.param .u64 a)\\n{ ret; }\\n"
ok(cu.cuModuleLoadData(byref(module), c_char_p(text)))
ok(cu.cuModuleGetFunction(byref(kernel), module, b"spin_100us"))
status, block = alloc(4608 << 20)
before = region.usage().cards[0].host_used >> 20
region.lend(0, 6 << 30)
deadline = time.monotonic() + 40
while time.monotonic() < deadline and region.usage().cards[0].host_used:
    for _ in range(8):
        address = c_uint64(block)
        ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, (c_void_p * 1)(addressof(address)), None))
    ok(cu.cuCtxSynchronize())
print(status, before, region.usage().cards[0].host_used >> 20)
""",
    )
    assert lines == ["0 4608 0"]


def test_a_full_card_without_a_limit_is_not_asked_again_and_again(tmp_path: Path) -> None:
    """The driver's 300th answer would be an error in the log: the library asks ten times a second."""
    simulator.create(tmp_path / "cards", "T4")
    env = environment(tmp_path, CUDA_DEVICE_SM_LIMIT="50", CUDA_OVERSUBSCRIBE="true", LIBCUDA_LOG_LEVEL="2")
    lines = python(
        WORD
        + """
cards = Path(os.environ["VGPU_SIM_DIR"])
blocks = [alloc(768 << 20)[1] for _ in range(20)]
full = simulator.cards(cards)[0].host
while simulator.cards(cards)[0].host == full:
    ok(alloc(1 << 20)[0])
simulator.inject_error(cards, "cuMemCreate", 999, nth=300)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    ok(cu.cuCtxSynchronize())
print(full > 0, all(blocks))
""",
        env,
    )
    assert lines == ["True True"]


def test_room_is_kept_for_whom_it_was_made(tmp_path: Path) -> None:
    """Other threads allocate all the time, and would take the room."""
    lines = program(
        tmp_path,
        96,
        """
import threading
context = c_void_p()
ok(cu.cuCtxGetCurrent(byref(context)))
blocks = [alloc(8 << 20)[1] for _ in range(20)]
over = False
def others():
    ok(cu.cuCtxSetCurrent(context))
    while not over:
        status, block = alloc(2 << 20)
        if status == 0:
            free(block)
threads = [threading.Thread(target=others) for _ in range(4)]
for thread in threads:
    thread.start()
refused = 0
for _ in range(20):
    end = time.monotonic() + 0.03
    while time.monotonic() < end:
        ok(cu.cuCtxSynchronize())
    array = c_void_p()
    if cu.cuArrayCreate_v2(byref(array), byref(ArrayDescriptor(32768, 1024, UINT8, 1))):
        refused += 1
    else:
        ok(cu.cuArrayDestroy(array))
over = True
for thread in threads:
    thread.join()
print(refused)
""",
    )
    assert lines == ["0"]
