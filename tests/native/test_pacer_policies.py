"""How the library obeys the arbiter's values and changed limits."""

import time
from pathlib import Path

import pytest
from core_share import WINDOW_S, Arbiter, busy, make_region, running, share, within
from preloaded import python

from vgpu.native import Region

SYNC = "ok(launch(kernel)); wait()"
TWO_MS = "kernel = function('spin_2ms')"


def eventually(folder: Path, low: float, high: float) -> bool:
    """Waits until the share of a window is between the two; whether it is."""
    deadline = time.monotonic() + 30
    while not low < share(folder, WINDOW_S / 2):
        if time.monotonic() > deadline:
            return False
    while not share(folder, WINDOW_S / 2) < high:
        if time.monotonic() > deadline:
            return False
    return True


def test_an_elastic_share_follows_the_arbiter_and_falls_back_without_it(tmp_path: Path) -> None:
    with make_region(tmp_path, cores=10, policy="elastic", ceiling=80) as region:
        with Arbiter(region, share=60) as arbiter, running(within(tmp_path, region), SYNC, TWO_MS):
            assert eventually(tmp_path, 35, 66)
            arbiter.share = 100  # never above the ceiling
            assert eventually(tmp_path, 45, 88)
            arbiter.share = 15
            assert eventually(tmp_path, 3, 20)
        time.sleep(1.1)  # a heartbeat of a second ago is none
        with running(within(tmp_path, region), SYNC, TWO_MS):
            assert eventually(tmp_path, 3, 14)


def test_a_low_priority_yields_at_its_next_launch_and_goes_on_afterwards(tmp_path: Path) -> None:
    with (
        make_region(tmp_path, cores=60, priority=1) as region,
        Arbiter(region) as arbiter,
        running(within(tmp_path, region), SYNC, TWO_MS),
    ):
        assert eventually(tmp_path, 30, 66)
        arbiter.yielding = True
        assert eventually(tmp_path, 0.1, 6)  # slow, and not stopped
        arbiter.yielding = False
        assert eventually(tmp_path, 30, 66)


def test_who_yields_waits_before_its_first_launch_too(tmp_path: Path) -> None:
    script = """
from driver_client import *
start()
kernel = function("spin_5ms")
for _ in range(3):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
"""
    with make_region(tmp_path, cores=0, priority=1) as region, Arbiter(region, yielding=True):
        python(script, within(tmp_path, region))
        # 5 ms are a fiftieth of 250; of the first launch nothing is known
        assert region.usage().cards[0].throttled_ns > 600_000_000


def test_a_high_priority_does_not_yield(tmp_path: Path) -> None:
    with (
        make_region(tmp_path, cores=60) as region,
        Arbiter(region, yielding=True),
        running(within(tmp_path, region), SYNC, TWO_MS),
    ):
        assert eventually(tmp_path, 30, 66)


def test_a_launch_that_waits_goes_on_when_its_share_grows(tmp_path: Path) -> None:
    # while yielding, a second launch of 200 ms would wait for ten seconds
    script = """
from driver_client import *
start()
kernel = function("spin_200ms")
for _ in range(2):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
print("ready", flush=True)
for _ in range(2):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
"""
    with make_region(tmp_path, cores=90, priority=1) as region, Arbiter(region) as arbiter:
        python(script.partition("print")[0], within(tmp_path, region))
        arbiter.yielding = True
        begun = time.monotonic()
        with running(within(tmp_path, region), SYNC, "kernel = function('spin_200ms')"):
            time.sleep(0.5)
            arbiter.yielding = False
            assert eventually(tmp_path, 50, 101)
        assert time.monotonic() - begun < 9


def gpu_ms(region: Region) -> float:
    return region.usage().cards[0].gpu_ns / 1e6


def test_what_the_arbiter_refunds_is_taken_back_once(tmp_path: Path) -> None:
    script = """
from driver_client import *
start()
kernel = function("spin_1ms")
for _ in range({launches}):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
ok(launch(kernel))
"""
    with make_region(tmp_path, cores=90) as region, Arbiter(region) as arbiter:
        python(script.format(launches=100), within(tmp_path, region))
        before = gpu_ms(region)
        arbiter.refund_ns = 60_000_000
        arbiter.publish()
        python(script.format(launches=1), within(tmp_path, region))
        assert before - 62 < gpu_ms(region) < before - 50
        python(script.format(launches=1), within(tmp_path, region))
        assert gpu_ms(region) > before - 60


