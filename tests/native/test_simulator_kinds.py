"""What the driver says about every kind of memory, and memory of several cards: peers and multicast."""

from pathlib import Path

import pytest
from simulated import MIB, Machine
from test_simulator_memory import BUILDERS

CLIENT = "from simulator_client import *\n" + BUILDERS

POINTERS = (
    CLIENT
    + """
context()
A = cu.CUpointer_attribute
def ask(name, address):
    error, value = cu.cuPointerGetAttribute(getattr(A, "CU_POINTER_ATTRIBUTE_" + name), int(address))
    return int(value) if not error else error.value
"""
)
NAMES = "MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL", "RANGE_SIZE", "MAPPED", "IS_LEGACY_CUDA_IPC_CAPABLE"
KINDS = {
    "device": ("cu.cuMemAlloc(1000)", [2, 0, 0, 1000, 1, 1]),
    "managed": ("cu.cuMemAllocManaged(1000, 1)", [2, 1, 0, 1000, 1, 0]),
    "host": ("cu.cuMemHostAlloc(1000, 0)", [1, 0, 0, 1000, 1, 0]),
    "pool": ("cu.cuMemAllocAsync(1000, 0)", [2, 0, 0, 1000, 1, 0]),
}


def test_every_kind_of_memory_is_told_apart(tmp_path: Path) -> None:
    makers = {kind: maker for kind, (maker, _) in KINDS.items()}
    found = Machine(tmp_path / "cards").run(
        POINTERS
        + f"""
made = {{kind: ok(eval(maker)) for kind, maker in {makers!r}.items()}}
pool = ok(cu.cuDeviceGetDefaultMemPool(0))
report([{{kind: [ask(name, int(p) + 7) for name in {NAMES!r}] for kind, p in made.items()}},
    all(ask("RANGE_START_ADDR", int(p) + 7) == int(p) for p in made.values()),
    len({{ask("BUFFER_ID", p) for p in made.values()}}), ask("MEMPOOL_HANDLE", made["pool"]) == int(pool),
    ask("MEMPOOL_HANDLE", made["device"]), ask("HOST_POINTER", made["host"]) == int(made["host"]),
    ask("HOST_POINTER", made["device"]), ask("MEMORY_TYPE", 4096)])
"""
    )
    assert found == [{kind: told for kind, (_, told) in KINDS.items()}, True, 4, True, 0, True, 1, 1]


def test_a_reservation_is_not_yet_memory(tmp_path: Path) -> None:
    found = Machine(tmp_path / "cards").run(
        POINTERS
        + """
va = int(ok(cu.cuMemAddressReserve(8 * MIB, 0, 0, 0)))
properties = place()
properties.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
handle = ok(cu.cuMemCreate(4 * MIB, properties, 0))
ok(cu.cuMemMap(va + 2 * MIB, 4 * MIB, 0, handle, 0))
names = "MAPPED", "RANGE_SIZE", "MEMORY_TYPE", "ALLOWED_HANDLE_TYPES", "MAPPING_SIZE", "ACCESS_FLAGS", "CONTEXT"
before = [[ask(name, address) for name in names] for address in (va, va + 3 * MIB)]
ok(cu.cuMemSetAccess(va + 2 * MIB, 4 * MIB, [access()], 1))
base, size = ok(cu.cuMemGetAddressRange(va + 3 * MIB))
report([before, ask("ACCESS_FLAGS", va + 3 * MIB), ask("RANGE_START_ADDR", va + 3 * MIB) == va,
    ask("MAPPING_BASE_ADDR", va + 3 * MIB) == va + 2 * MIB, int(base) == va + 2 * MIB, size,
    code(cu.cuMemGetAddressRange(va))])
"""
    )
    nothing = [0, 8 * MIB, 1, 1, 1, 1, 1]  # error 1 for what only memory has
    assert found == [[nothing, [1, 8 * MIB, 2, 1, 4 * MIB, 0, 0]], 3, True, True, True, 4 * MIB, 500]


def test_attributes_that_are_set_and_lists_of_attributes(tmp_path: Path) -> None:
    found = Machine(tmp_path / "cards").run(
        POINTERS
        + """
import ctypes
lib = ctypes.CDLL("libcuda.so.1")
p = int(ok(cu.cuMemAlloc(100)))
m = int(ok(cu.cuMemAllocManaged(100, 1)))
on = ctypes.c_int(1)
codes = [lib.cuPointerSetAttribute(ctypes.byref(on), 6, ctypes.c_uint64(x)) for x in (p, m, 4096)]
def many(address):
    which = (ctypes.c_int * 4)(2, 8, 9, 12)
    cells = [ctypes.c_int64(0) for _ in which]
    data = (ctypes.c_void_p * 4)(*[ctypes.addressof(c) for c in cells])
    result = lib.cuPointerGetAttributes(4, which, data, ctypes.c_uint64(address))
    return [result, *[ctypes.c_int(c.value).value for c in cells]]
report([codes, ask("SYNC_MEMOPS", p), ask("SYNC_MEMOPS", m), many(p), many(m), many(4096)])
"""
    )
    assert found == [[0, 0, 1], 1, 1, [0, 2, 0, 0, 100], [0, 2, 1, 0, 100], [0, 0, 0, -2, 0]]


