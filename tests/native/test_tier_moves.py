"""Blocks move between card and host memory under programs that use them: contents, charges, and what the card saw."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preloaded import MIB, compiled, environment, python, run

from vgpu.native import CardLimit, Limits, Region, simulator

GUARANTEE = 96 * MIB
LIMIT = 256 * MIB


def client() -> Path:
    return compiled("tier_moves.c", driver=True)


@contextmanager
def container(folder: Path, *, movable: bool = True) -> Iterator[Region]:
    """A region whose programs may allocate LIMIT, of which GUARANTEE is on the card."""
    simulator.create(folder / "cards", "T4")
    uuid = simulator.cards(folder / "cards")[0].uuid
    (folder / "region").mkdir()
    card = CardLimit(uuid, LIMIT, GUARANTEE)
    limits = Limits((card,), host_memory=LIMIT, oversubscribe=True, movable=movable)
    with Region.create(folder / "region", limits) as region:
        yield region


def start(folder: Path, *arguments: int, log: str = "4") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [client(), *map(str, arguments)],
        env=environment(folder, VGPU_DIR=str(folder / "region"), LIBCUDA_LOG_LEVEL=log),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("a"),
        text=True,
    )


def overhead(folder: Path, processes: int) -> int:
    """Bytes of contexts and modules, which the limits of these tests do not know."""
    card = simulator.cards(folder / "cards")[0]
    return processes * (card.context_bytes + card.module_bytes)


def assert_charges_are_the_truth(folder: Path, region: Region, processes: int) -> None:
    """Checks charges after blocks have come to rest; a holder of a loan that was taken back gives way itself."""
    deadline = time.monotonic() + 10
    while True:
        card, truth = region.usage().cards[0], simulator.cards(folder / "cards")[0]
        charged, held = (card.resident, card.host_used), (truth.used - overhead(folder, processes), truth.host)
        if charged == held or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert charged == held
    assert card.used <= LIMIT
    assert not any(sum(process.faults) for process in simulator.processes(folder / "cards"))


def moves(folder: Path) -> tuple[int, int]:
    """How many blocks went to the card, and from it."""
    log = (folder / "log").read_text()
    return len(re.findall("moved .* to card", log)), len(re.findall("moved .* from card", log))


def end(program: subprocess.Popen[str]) -> None:
    """Ends a client's input; the client checks everything that it holds, and ends."""
    said, _ = program.communicate(timeout=30)
    assert program.returncode == 0, said


