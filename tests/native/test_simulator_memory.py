"""Memory of simulated cards: what each family costs, contents, limits between processes, and death."""

import os
import signal
from pathlib import Path

import pytest
from simulated import MIB, Machine, eventually, heard, tell

CLIENT = "from simulator_client import *\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x2")


def test_contexts_and_modules_cost_memory(machine: Machine) -> None:
    steps = machine.run(
        CLIENT
        + """
primary = context()
steps = [free()]
ok(cu.cuModuleUnload(ok(cu.cuModuleLoadData((PTX + ".entry k() {}").encode()))))
steps.append(free())
module = ok(cu.cuModuleLoadData((PTX + ".entry k() {}").encode()))
steps.append(free())
second = ok(cu.cuCtxCreate(None, 0, 0))
steps.append(free())
ok(cu.cuCtxDestroy(second))
steps.append(free())
report(steps)
"""
    )
    card = machine.card()
    first = card.memory - card.context_bytes
    with_module = first - card.module_bytes
    assert steps == [first, first, with_module, with_module - card.context_bytes, with_module]
    assert card.context_bytes == 105 * MIB


FAMILIES = {
    "alloc": ("p = ok(cu.cuMemAlloc(5_000_001))", "ok(cu.cuMemFree(p))", 5_000_001),
    "pitch": ("p = ok(cu.cuMemAllocPitch(1000, 300, 4))[0]", "ok(cu.cuMemFree(p))", 1024 * 300),
    "managed": ("p = ok(cu.cuMemAllocManaged(3 * MIB + 5, 1))", "ok(cu.cuMemFree(p))", 3 * MIB + 5),
    "array": ("p = ok(cu.cuArrayCreate(plain(1000, 30, 4)))", "ok(cu.cuArrayDestroy(p))", 1000 * 30 * 16),
    "array 1D": ("p = ok(cu.cuArrayCreate(plain(1000, 0, 1)))", "ok(cu.cuArrayDestroy(p))", 4000),
    "array 3D": ("p = ok(cu.cuArray3DCreate(cube(100, 30, 7)))", "ok(cu.cuArrayDestroy(p))", 100 * 30 * 7 * 8),
    "mipmap": (
        "p = ok(cu.cuMipmappedArrayCreate(cube(64, 32, 0), 3))",
        "ok(cu.cuMipmappedArrayDestroy(p))",
        (64 * 32 + 32 * 16 + 16 * 8) * 8,
    ),
    "physical": ("p = ok(cu.cuMemCreate(6 * MIB, place(), 0))", "ok(cu.cuMemRelease(p))", 6 * MIB),
    "physical of the host": ("p = ok(cu.cuMemCreate(6 * MIB, place(host=True), 0))", "ok(cu.cuMemRelease(p))", 0),
    "async": (
        "p = ok(cu.cuMemAllocAsync(33 * MIB, 0))",
        "ok(cu.cuMemFreeAsync(p, 0)); ok(cu.cuStreamSynchronize(0))",
        64 * MIB,
    ),
    "async freed plainly": (
        "p = ok(cu.cuMemAllocAsync(1, 0))",
        "ok(cu.cuMemFree(p)); ok(cu.cuCtxSynchronize())",
        32 * MIB,
    ),
    "pool": (
        "pool = ok(cu.cuMemPoolCreate(pool_properties())); p = ok(cu.cuMemAllocFromPoolAsync(100, pool, 0))",
        "ok(cu.cuMemPoolDestroy(pool)); ok(cu.cuMemFreeAsync(p, 0)); ok(cu.cuStreamSynchronize(0))",
        32 * MIB,
    ),
    "host": ("p = ok(cu.cuMemHostAlloc(MIB, 0))", "ok(cu.cuMemFreeHost(p))", 0),
}
BUILDERS = """
def plain(width, height, channels):
    d = cu.CUDA_ARRAY_DESCRIPTOR()
    d.Width, d.Height, d.NumChannels, d.Format = width, height, channels, cu.CUarray_format.CU_AD_FORMAT_FLOAT
    return d
def cube(width, height, depth):
    d = cu.CUDA_ARRAY3D_DESCRIPTOR()
    d.Width, d.Height, d.Depth, d.NumChannels, d.Format = width, height, depth, 2, cu.CUarray_format.CU_AD_FORMAT_FLOAT
    return d
def place(host=False, device=0):
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind = cu.CUmemLocationType
    p.location.type = kind.CU_MEM_LOCATION_TYPE_HOST_NUMA if host else kind.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = device
    return p
def pool_properties():
    p = cu.CUmemPoolProps()
    p.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    return p
def access(device=0):
    a = cu.CUmemAccessDesc()
    a.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.location.id = device
    a.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return a
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_costs_its_bytes_and_gives_them_back(machine: Machine, family: str) -> None:
    make, drop, cost = FAMILIES[family]
    before, held, after = machine.run(
        f"{CLIENT}{BUILDERS}\ncontext()\nbefore = free()\n{make}\nheld = free()\n{drop}\nreport([before, held, free()])"
    )
    assert (before - held, after) == (cost, before)


def test_the_last_byte_is_given_and_not_one_more(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
rest = free()
codes = [code(cu.cuMemAlloc(rest + 1))]
p = ok(cu.cuMemAlloc(rest))
codes += [code(cu.cuMemAlloc(1)), free()]
ok(cu.cuMemFree(p))
codes += [code(cu.cuMemAlloc(2**63)), code(cu.cuMemAllocPitch(2**40, 2**40, 4)),
    code(cu.cuMemAllocAsync(2**62, 0)), free() == rest]
report(codes)
"""
    )
    assert found == [2, 2, 0, 2, 2, 2, True]


