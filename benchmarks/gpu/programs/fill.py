"""Fills a slice by one route until it is refused, prints all figures about it, and frees everything.

`fill.py ROUTE FIRST_BYTES`: prints the figures when full and when freed; waits for a line of input after each. It runs
with tests/native on its path, because it uses `driver_client`.
"""

import json
import os
import subprocess
import sys
from ctypes import Structure, byref, c_char, c_size_t, c_uint, c_uint64, c_void_p, create_string_buffer, memmove, sizeof
from pathlib import Path

import pynvml
from driver_client import (
    UINT8,
    Array3DDescriptor,
    alloc,
    alloc_async,
    create,
    cu,
    free,
    free_async,
    info,
    map_block,
    ok,
    pool,
    release,
    reserve,
    start,
    unmap,
)
from graph_client import add_alloc, instance, make_graph, make_stream, trim

from vgpu.native import Region

MIB = 1 << 20
GIB = 1 << 30
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of cuda.h
ROW = 64 << 10  # width of a pitched allocation: no driver pads it further


class IpcHandle(Structure):
    """CUipcMemHandle of cuda.h."""

    _fields_ = [("reserved", c_char * 64)]


class Plain:
    """cuMemAlloc: any size, to the byte."""

    unit, most = 1, 1 << 62

    def take(self, size: int) -> tuple[int, object]:
        return alloc(size)

    def give(self, held: object) -> None:
        ok(free(held))

    def settle(self) -> None:
        """Returns memory to the driver that a route keeps for later use."""