@pytest.mark.parametrize(("seed", "threads"), [(0, 1), (3, 1), (0, 4)])
def test_contents_survive_moves_up_and_down(tmp_path: Path, seed: int, threads: int) -> None:
    """Loans change all the time, so that blocks must go down and may come up again.

    The seed chooses the kind of the first thread's stream; 3: a stream for which nothing else waits.
    """
    with container(tmp_path) as region:
        program = start(tmp_path, seed, threads, 0, 48 // threads)
        begin, turn = time.monotonic(), 0
        while program.poll() is None and time.monotonic() < begin + 30:
            turn += 1
            region.lend(0, turn % 2 * GUARANTEE)
            time.sleep(0.02)
            if time.monotonic() > begin + 1.5 and min(moves(tmp_path)) > 10:
                break
        end(program)
        assert min(moves(tmp_path)) > 10


def said_done(program: subprocess.Popen[str]) -> list[str]:
    """Waits for a client's line, after all its work, with its blocks left; returns operations and refusals."""
    assert program.stdout
    words = program.stdout.readline().split()
    assert words[:1] == ["done"], words
    return words[1:]


def test_charges_are_the_truth_in_four_processes(tmp_path: Path) -> None:
    with container(tmp_path) as region:
        programs = [start(tmp_path, seed, 2, 4000, 12, log="0") for seed in range(4)]
        for _ in range(20):
            region.lend(0, GUARANTEE)
            time.sleep(0.02)
            region.lend(0, 0)
            time.sleep(0.02)
        assert all(int(said_done(program)[0]) >= 4000 for program in programs)
        assert_charges_are_the_truth(tmp_path, region, 4)
        programs[0].kill()
        programs[0].wait()
        region.reap()
        assert_charges_are_the_truth(tmp_path, region, 3)
        for program in programs[1:]:
            end(program)
        region.reap()
        assert_charges_are_the_truth(tmp_path, region, 0)


def test_processes_may_be_killed_amid_moves(tmp_path: Path) -> None:
    with container(tmp_path) as region:
        programs: dict[int, subprocess.Popen[str]] = {}
        deadline, seed = time.monotonic() + 3, 0
        while time.monotonic() < deadline:
            place = seed % 4
            if place in programs:
                assert programs[place].poll() is None, programs[place].communicate()[0]
                programs[place].kill()
                programs[place].wait()
            programs[place] = start(tmp_path, seed, 2, 0, 16, log="0")
            region.lend(0, seed % 3 * GUARANTEE // 2)
            seed += 1
            time.sleep(0.1)
        for program in programs.values():
            end(program)
        region.reap()
        assert_charges_are_the_truth(tmp_path, region, 0)
        assert region.usage().saturated == 0


def test_static_blocks_come_up_when_there_is_room_and_stay(tmp_path: Path) -> None:
    with container(tmp_path, movable=False) as region:
        program = start(tmp_path, 3, 1, 20000, 40)
        said_done(program)
        assert_charges_are_the_truth(tmp_path, region, 1)
        end(program)
        up, down = moves(tmp_path)
        assert up > 0
        assert down == 0


@pytest.mark.parametrize("entry", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyDtoD_v2"])
def test_a_move_that_fails_leaves_everything_as_it_was(tmp_path: Path, entry: str) -> None:
    """For each driver call that fails during moves: contents and charges are right, and moves go on."""
    with container(tmp_path) as region:
        program = start(tmp_path, 11, 2, 0, 20)
        begin, turn = time.monotonic(), 0
        while program.poll() is None and time.monotonic() < begin + 30:
            turn += 1
            region.lend(0, turn % 2 * GUARANTEE)
            simulator.inject_error(tmp_path / "cards", entry, 2, 2)
            time.sleep(0.05)
            if turn > 20 and min(moves(tmp_path)) > 0:
                break
        simulator.clear_errors(tmp_path / "cards")
        end(program)
        assert min(moves(tmp_path)) > 0
        region.reap()
        assert_charges_are_the_truth(tmp_path, region, 0)


WAITING = """
from ctypes import addressof
from pathlib import Path
import os, threading, time
from driver_client import *
from vgpu.native import Region

LEGACY, OWN = 1, 2
start()
region = Region.open(Path(os.environ["VGPU_DIR"]), writable=True)
region.lend(0, {guarantee})
image = b".version 8.0\\n.target sm_75\\n.address_size 64\\n.visible .entry touch_fill_400ms(" \\
    b".param .u64 to, .param .u64 words, .param .u64 value) {{ ret; }}\\n"
module, kernel, event = c_void_p(), c_void_p(), c_void_p()
ok(cu.cuModuleLoadData(byref(module), c_char_p(image)))
ok(cu.cuModuleGetFunction(byref(kernel), module, c_char_p(b"touch_fill_400ms")))
ok(cu.cuEventCreate(byref(event), 2))
blocks = [alloc(8 << 20)[1] for _ in range(20)]
small = alloc(4096)[1]

def stream(flags):
    made = c_void_p()
    ok(cu.cuStreamCreate(byref(made), flags))
    return made.value

def run(where):
    values = (c_uint64 * 3)(blocks[-1], 8, 1)
    parameters = (c_void_p * 3)(*(addressof(values) + 8 * i for i in range(3)))
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, c_void_p(where), parameters, None))
    ok(cu.cuEventRecord(event, c_void_p(where)))

def host():
    return region.usage().cards[0].host_used

other = stream(1)
assert host() == 0
{before}
region.lend(0, 0)
busy_seen, deadline = 0, time.monotonic() + 20
while time.monotonic() < deadline:
    for _ in range(40):
        ok(cu.cuMemsetD8Async(c_uint64(small), 0, c_size_t(8), c_void_p(other)))
    held = host()
    if cu.cuEventQuery(event) == 600:  # CUDA_ERROR_NOT_READY
        assert held == 0, "moved while a kernel ran"
        busy_seen += 1
        continue
    {after}
    if held:
        break
print(busy_seen > 0, held > 0)
"""


#: the thread has waited in both of them before, and waits in the other one after
TWO_CONTEXTS = """
first = c_void_p()
ok(cu.cuCtxGetCurrent(byref(first)))
second = context()
for one in (first, second):
    ok(cu.cuCtxSetCurrent(one))
    ok(cu.cuMemsetD8Async(c_uint64(small), 0, c_size_t(8), c_void_p(OWN)))
    ok(cu.cuStreamSynchronize(c_void_p(OWN)))
ok(cu.cuCtxSetCurrent(first))
run(OWN)
ok(cu.cuCtxSetCurrent(second))
ok(cu.cuStreamSynchronize(c_void_p(OWN)))
ok(cu.cuCtxSetCurrent(first))
"""


@pytest.mark.parametrize(
    "before",
    [
        "run(stream(0))",
        "run(stream(1))",
        "run(0)",
        "run(OWN)",
        "gone = stream(1); run(gone); ok(cu.cuStreamDestroy_v2(c_void_p(gone)))",
        TWO_CONTEXTS,
    ],
    ids=["created", "non-blocking", "legacy", "own", "destroyed", "own of one of two contexts"],
)
def test_nothing_moves_while_a_kernel_runs(tmp_path: Path, before: str) -> None:
    """Under pressure, and in any stream; when the kernel has ended, blocks go down."""
    script = WAITING.format(guarantee=GUARANTEE, before=before, after="pass")
    with container(tmp_path):
        assert python(script, environment(tmp_path, VGPU_DIR=str(tmp_path / "region"))) == ["True True"]


def test_work_in_a_thread_s_own_stream_has_ended_before_blocks_move(tmp_path: Path) -> None:
    """No other thread can ask for it; an event behind all work of its context (cuCtxRecordEvent, CUDA 12.5) tells."""
    before = """
done = threading.Event()
def work():
    ok(cu.cuCtxSetCurrent(mine))
    run(OWN)
    started.set()
    done.wait()
    ok(cu.cuStreamSynchronize(c_void_p(OWN)))
mine, started = c_void_p(), threading.Event()
ok(cu.cuCtxGetCurrent(byref(mine)))
thread = threading.Thread(target=work, daemon=True)
thread.start()
started.wait()
"""
    script = WAITING.format(guarantee=GUARANTEE, before=before, after="pass")
    with container(tmp_path):
        env = environment(tmp_path, VGPU_DIR=str(tmp_path / "region"))
        assert python(script, env) == ["True True"]


def test_a_program_that_never_waits_gives_way_all_the_same(tmp_path: Path) -> None:
    """Its queue is full all the time: launches wait until the card has nothing to do."""
    before = """
short = function("spin_100us")
def fill():
    for _ in range(100):
        ok(launch(short, other))
run = lambda where: ok(cu.cuEventRecord(event, c_void_p(where)))
run(other)
"""
    after = "fill()"
    with container(tmp_path) as region:
        script = WAITING.format(guarantee=GUARANTEE, before=before, after=after).replace("busy_seen > 0", "True")
        assert python(script, environment(tmp_path, VGPU_DIR=str(tmp_path / "region"))) == ["True True"]
        region.reap()
        assert_charges_are_the_truth(tmp_path, region, 0)


def test_a_program_that_makes_no_calls_gives_way(tmp_path: Path) -> None:
    script = """
import os, time
from pathlib import Path
from driver_client import *
from vgpu.native import Region
region = Region.open(Path(os.environ["VGPU_DIR"]), writable=True)
region.lend(0, 64 << 20)
start()
blocks = [alloc(8 << 20)[1] for _ in range(18)]
assert region.usage().cards[0].host_used == 0
region.lend(0, 0)
deadline = time.monotonic() + 20
while region.usage().cards[0].resident > 96 << 20 and time.monotonic() < deadline:
    time.sleep(0.01)
print(region.usage().cards[0].host_used >> 20)
"""
    with container(tmp_path) as region:
        assert int(python(script, environment(tmp_path, VGPU_DIR=str(tmp_path / "region")))[0]) >= 48
        region.reap()
        assert_charges_are_the_truth(tmp_path, region, 0)


def test_blocks_of_two_cards_move_each_on_its_own(tmp_path: Path) -> None:
    simulator.create(tmp_path / "cards", "T4x2")
    (tmp_path / "region").mkdir()
    cards = tuple(CardLimit(card.uuid, LIMIT, GUARANTEE) for card in simulator.cards(tmp_path / "cards"))
    script = """
import os, time
from pathlib import Path
from driver_client import *
from vgpu.native import Region
ok(cu.cuInit(0))
region = Region.open(Path(os.environ["VGPU_DIR"]), writable=True)
blocks = []
for card in range(2):
    context(card)
    region.lend(card, 64 << 20)
    blocks += [alloc(8 << 20)[1] for _ in range(20)]
    ok(cu.cuMemsetD8_v2(c_uint64(blocks[-1]), 7 + card, c_size_t(8)))
region.lend(1, 0)
deadline = time.monotonic() + 20
while region.usage().cards[1].host_used < 64 << 20 and time.monotonic() < deadline:
    ok(cu.cuCtxSynchronize())
found = (c_char * 8)()
for card in range(2):
    ok(cu.cuMemcpyDtoH_v2(found, c_uint64(blocks[20 * card + 19]), c_size_t(8)))
    print(found.raw[7], region.usage().cards[card].host_used >> 20)
"""
    limits = Limits(cards, host_memory=LIMIT, oversubscribe=True, movable=True)
    with Region.create(tmp_path / "region", limits):
        said = python(script, environment(tmp_path, cards="T4x2", VGPU_DIR=str(tmp_path / "region")))
    first, second = (tuple(map(int, line.split())) for line in said)
    assert first == (7, 8)  # what did not fit at once: the loan, less the headroom
    assert second[0] == 8
    assert second[1] >= 64


HOT = """
from ctypes import addressof
from driver_client import *

start()
image = b".version 8.0\\n.target sm_75\\n.address_size 64\\n.visible .entry touch_add_20us(" \\
    b".param .u64 to, .param .u64 words, .param .u64 value) { ret; }\\n"
module, kernel = c_void_p(), c_void_p()
ok(cu.cuModuleLoadData(byref(module), c_char_p(image)))
ok(cu.cuModuleGetFunction(byref(kernel), module, c_char_p(b"touch_add_20us")))
blocks = [alloc(8 << 20)[1] for _ in range(20)]

def add(block, buffer):
    values = (c_uint64 * 3)(block, 1, 1)
    size = c_size_t(24)
    parameters = (c_void_p * 3)(*(addressof(values) + 8 * i for i in range(3)))
    extra = (c_void_p * 5)(1, addressof(values), 2, addressof(size), 0)
    ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, *((None, extra) if buffer else (parameters, None))))

for turn in range(1500):
    add(blocks[-1 - turn % 4], turn % 3)
    ok(cu.cuCtxSynchronize())
for block in blocks[-4:]:
    print(hex(block))
"""


def test_blocks_that_kernels_use_come_up(tmp_path: Path) -> None:
    """The newest blocks have found no room on the card; the parameters of launches show which blocks are used."""
    with container(tmp_path):
        done = run(
            [sys.executable, "-c", HOT], environment(tmp_path, VGPU_DIR=str(tmp_path / "region"), LIBCUDA_LOG_LEVEL="4")
        )
    came = re.findall(r"moved \d+ bytes at (0x\w+) to card", done.stderr)
    assert set(done.stdout.split()) <= set(came)
    assert len(came) < 10
