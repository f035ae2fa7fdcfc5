"""Where memory goes that does not fit into the guarantee; and charges equal what is held."""

from pathlib import Path

import pytest
from preloaded import MIB, environment, python
from tiered import KINDS, PRELUDE, TRUTH, Container, container, of_kind

from vgpu.native import CardLimit, Limits, Region


@pytest.fixture(params=KINDS)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Container:
    return of_kind(tmp_path, request.param)


def test_what_does_not_fit_into_the_guarantee_lies_in_host_memory(box: Container) -> None:
    lines = box.python(
        TRUTH
        + """
start()
blocks = [alloc(64 * MIB) for _ in range(8)]
print([status for status, _ in blocks], {where(pointer) for _, pointer in blocks})
used, resident, host = truth()
assert used == resident + host
print(host, resident, info()[0] // MIB)
for _, pointer in blocks:
    ok(free(pointer))
after = truth()
print(after[2], after[0] == after[1])
"""
    )
    assert lines == ["[0, 0, 0, 0, 0, 0, 0, 0] {2}", "64 448 512", "0 True"]
    assert box.usage().cards[0].used == 0
    assert box.truth().host == 0


@pytest.mark.parametrize("entry", ["cuMemCreate", "cuMemMap"])
def test_a_node_whose_host_memory_does_not_keep_its_promise_pins_it(tmp_path: Path, entry: str) -> None:
    """The first failure counts: no process of the region tries again."""
    box = container(tmp_path, cards="T4")
    script = f"""
import os
from pathlib import Path
from vgpu.native import simulator
start()
simulator.inject_error(Path(os.environ["VGPU_SIM_DIR"]), {entry!r}, 801)
pinned = lambda pointer: pointer < 1 << 47
first, large = alloc(400 * MIB)[1], alloc(300 * MIB)[1]
print(pinned(large), pinned(alloc(150 * MIB)[1]))
"""
    assert box.python(TRUTH + script) == ["True True"]


@pytest.mark.parametrize(("driver", "pinned"), [("T4@11.8", True), ("T4@12.4", True), ("T4", False)])
def test_drivers_that_cannot_map_host_memory_pin_it(tmp_path: Path, driver: str, pinned: bool) -> None:
    """Addresses show it: the simulated driver's ranges are above those of the process. Small blocks are
    always pinned.
    """
    box = container(tmp_path, cards=driver)
    lines = box.python(
        TRUTH
        + """
start()
pinned = lambda pointer: pointer < 1 << 47
first, large = alloc(400 * MIB)[1], alloc(300 * MIB)[1]
small = [alloc(MIB)[1] for _ in range(120)][-1]
print(pinned(large), pinned(small), truth())
print([cu.cuMemFreeHost(c_void_p(pointer)) for pointer in (first, large, small)])
print([cu.cuMemHostGetFlags(byref(c_uint()), c_void_p(pointer)) for pointer in (first, large, small)])
print([cu.cuMemHostGetDevicePointer_v2(byref(c_uint64()), c_void_p(pointer), 0) for pointer in (first, large, small)])
print([free(pointer) for pointer in (first, large, small)], truth()[2] < 10)
"""
    )
    assert lines == [f"{pinned} True (820, 512, 308)", *["[1, 1, 1]"] * 3, "[0, 0, 0] True"]


def test_the_limit_is_exact_and_nothing_stays_charged_after_a_refusal(box: Container) -> None:
    lines = box.python(
        TRUTH
        + """
start()
left = info()[0]
first, pointer = alloc(left // 4 // 4096 * 4096)
rest = info()[0]
while rest > 128 * MIB:
    ok(alloc(128 * MIB)[0])
    rest -= 128 * MIB
print(first, rest == info()[0])
before = truth()
print(alloc(rest + 1)[0], truth() == before)
print(alloc(rest)[0], info()[0], alloc(MIB)[0], alloc(64 * MIB)[0])
truth()
"""
    )
    assert lines == ["0 True", "2 True", "0 0 2 2"]
    assert box.usage().cards[0].refused == 3


def test_the_host_budget_ends_in_an_ordinary_out_of_memory(tmp_path: Path) -> None:
    box = container(tmp_path, host=100)
    lines = box.python(
        TRUTH
        + """
start()
statuses = [alloc(32 * MIB)[0] for _ in range(40)]
print(statuses == sorted(statuses), set(statuses), truth()[2])
before = truth()
print([alloc(32 * MIB)[0], truth() == before, alloc(MIB)[0]])
"""
    )
    assert lines == ["True {0, 2} 96", "[2, True, 0]"]