def test_a_pool_gives_its_free_memory_up_before_an_allocation_is_refused(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
pool = ok(cu.cuDeviceGetDefaultMemPool(0))
A = cu.CUmemPool_attribute
ok(cu.cuMemPoolSetAttribute(pool, A.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(2**40)))
rest = free()
p = ok(cu.cuMemAllocAsync(256 * MIB, 0))
ask = lambda a: int(ok(cu.cuMemPoolGetAttribute(pool, a)))
steps = [[ask(A.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), ask(A.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)]]
ok(cu.cuMemFreeAsync(p, 0))
ok(cu.cuCtxSynchronize())
steps.append([ask(A.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), ask(A.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)])
ok(cu.cuMemPoolSetAttribute(pool, A.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(0)))
ok(cu.cuMemAllocAsync(1, 0))
report([steps, code(cu.cuMemAlloc(rest - 32 * MIB)), code(cu.cuMemAlloc(1))])
"""
    )
    kept = [256 * MIB, 0]
    assert found == [[[256 * MIB, 256 * MIB], kept], 0, 2]


def test_contents_survive_every_copy(machine: Machine) -> None:
    found = machine.run(
        f"{CLIENT}{BUILDERS}"
        + """
import numpy as np
context()
rng = np.random.default_rng(7)
data = rng.integers(0, 256, 3 * MIB + 17, np.uint8)
a, b = ok(cu.cuMemAlloc(data.nbytes)), ok(cu.cuMemAlloc(data.nbytes))
back = np.zeros_like(data)
ok(cu.cuMemcpyHtoD(a, data.ctypes.data, data.nbytes))
ok(cu.cuMemcpyDtoD(b, a, data.nbytes))
ok(cu.cuMemcpyDtoH(back.ctypes.data, b, data.nbytes))
same = [bool((back == data).all())]
ok(cu.cuMemsetD32(int(a) + 4, 0x01020304, 10))
ok(cu.cuMemcpyDtoHAsync(back.ctypes.data, a, 48, 0))
same.append(back[:48].tolist() == data[:4].tolist() + [4, 3, 2, 1] * 10 + data[44:48].tolist())
ok(cu.cuMemsetD2D8(a, 100, 9, 10, 3))
ok(cu.cuMemcpyDtoH(back.ctypes.data, a, 300))
nines = [x for row in (0, 100, 200) for x in range(row, row + 10)]
same.append(set(nines) <= set(np.flatnonzero(back[:300] == 9).tolist()))
m = ok(cu.cuMemAllocManaged(64, 1))
import ctypes
ctypes.memset(int(m), 5, 64)
ok(cu.cuMemcpy(b, m, 64))
ok(cu.cuMemcpyDtoH(back.ctypes.data, b, 64))
same.append(bool((back[:64] == 5).all()))
array = ok(cu.cuArrayCreate(plain(8, 4, 1)))
copy = cu.CUDA_MEMCPY2D()
T = cu.CUmemorytype
copy.srcMemoryType, copy.srcHost, copy.srcPitch = T.CU_MEMORYTYPE_HOST, data.ctypes.data, 64
copy.dstMemoryType, copy.dstArray = T.CU_MEMORYTYPE_ARRAY, array
copy.WidthInBytes, copy.Height = 32, 4
ok(cu.cuMemcpy2D(copy))
ok(cu.cuMemcpyAtoH(back.ctypes.data, array, 0, 32))
same.append(bool((back[:32] == data[:32]).all()))
report([same, code(cu.cuMemcpyHtoD(int(a) + data.nbytes - 4, data.ctypes.data, 5)),
    code(cu.cuMemcpyHtoD(data.ctypes.data, data.ctypes.data, 1)),
        code(cu.cuMemcpyDtoH(data.ctypes.data, 0, 4))])
"""
    )
    assert found == [[True] * 5, 1, 1, 1]


def test_physical_memory_keeps_its_bytes_wherever_it_is_mapped(machine: Machine) -> None:
    found = machine.run(
        f"{CLIENT}{BUILDERS}"
        + """
import numpy as np
context()
rest = free()
minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
granularity = ok(cu.cuMemGetAllocationGranularity(place(), minimum))
size = 2 * granularity
handle = ok(cu.cuMemCreate(size, place(), 0))
other = ok(cu.cuMemCreate(granularity, place(host=True), 0))
va = ok(cu.cuMemAddressReserve(4 * granularity, 0, 0, 0))
codes = [code(cu.cuMemMap(va, size, 0, handle, 0)),
    code(cu.cuMemMap(int(va) + granularity, granularity, 0, other, 0)),
         code(cu.cuMemMap(int(va) + size, granularity, 0, other, 0))]
data = np.arange(size + granularity, dtype=np.uint32).view(np.uint8)[: size + granularity].copy()
back = np.zeros_like(data)
codes.append(code(cu.cuMemcpyHtoD(va, data.ctypes.data, data.nbytes)))
ok(cu.cuMemSetAccess(va, size + granularity, [access()], 1))
ok(cu.cuMemcpyHtoD(va, data.ctypes.data, data.nbytes))
ok(cu.cuMemRelease(handle))
held = rest - free()
second = ok(cu.cuMemRetainAllocationHandle(int(va) + 5))
ok(cu.cuMemUnmap(va, size))
moved = ok(cu.cuMemAddressReserve(size, 0, 0, 0))
ok(cu.cuMemMap(moved, size, 0, second, 0))
ok(cu.cuMemSetAccess(moved, size, [access()], 1))
ok(cu.cuMemcpyDtoH(back.ctypes.data, moved, size))
codes += [code(cu.cuMemAddressFree(va, 4 * granularity)), code(cu.cuMemUnmap(int(va) + size, 1))]
ok(cu.cuMemUnmap(int(va) + size, granularity))
codes.append(code(cu.cuMemAddressFree(va, 4 * granularity)))
ok(cu.cuMemUnmap(moved, size))
still = rest - free()
ok(cu.cuMemRelease(second))
report([granularity, codes, held == size, bool((back[:size] == data[:size]).all()), still == size, rest == free(),
    code(cu.cuMemRelease(second)),
        code(cu.cuMemCreate(granularity - 1, place(), 0))])
"""
    )
    assert found == [2 * MIB, [0, 1, 0, 1, 1, 1, 0], True, True, True, True, 1, 1]


def test_device_memory_that_nobody_wrote_costs_no_host_memory(machine: Machine) -> None:
    grown = machine.run(
        CLIENT
        + """
context()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
p = ok(cu.cuMemAlloc(12 * 1024 * MIB))
ok(cu.cuMemsetD8(int(p) + 11 * 1024 * MIB, 1, 100))
report(resident() - before)
"""
    )
    assert grown < 8 * MIB


def test_a_copy_of_what_nobody_wrote_costs_no_host_memory(machine: Machine) -> None:
    grown, *found = machine.run(
        CLIENT
        + """
from simulator_blocks import mapped
context()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
p, q = mapped(64 * MIB), mapped(64 * MIB, 0)
before = resident()
ok(cu.cuMemcpyDtoD(q, p, 64 * MIB))
grown = resident() - before
def byte(at):
    found = bytearray(1)
    ok(cu.cuMemcpyDtoH(found, at, 1))
    return found[0]
ok(cu.cuMemsetD8(p + 63 * MIB, 7, 1))
ok(cu.cuMemcpyDtoD(q, p, 64 * MIB))
written = byte(q + 63 * MIB)
ok(cu.cuMemcpyDtoD(p, mapped(64 * MIB), 64 * MIB))
report([grown, written, byte(p + 63 * MIB), code(cu.cuMemcpyDtoD(mapped(2 * MIB), q, 4 * MIB))])
"""
    )
    assert grown < 8 * MIB
    assert found == [7, 0, 1]


def test_pointers_tell_what_they_are(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
ok(cu.cuInit(0))
ctx = ok(cu.cuCtxCreate(None, 0, 1))
A = cu.CUpointer_attribute
p, m, h = ok(cu.cuMemAlloc(1000)), ok(cu.cuMemAllocManaged(1000, 1)), ok(cu.cuMemHostAlloc(1000, 0))
def ask(attribute, address):
    error, value = cu.cuPointerGetAttribute(attribute, address)
    return int(value) if not error else error.name
both = [[ask(A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, x), ask(A.CU_POINTER_ATTRIBUTE_IS_MANAGED, x),
    ask(A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, x)]
        for x in (int(p) + 999, int(m), int(h))]
base, size = ok(cu.cuMemGetAddressRange(int(p) + 10))
report([both, int(base) == int(p), size, ask(A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, int(p) + 1000),
    code(cu.cuMemGetAddressRange(4096)),
        code(cu.cuMemFree(int(p) + 1)), code(cu.cuMemFree(p)), code(cu.cuMemFree(p))])
"""
    )
    kinds = [[2, 0, 1], [2, 1, 1], [1, 0, 1]]
    assert found == [kinds, True, 1000, "CUDA_ERROR_INVALID_VALUE", 500, 1, 0, 1]