def test_pool_attributes_and_trim(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cards")
    found = machine.run(
        CLIENT
        + """
context()
A = cu.CUmemPool_attribute
properties = pool_properties()
properties.maxSize = 96 * MIB
pool = ok(cu.cuMemPoolCreate(properties))
ok(cu.cuMemPoolSetAttribute(pool, A.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(2**40)))
def ask(name):
    return int(ok(cu.cuMemPoolGetAttribute(pool, getattr(A, "CU_MEMPOOL_ATTR_" + name)))) // MIB
def state():
    return [ask(n) for n in ("RESERVED_MEM_CURRENT", "USED_MEM_CURRENT", "RESERVED_MEM_HIGH", "USED_MEM_HIGH")]
a, b = (ok(cu.cuMemAllocFromPoolAsync(size * MIB, pool, 0)) for size in (40, 20))
steps = [state()]
ok(cu.cuMemFreeAsync(a, 0))
ok(cu.cuStreamSynchronize(0))
steps.append(state())
ok(cu.cuMemPoolTrimTo(pool, 48 * MIB))
steps.append(state())
ok(cu.cuMemPoolTrimTo(pool, 0))
steps.append(state())
for name in ("RESERVED_MEM_HIGH", "USED_MEM_HIGH"):
    ok(cu.cuMemPoolSetAttribute(pool, getattr(A, "CU_MEMPOOL_ATTR_" + name), cu.cuuint64_t(0)))
steps.append(state())
report([steps, code(cu.cuMemAllocFromPoolAsync(80 * MIB, pool, 0)), code(cu.cuMemPoolSetAttribute(pool,
    A.CU_MEMPOOL_ATTR_USED_MEM_HIGH, cu.cuuint64_t(1)))])
"""
    )
    steps = [[64, 60, 64, 60], [64, 20, 64, 60], [48, 20, 64, 60], [32, 20, 64, 60], [32, 20, 32, 20]]
    assert found == [steps, 2, 1]


@pytest.mark.parametrize(
    ("shape", "levels", "count", "elements"),
    [
        ((64, 32, 0), 3, 3, 64 * 32 + 32 * 16 + 16 * 8),
        ((5, 3, 0), 9, 3, 5 * 3 + 2 * 1 + 1),
        ((7, 0, 0), 2, 2, 7 + 3),
        ((8, 8, 4), 99, 4, 8 * 8 * 4 + 4 * 4 * 2 + 2 * 2 * 1 + 1),
    ],
)
def test_mipmapped_arrays_cost_the_bytes_of_their_levels(
    tmp_path: Path, shape: tuple[int, int, int], levels: int, count: int, elements: int
) -> None:
    found = Machine(tmp_path / "cards").run(
        CLIENT
        + f"""
ok(cu.cuInit(0))
ctx = ok(cu.cuCtxCreate(None, 0, 0))
rest = free()
mipmap = ok(cu.cuMipmappedArrayCreate(cube(*{shape}), {levels}))
held = rest - free()
there = [code(cu.cuMipmappedArrayGetLevel(mipmap, i)) for i in range({count} + 1)]
asked = ok(cu.cuMipmappedArrayGetMemoryRequirements(mipmap, 0)).size
array = ok(cu.cuMipmappedArrayGetLevel(mipmap, {count} - 1))
data = np.arange(8, dtype=np.uint8) if (np := __import__("numpy")) else None
back = np.zeros_like(data)
ok(cu.cuMemcpyHtoA(array, 0, data.ctypes.data, 8))
ok(cu.cuMemcpyAtoH(back.ctypes.data, array, 0, 8))
ok(cu.cuCtxDestroy(ctx))
ctx = ok(cu.cuCtxCreate(None, 0, 0))
report([held, asked, there, bool((data == back).all()), code(cu.cuMipmappedArrayDestroy(mipmap)), free() == rest])
"""
    )
    assert found == [elements * 8, elements * 8, [0] * count + [1], True, 400, True]


def test_peers(tmp_path: Path) -> None:
    script = (
        CLIENT
        + """
ok(cu.cuInit(0))
first, second = (ok(cu.cuDevicePrimaryCtxRetain(i)) for i in (0, 1))
ok(cu.cuCtxSetCurrent(second))
q = ok(cu.cuMemAlloc(MIB))
ok(cu.cuMemsetD8(q, 3, 10))
ok(cu.cuCtxSetCurrent(first))
p = ok(cu.cuMemAlloc(MIB))
import ctypes
back = (ctypes.c_ubyte * 4)()
ok(cu.cuMemcpyPeer(p, first, q, second, 10))
ok(cu.cuMemcpyDtoH(ctypes.addressof(back), p, 4))
c = cu.CUDA_MEMCPY3D_PEER()
c.srcMemoryType = c.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
c.srcDevice, c.dstDevice, c.srcContext, c.dstContext = q, int(p) + 100, second, first
c.srcPitch = c.dstPitch = c.WidthInBytes = 4
c.Height = c.Depth = c.srcHeight = c.dstHeight = 1
ok(cu.cuMemcpy3DPeer(c))
more = (ctypes.c_ubyte * 4)()
ok(cu.cuMemcpyDtoH(ctypes.addressof(more), int(p) + 100, 4))
P = cu.CUdevice_P2PAttribute
report([list(back), list(more), ok(cu.cuDeviceCanAccessPeer(0, 1)), ok(cu.cuDeviceCanAccessPeer(0, 0)),
    ok(cu.cuDeviceGetP2PAttribute(P.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 0, 1)),
    code(cu.cuDeviceGetP2PAttribute(P.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, 0, 0)),
    [code(cu.cuCtxDisablePeerAccess(second)), code(cu.cuCtxEnablePeerAccess(second, 0)),
     code(cu.cuCtxEnablePeerAccess(second, 0)), code(cu.cuCtxDisablePeerAccess(second)),
     code(cu.cuCtxEnablePeerAccess(second, 1)), code(cu.cuCtxEnablePeerAccess(first, 0))]])
"""
    )
    linked = Machine(tmp_path / "linked", "A100-40x2").run(script)
    assert linked == [[3] * 4, [3] * 4, 1, 0, 1, 101, [705, 0, 704, 0, 1, 201]]
    alone = Machine(tmp_path / "alone", "T4x2").run(script)
    assert alone == [[3] * 4, [3] * 4, 0, 0, 0, 101, [705, 217, 217, 705, 1, 201]]


def test_multicast_objects_bind_memory_of_all_their_cards(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cards", "H100x2")
    found = machine.run(
        CLIENT
        + """
context()
def wanted(devices=2, size=4 * MIB):
    p = cu.CUmulticastObjectProp()
    p.numDevices, p.size = devices, size
    return p
rest = free()
minimum = cu.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
granularity = ok(cu.cuMulticastGetGranularity(wanted(), minimum))
team = ok(cu.cuMulticastCreate(wanted()))
nothing = rest - free()
memory = [ok(cu.cuMemCreate(4 * MIB, place(device=i), 0)) for i in (0, 1)]
ok(cu.cuMulticastAddDevice(team, 0))
codes = [code(cu.cuMulticastBindMem(team, 0, memory[0], 0, 4 * MIB, 0)), code(cu.cuMulticastAddDevice(team, 0))]
ok(cu.cuMulticastAddDevice(team, 1))
codes += [code(cu.cuMulticastBindMem(team, 0, memory[0], 0, 4 * MIB, 0)),
    code(cu.cuMulticastBindMem(team, 0, memory[0], 0, 2 * MIB, 0)),
    code(cu.cuMulticastBindMem(team, 0, memory[1], 0, 6 * MIB, 0)),
    code(cu.cuMulticastBindMem(team, 2 * MIB, memory[1], 0, 2 * MIB, 0))]
va = ok(cu.cuMemAddressReserve(4 * MIB, 0, 0, 0))
ok(cu.cuMemMap(va, 4 * MIB, 0, team, 0))
ok(cu.cuMemSetAccess(va, 4 * MIB, [access()], 1))
codes.append(code(cu.cuMemsetD8(va, 1, 1)))
ok(cu.cuMemRelease(memory[0]))
bound = rest - free()
codes += [code(cu.cuMulticastUnbind(team, 0, 0, 4 * MIB)), code(cu.cuMulticastUnbind(team, 0, 0, 4 * MIB))]
released = rest - free()
ok(cu.cuMemUnmap(va, 4 * MIB))
ok(cu.cuMemRelease(memory[1]))
ok(cu.cuMemRelease(team))
report([granularity, nothing, codes, bound, released, code(cu.cuMulticastCreate(wanted(devices=3))),
    ok(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, 0))])
"""
    )
    assert found == [2 * MIB, 0, [1, 1, 0, 1, 1, 0, 1, 0, 1], 4 * MIB, 0, 1, 1]
    assert machine.card(0).used == machine.card(1).used == 0