def test_a_refund_that_is_worth_more_than_a_burst_comes_back_whole(tmp_path: Path) -> None:
    """As next to a neighbour with long launches, whose time is known only after their end."""
    step, prepare = "ok(launch(kernel)); wait()", "kernel = function('spin_10ms')"
    with (
        make_region(tmp_path, cores=20) as region,
        Arbiter(region) as arbiter,
        running(within(tmp_path, region), step, prepare),
    ):
        share(tmp_path, 1)
        begun, before, refunds = time.monotonic(), busy(tmp_path), 4
        for _ in range(refunds):
            arbiter.refund_ns += 100_000_000
            time.sleep(1)
        passed, ran = time.monotonic() - begun, (busy(tmp_path) - before) / 1e9
    assert ran < passed * 0.2 + refunds * 0.1 + 0.06
    assert ran > passed * 0.2 + refunds * 0.1 * 0.6  # a busy machine launches less; 50 ms of waiting are worth 10 ms


def throttled_ms(folder: Path, burst_ms: int) -> float:
    """How long 40 ms of work at 50 % waited after a pause."""
    script = """
from driver_client import *
import time
start()
kernel = function("spin_1ms")
for _ in range(5):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
time.sleep(0.3)
for _ in range(40):
    ok(launch(kernel))
"""
    with make_region(folder, f"burst{burst_ms}", cores=50, burst_ms=burst_ms) as region:
        python(script, within(folder, region))
        return region.usage().cards[0].throttled_ns / 1e6


def test_a_rest_earns_as_much_as_the_limits_say(tmp_path: Path) -> None:
    assert throttled_ms(tmp_path, 100) < throttled_ms(tmp_path, 20) - 20


def test_launches_of_a_child_are_counted_once(tmp_path: Path) -> None:
    script = """
from driver_client import *
import os
start()
kernel = function("spin_1us")
for _ in range(500):
    ok(launch(kernel))
ok(cu.cuCtxSynchronize())
child = os.fork()
if child == 0:
    os.execv("/proc/self/exe", ["python", "-c", '''
from driver_client import *
start()
kernel = function("spin_3ms")
for _ in range(10):
    ok(launch(kernel))
    ok(cu.cuCtxSynchronize())
'''])
os.waitpid(child, 0)
"""
    with make_region(tmp_path, cores=90) as region:
        python(script, within(tmp_path, region))
        card = region.usage().cards[0]
        # what the parent's thread had not told when its image was replaced
        assert 510 - 64 <= card.launches <= 510
        assert 30 < gpu_ms(region) < 45


THREADS = """
from driver_client import *
import os, threading
mine = start()
kernel = function("spin_1us")
def work():
    ok(cu.cuCtxSetCurrent(mine))
    for _ in range(1000):
        ok(launch(kernel))
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
work()
ok(cu.cuCtxSynchronize())
if os.fork() == 0:
    raise SystemExit  # has its parent's thread in memory, and launched nothing
os.wait()
"""


def test_threads_and_processes_that_end_have_told_of_all_their_launches(tmp_path: Path) -> None:
    with make_region(tmp_path, cores=0) as region:
        python(THREADS, within(tmp_path, region))
        assert region.usage().cards[0].launches == 4000


FORKED = """
from driver_client import *
import os
children = []
for _ in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        start()
        kernel = function("spin_2ms")
        for _ in range(100):
            ok(launch(kernel))
        ok(cu.cuCtxSynchronize())
        raise SystemExit
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_children_that_are_forked_before_the_driver_is_used_share_their_parents_limit(tmp_path: Path) -> None:
    with make_region(tmp_path, cores=50) as region:
        assert python(FORKED, within(tmp_path, region)) == ["[0, 0]"]
        card = region.usage().cards[0]
        assert card.launches == 200
        assert card.gpu_ns > 350e6
        # 400 ms of work at 50 %, less the burst: the two wait for about 350 ms side by side
        assert card.throttled_ns > 300e6


def test_tiny_kernels_cost_what_they_take(tmp_path: Path) -> None:
    script = """