def test_a_destroyed_context_takes_its_memory_with_it(machine: Machine) -> None:
    machine.run(
        CLIENT
        + """
ok(cu.cuInit(0))
for i in range(3):
    ctx = ok(cu.cuCtxCreate(None, 0, 0))
    ok(cu.cuMemAlloc(MIB)), ok(cu.cuMemAllocManaged(MIB, 1)), ok(cu.cuMemHostAlloc(MIB, 0)), kernel("k")
    ok(cu.cuCtxDestroy(ctx))
ok(cu.cuCtxCreate(None, 0, 0))
report(free())
"""
    )
    card = machine.card()
    assert card.peak == card.context_bytes + 2 * MIB + card.module_bytes
    assert card.used == card.processes == 0


HOLD = (
    CLIENT
    + "context(int(os.environ.get('DEVICE', '0')))\nok(cu.cuMemAlloc(int(os.environ['SIZE'])))\nreport(free())\nwait()"
)


def test_processes_share_a_card_and_see_each_other(machine: Machine) -> None:
    sizes = [100 * MIB, 200 * MIB + 1, 7]
    holders = [machine.start(HOLD, SIZE=str(size)) for size in sizes]
    elsewhere = machine.start(HOLD, SIZE="5", DEVICE="1")
    for holder in (*holders, elsewhere):
        heard(holder)
    card = machine.card()
    assert card.used == sum(sizes) + 3 * card.context_bytes
    assert card.processes == 3
    assert machine.card(1).used == card.context_bytes + 5
    seen = machine.run(CLIENT + "context(); report(free())")
    assert seen == card.memory - card.used - card.context_bytes
    mine = machine.process(holders[1].pid)
    assert mine.alive
    assert mine.used == (sizes[1] + card.context_bytes, 0)
    for holder in (*holders, elsewhere):
        tell(holder)
        assert holder.wait(10) == 0
    assert machine.card().used == machine.card(1).used == 0