def test_the_machine_keeps_a_reserve(tmp_path: Path) -> None:
    """No machine that runs this has 2 TiB to spare; the simulated driver would take them."""
    box = container(tmp_path, memory=3 << 20, host=None)
    lines = box.python(
        TRUTH
        + """
start()
before = truth()
print(alloc(2 << 40)[0], create(2 << 40)[0], truth() == before, alloc(600 * MIB)[0])
"""
    )
    assert lines == ["2 2 True 0"]


def test_without_a_budget_large_blocks_have_all_of_the_guarantee(tmp_path: Path) -> None:
    box = container(tmp_path, host=0)
    lines = box.python(TRUTH + "start()\nn = 0\nwhile alloc(2 * MIB)[0] == 0: n += 1\nprint(truth()[1:], n > 0)")
    assert lines == ["(512, 0) True"]


def test_small_blocks_have_the_headroom_and_then_host_memory(tmp_path: Path) -> None:
    box = container(tmp_path)
    lines = box.python(
        TRUTH
        + """
start()
while truth()[2] == 0:
    ok(alloc(2 * MIB)[0])
host = truth()[2]
small = [alloc(MIB) for _ in range(40)]
print({status for status, _ in small}, {where(pointer) for _, pointer in small}, truth()[1], truth()[2] > host)
print({free(pointer) for _, pointer in small}, truth()[2] == host)
"""
    )
    assert lines == ["{0} {2} 512 True", "{0} True"]


def test_a_second_process_finds_room_for_its_context(tmp_path: Path) -> None:
    """Large blocks that fill the card would otherwise leave no room: a context cannot be in host memory."""
    box = container(tmp_path, memory=8192, guarantee=4096, host=4096)
    lines = box.python(
        TRUTH
        + """
import subprocess, sys
start()
while truth()[2] == 0:
    ok(alloc(64 * MIB)[0])
other = [sys.executable, "-c", "from driver_client import *\\nstart()\\nprint(alloc(MIB)[0])"]
print(subprocess.run(other, capture_output=True, text=True, check=True).stdout.strip())
"""
    )
    assert lines == ["0"]


def test_a_card_that_others_fill_gives_way_to_host_memory(box: Container) -> None:
    """The driver has no room although the guarantee has: no allocation is refused that host memory can hold."""
    lines = box.python(
        TRUTH
        + """
import subprocess, sys
env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "VGPU_DIR")}
program = "from driver_client import *\\nstart()\\nok(alloc(info()[0])[0])\\nprint(flush=True)\\ninput()"
pipe = subprocess.PIPE
start()
other = subprocess.Popen([sys.executable, "-c", program], env=env, stdin=pipe, stdout=pipe, text=True)
other.stdout.readline()
print(alloc(100 * MIB)[0], alloc(200 * MIB)[0], alloc(MIB)[0], alloc_async(50 * MIB)[0])
other.kill()
other.wait()
print(truth())
"""
    )
    assert lines == ["0 0 0 0", "(351, 0, 351)"]


ALLOCATORS = {
    "cuMemAllocPitch": (
        "(cu.cuMemAllocPitch_v2(byref(p), byref(n), c_size_t(MIB - 100), c_size_t(100), 16), p.value)",
        "free(pointer)",
    ),
    "cuMemAllocAsync": ("alloc_async(100 * MIB)", "free_async(pointer) or cu.cuStreamSynchronize(None)"),
    "cuMemAllocFromPoolAsync": (
        "(cu.cuMemAllocFromPoolAsync(byref(p), c_size_t(100 * MIB), the_pool, None), p.value)",
        "free_async(pointer) or cu.cuCtxSynchronize()",
    ),
    "freed-otherwise": ("alloc_async(100 * MIB)", "free(pointer)"),
    "freed-in-order": ("alloc(100 * MIB)", "free_async(pointer) or cu.cuStreamSynchronize(None)"),
    "cuMemCreate": ("create(100 * MIB)", "release(pointer)"),
}


@pytest.mark.parametrize("family", ALLOCATORS)
def test_every_family_goes_to_host_memory_and_comes_back(box: Container, family: str) -> None:
    if family == "cuMemCreate" and box.truth().model == "Tesla T4":
        pytest.skip("physical memory cannot be made in pinned memory")
    allocate, release = ALLOCATORS[family]
    lines = box.python(
        TRUTH
        + f"""
start()
the_pool, p, n = pool(), c_uint64(), c_size_t()
ok(alloc(info()[0] - (1024 - 512) * MIB - 50 * MIB)[0])
before = truth()
status, pointer = {allocate}
now = truth()
print(status, now[1] == before[1], now[2] - before[2], now[0] - before[0])
print({release}, info()[0] > 0, truth() == before)
"""
    )
    assert lines == ["0 True 100 100", "0 True True"]