from driver_client import *
start()
kernel = function("spin_10ns")
for _ in range(4000):
    ok(launch(kernel))
"""
    with make_region(tmp_path, cores=0) as region:
        python(script, within(tmp_path, region))
        card = region.usage().cards[0]
        assert card.launches > 3900
        assert card.gpu_ns / card.launches < 8000  # a pair of events around one contains the host's calls


FLOOD = """
from driver_client import *
def load(name):
    text = f".version 7.0\\n.visible .entry {{name}}() {{{{ ret; }}}}\\n"
    module, kernel = c_void_p(), c_void_p()
    ok(cu.{load}(byref(module), c_char_p(text.encode()){more}))
    ok(cu.{get}(byref(kernel), module, c_char_p(name.encode())))
    return module, kernel
start()
module, kernel = load("spin_10us")
for _ in range(200):
    ok(launch(kernel))
ok(cu.cuCtxSynchronize())
before = kernel.value
ok(cu.{unload}(module))
for _ in range(200):  # until the driver takes the memory again
    module, kernel = load("spin_20ms")
    if kernel.value == before:
        break
for _ in range(20):
    ok(launch(kernel))
print(kernel.value == before)
"""
MODULE = {"load": "cuModuleLoadData", "more": "", "get": "cuModuleGetFunction", "unload": "cuModuleUnload"}
LIBRARY = {
    "load": "cuLibraryLoadData",
    "more": ", None, None, 0, None, None, 0",
    "get": "cuLibraryGetKernel",
    "unload": "cuLibraryUnload",
}


@pytest.mark.parametrize("names", [MODULE, LIBRARY], ids=["module", "library"])
def test_a_handle_that_comes_back_for_another_kernel_is_learned_anew(tmp_path: Path, names: dict[str, str]) -> None:
    with make_region(tmp_path, cores=50) as region:
        if python(FLOOD.format(**names), within(tmp_path, region)) != ["True"]:
            pytest.skip("the driver did not give the same handle again")
        # 400 ms of work at 50 %, less the burst; as kernels of 10 us they would not have waited at all
        assert region.usage().cards[0].throttled_ns > 300e6


ALIASES = """
from driver_client import *
start()
text = b".version 7.0\\n.visible .entry spin_2ms() { ret; }\\n"
library, kernel, found = c_void_p(), c_void_p(), c_void_p()
ok(cu.cuLibraryLoadData(byref(library), c_char_p(text), None, None, 0, None, None, 0))
ok(cu.cuLibraryGetKernel(byref(kernel), library, b"spin_2ms"))
ok(cu.cuKernelGetFunction(byref(found), kernel))
assert kernel.value != found.value
for turn in range(200):
    ok(launch([kernel, found][turn % 2]))
ok(cu.cuCtxSynchronize())
"""


def test_a_kernel_of_a_library_is_paced_by_either_handle(tmp_path: Path) -> None:
    with make_region(tmp_path, cores=50) as region:
        python(ALIASES, within(tmp_path, region))
        card = region.usage().cards[0]
        assert card.launches == 200
        assert 380e6 < card.gpu_ns < 420e6
        assert card.throttled_ns > 300e6  # 400 ms of work at 50 %, less the burst


PARTITIONED = {"VGPU_SIM_MPS": "1", "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1"}


@pytest.mark.parametrize(
    ("percentage", "variables", "paced"),
    [
        ("30", PARTITIONED, False),
        ("60", PARTITIONED, True),  # more than the share
        ("30", {}, True),  # there is no MPS that obeys it
        ("30", {"VGPU_SIM_MPS": "1"}, True),  # the device hides what the whole is
    ],
    ids=["within", "above", "no daemon", "hidden"],
)
def test_a_client_that_mps_keeps_within_its_share_is_not_paced(
    tmp_path: Path, percentage: str, variables: dict[str, str], paced: bool
) -> None:
    script = """
from driver_client import *
start()
kernel = function("spin_2ms")
for _ in range(100):
    ok(launch(kernel))
"""
    env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage, **variables}
    with make_region(tmp_path, cores=30) as region:
        python(script, within(tmp_path, region, **env))
        card = region.usage().cards[0]
        assert card.launches == 100
        assert (card.throttled_ns > 0) == paced