def test_killed_memory_is_free_at_once_for_those_who_need_it(machine: Machine) -> None:
    holder = machine.start(HOLD, SIZE=str(14000 * MIB))
    heard(holder)
    other = machine.start(
        CLIENT + "context(); report(code(cu.cuMemAlloc(10000 * MIB))); wait(); report(code(cu.cuMemAlloc(10000 * MIB)))"
    )
    assert heard(other) == 2
    holder.kill()
    holder.wait()
    tell(other)
    assert heard(other) == 0
    other.wait()
    gone = machine.process(holder.pid)
    assert not gone.alive
    assert gone.used == (0, 0)
    assert gone.peak[0] > 14000 * MIB
    assert machine.card().peak <= machine.card().memory


def test_memory_stays_while_a_forked_child_lives(machine: Machine) -> None:
    parent = machine.start(
        CLIENT
        + """
context()
ok(cu.cuMemAlloc(50 * MIB))
child = os.fork()
if child:
    report(child)
time.sleep(600)
"""
    )
    child = heard(parent)
    parent.kill()
    parent.wait()
    assert machine.card().used == machine.card().context_bytes + 50 * MIB
    os.kill(child, signal.SIGKILL)
    eventually("the memory of the killed family", lambda: machine.card().used == 0)


def test_memory_stays_as_long_as_an_inherited_descriptor(machine: Machine) -> None:
    read = "sys.stdin.readline()"
    program = f"import os, sys; print(1, flush=True); {read}; os.closerange(3, 99); print(2, flush=True); {read}"
    execute = f"os.execv(sys.executable, ['python', '-c', {program!r}])"
    process = machine.start(CLIENT + f"import sys; context(); report(1); {execute}", VGPU_SIM_FILES="inherited")
    heard(process)
    heard(process)
    assert machine.card().used > 0
    tell(process)
    heard(process)
    assert machine.card().used == 0
    process.kill()
    process.wait()