class Pitched(Plain):
    unit = ROW

    def take(self, size: int) -> tuple[int, object]:
        pointer, pitch = c_uint64(), c_size_t()
        rows = c_size_t(size // ROW)
        return cu.cuMemAllocPitch_v2(byref(pointer), byref(pitch), c_size_t(ROW), rows, c_uint(4)), pointer.value


class Managed(Plain):
    def take(self, size: int) -> tuple[int, object]:
        pointer = c_uint64()
        everywhere = c_uint(1)  # CU_MEM_ATTACH_GLOBAL
        return cu.cuMemAllocManaged(byref(pointer), c_size_t(size), everywhere), pointer.value


class Arrays(Plain):
    """Layers of 1 MiB; cuda.h allows 16384 of them."""

    unit, most = MIB, 8 * GIB

    def take(self, size: int) -> tuple[int, object]:
        made = c_void_p()
        shape = Array3DDescriptor(width=1024, height=1024, depth=size // MIB, format=UINT8, channels=1)
        return cu.cuArray3DCreate_v2(byref(made), byref(shape)), made

    def give(self, held: object) -> None:
        ok(cu.cuArrayDestroy(held))


class Async(Plain):
    """The card's own pool; drivers reserve for it in chunks of up to 32 MiB."""

    unit = 32 * MIB

    def take(self, size: int) -> tuple[int, object]:
        return alloc_async(size)

    def give(self, held: object) -> None:
        ok(free_async(held))

    def settle(self) -> None:
        default = c_void_p()
        ok(cu.cuCtxSynchronize())
        ok(cu.cuDeviceGetDefaultMemPool(byref(default), 0))
        ok(cu.cuMemPoolTrimTo(default, c_size_t(0)))


class OwnPool(Async):
    def __init__(self) -> None:
        self.pool = pool()

    def take(self, size: int) -> tuple[int, object]:
        pointer = c_uint64()
        return cu.cuMemAllocFromPoolAsync(byref(pointer), c_size_t(size), self.pool, c_void_p(0)), pointer.value

    def settle(self) -> None:
        ok(cu.cuCtxSynchronize())
        ok(cu.cuMemPoolDestroy(self.pool))


class Virtual(Plain):
    unit = 2 * MIB

    def take(self, size: int) -> tuple[int, object]:
        status, handle = create(size)
        if status:
            return status, None
        address = reserve(size)
        return map_block(address, size, handle), (address, size, handle)

    def give(self, held: object) -> None:
        address, size, handle = held
        ok(unmap(address, size))
        ok(release(handle))
        ok(cu.cuMemAddressFree(c_uint64(address), c_size_t(size)))


class Graphs(Plain):
    """Allocation nodes that outlive their launch; near the limit a graph may be refused early, see docs/limits.md."""

    unit = 64 * MIB

    def __init__(self) -> None:
        self.stream = make_stream()

    def take(self, size: int) -> tuple[int, object]:
        graph = make_graph()
        pointer = add_alloc(graph, size)
        executable = instance(graph)
        status = cu.cuGraphLaunch(executable, self.stream)
        ok(cu.cuStreamSynchronize(self.stream))
        if status:
            ok(cu.cuGraphExecDestroy(executable))
            return status, None
        return 0, (pointer, executable)

    def give(self, held: object) -> None:
        pointer, executable = held
        ok(free_async(pointer, self.stream.value))
        ok(cu.cuStreamSynchronize(self.stream))
        ok(cu.cuGraphExecDestroy(executable))

    def settle(self) -> None:
        ok(trim())


class Imported(Plain):
    """Memory of another process of the slice, opened by a legacy IPC handle; only the other process pays for it."""

    def __init__(self, size: int) -> None:
        self.maker = subprocess.Popen(
            [sys.executable, __file__, "ipc-maker", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        handle, self.address = IpcHandle(), c_uint64()
        raw = bytes.fromhex(self.maker.stdout.readline())
        memmove(byref(handle), raw, sizeof(handle))
        ok(cu.cuIpcOpenMemHandle_v2(byref(self.address), handle, c_uint(1)))  # 1: enable peer access lazily
        seen = c_uint()
        ok(cu.cuMemcpyDtoH_v2(byref(seen), self.address, c_size_t(4)))
        assert seen.value == 0x5A5A5A5A, f"the imported memory has {seen.value:x}"

    def settle(self) -> None:
        ok(cu.cuIpcCloseMemHandle(self.address))
        self.maker.communicate("\n")


def make_for_others(size: int) -> None:
    start()
    status, pointer = alloc(size)
    ok(status)
    ok(cu.cuMemsetD32_v2(c_uint64(pointer), c_uint(0x5A5A5A5A), c_size_t(1024)))
    ok(cu.cuCtxSynchronize())
    handle = IpcHandle()
    ok(cu.cuIpcGetMemHandle(byref(handle), c_uint64(pointer)))
    raw = create_string_buffer(64)
    memmove(raw, byref(handle), 64)
    print(raw.raw.hex(), flush=True)
    sys.stdin.readline()
    ok(free(pointer))


ROUTES = {
    "cuMemAlloc": Plain,
    "cuMemAllocPitch": Pitched,
    "cuMemAllocManaged": Managed,
    "cuArray3DCreate": Arrays,
    "cuMemAllocAsync": Async,
    "cuMemAllocFromPoolAsync": OwnPool,
    "cuMemCreate": Virtual,
    "graph memory": Graphs,
    "IPC import": Imported,
}


def filled(route: Plain, first: int) -> tuple[list[object], int, int]:
    """The allocations, the requested bytes, and the status that ended the fill."""
    held, asked, size = [], 0, min(first, route.most) // route.unit * route.unit
    while True:
        status, one = route.take(size)
        if status == 0:
            held.append(one)
            asked += size
        elif status != OUT_OF_MEMORY or size <= route.unit:
            return held, asked, status
        else:
            size = max(route.unit, size // 2 // route.unit * route.unit)


def picture(region: Region) -> dict[str, object]:
    """The figures of the ledger, CUDA and NVML now, bytes."""
    card = region.usage().cards[0]
    left, total = info()
    handle = pynvml.nvmlDeviceGetHandleByUUID(region.limits().cards[0].uuid)
    told = {"cuMemGetInfo": [total, total - left, left]}
    for name, arguments in {"NVML v1": (), "NVML v2": (pynvml.nvmlMemory_v2,)}.items():
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, *arguments)
        told[name] = [memory.total, memory.used, memory.free]
    return {"used": card.used, "context": card.by_kind["context"], "refused": card.refused, "told": told}


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def main() -> None:
    name, first = sys.argv[1], int(sys.argv[2])
    if name == "ipc-maker":
        make_for_others(first)
        return
    start()
    pynvml.nvmlInit()
    route = Imported(first) if name == "IPC import" else ROUTES[name]()
    with Region.open(Path(os.environ["VGPU_DIR"])) as region:
        held, asked, status = filled(route, first)
        say(**picture(region), asked=asked, unit=route.unit, status=status, pid=os.getpid(), pieces=len(held))
        while held:
            route.give(held.pop())
        route.settle()
        say(**picture(region))


main()