def test_managed_memory_is_the_driver_s_own_and_stays_within_the_guarantee(tmp_path: Path) -> None:
    box = container(tmp_path)
    lines = box.python(
        TRUTH
        + """
start()
p = c_uint64()
print(cu.cuMemAllocManaged(byref(p), c_size_t(600 * MIB), 1), cu.cuMemAllocManaged(byref(p), c_size_t(64 * MIB), 1))
print(truth()[2])
"""
    )
    assert lines == ["2 0", "0"]


def test_what_is_lent_is_used_and_no_more(tmp_path: Path) -> None:
    box = container(tmp_path, movable=True)
    box.region.lend(0, 200 * MIB)
    lines = box.python(
        TRUTH
        + "start()\nprint([alloc(80 * MIB)[0] for _ in range(10)], truth()[1] <= 712 - 32, truth()[1] > 712 - 32 - 80)"
    )
    assert lines == ["[0, 0, 0, 0, 0, 0, 0, 0, 0, 0] True True"]


FIXED = {
    "cuMemAllocAsync": ("H100", "alloc_async(80 * MIB)[0]"),
    "cuMemCreate": ("H100", "create(80 * MIB)[0]"),
    "cuMemAllocManaged": ("H100", "cu.cuMemAllocManaged(byref(p), c_size_t(80 * MIB), 1)"),
    "arrays": ("H100", "cu.cuArrayCreate_v2(byref(p), byref(ArrayDescriptor(32768, 2560, UINT8, 1)))"),
    "a driver that cannot map host memory": ("T4@12.4", "alloc(80 * MIB)[0]"),
}


@pytest.mark.parametrize("kind", FIXED)
def test_what_can_never_move_is_not_lent_any_room(tmp_path: Path, kind: str) -> None:
    cards, allocate = FIXED[kind]
    box = container(tmp_path, cards=cards, movable=True)
    box.region.lend(0, 400 * MIB)
    lines = box.python(
        TRUTH
        + f"""
p = c_uint64()
start()
answers = [{allocate} for _ in range(10)]
print(answers[:6], truth()[1] <= 512, truth()[1] > 512 - 80 - 32)
"""
    )
    assert lines == ["[0, 0, 0, 0, 0, 0] True True"]


def test_blocks_that_can_move_give_way_to_what_can_be_nowhere_else(tmp_path: Path) -> None:
    box = container(tmp_path, movable=True)
    lines = box.python(
        TRUTH
        + """
start()
while truth()[2] == 0:
    ok(alloc(20 * MIB)[0])
before, array = truth(), c_void_p()
status = cu.cuArrayCreate_v2(byref(array), byref(ArrayDescriptor(32768, 6400, UINT8, 1)))
print(status, truth()[2] > before[2], truth()[1] <= 512)
print(cu.cuArrayCreate_v2(byref(array), byref(ArrayDescriptor(32768, 32768, UINT8, 1))), truth()[0] - before[0])
"""
    )
    assert lines == ["0 True True", "2 200"]


def test_each_card_has_accounts_and_host_memory_of_its_own(tmp_path: Path) -> None:
    box = container(tmp_path, cards="H100x2")
    lines = box.python(
        TRUTH
        + """
one, two = start(), context(1)
first = alloc(600 * MIB)
ok(cu.cuCtxSetCurrent(one))
second = alloc(700 * MIB)
print(first[0], second[0], attribute(9, first[1], c_int)[1], attribute(9, second[1], c_int)[1])
print(truth(0), truth(1))
print(free(first[1]), free(second[1]))
"""
    )
    assert lines == ["0 0 1 0", "(700, 0, 700) (600, 0, 600)", "0 0"]


def test_limits_of_the_environment_may_be_more_than_the_card_has(tmp_path: Path) -> None:
    env = environment(tmp_path, cards="T4", CUDA_DEVICE_MEMORY_LIMIT_0="16g", CUDA_OVERSUBSCRIBE="true")
    lines = python(PRELUDE + "start()\nprint([alloc(1500 * MIB)[0] for _ in range(11)], info()[1] // MIB)", env)
    assert lines == ["[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2] 16384"]


def test_nothing_changes_without_the_flag(tmp_path: Path) -> None:
    (tmp_path / "region").mkdir()
    region = Region.create(tmp_path / "region", Limits((CardLimit("", 1024 * MIB, 512 * MIB),), host_memory=None))
    env = environment(tmp_path, cards="H100", VGPU_DIR=str(tmp_path / "region"))
    lines = python(PRELUDE + "start()\nprint(alloc(1000 * MIB)[0], alloc(100 * MIB)[0], info()[1] // MIB)", env)
    assert lines == ["0 2 1024"]
    assert region.usage().cards[0].resident == 0