def test_memory_goes_when_the_program_is_replaced(machine: Machine) -> None:
    process = machine.start(CLIENT + "context(); report(1); wait(); os.execvp('sleep', ['sleep', '600'])")
    heard(process)
    assert machine.card().used > 0
    tell(process)
    eventually("the end of the memory by exec", lambda: machine.card().used == 0)
    assert process.poll() is None
    process.kill()
    process.wait()


def test_many_processes_never_hold_more_than_the_card(machine: Machine) -> None:
    greedy = (
        CLIENT
        + """
import random
context()
report(0)
wait()
chance, live, refused = random.Random(int(os.environ["SEED"])), [], 0
for _ in range(4000):
    if live and chance.random() < 0.4:
        ok(cu.cuMemFree(live.pop(chance.randrange(len(live)))))
        continue
    error, p = cu.cuMemAlloc(chance.randrange(1, 1500 * MIB))
    refused += error.value == 2
    if not error:
        live.append(p)
report(refused)
"""
    )
    workers = [machine.start(greedy, SEED=str(i)) for i in range(4)]
    victim = machine.start(greedy.replace("range(4000)", "range(10**9)"), SEED="9")
    for process in (*workers, victim):
        heard(process)
    for process in (*workers, victim):
        tell(process)
    eventually("memory of the victim", lambda: machine.process(victim.pid).used[0] > 1000 * MIB)
    victim.kill()
    refusals = [heard(worker) for worker in workers]
    for worker in workers:
        worker.wait()
    victim.wait()
    card = machine.card()
    assert min(refusals) > 0
    assert card.memory * 0.9 < card.peak <= card.memory
    assert card.used == 0


def test_more_processes_than_are_remembered(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cards")
    found = machine.run(
        """
import ctypes, os, sys, json
pids = []
for i in range(300):
    pid = os.fork()
    if not pid:
        lib = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        os._exit(lib.cuInit(0) or lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    pids.append(os.waitpid(pid, 0)[1])
print(json.dumps(sorted(set(pids))))
"""
    )
    assert found == [0]
    assert machine.card().used == 0
    assert len(list((tmp_path / "cards").glob("nvidia-simulated.*"))) <= 128
