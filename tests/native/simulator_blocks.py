"""For test scripts: memory by cuMemCreate, on cards and NUMA nodes, and kernels that touch the memory."""

import ctypes

from simulator_client import MIB, PTX, cu, ok

__all__ = ["MIB", "access", "filled", "go", "home", "mapped", "pinned", "remap", "total", "touching", "unmap"]


def home(card=0, node=None):
    """Place of physical memory: a card, or a NUMA node of the host."""
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind = cu.CUmemLocationType
    p.location.type = kind.CU_MEM_LOCATION_TYPE_DEVICE if node is None else kind.CU_MEM_LOCATION_TYPE_HOST_NUMA
    p.location.id = card if node is None else node
    return p


def access(card=0):
    a = cu.CUmemAccessDesc()
    a.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.location.id = card
    a.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return a


def mapped(size, node=None):
    """An address with memory behind it; only the mapping holds the memory."""
    address = int(ok(cu.cuMemAddressReserve(size, 0, 0, 0)))
    remap(address, size, node)
    return address


def remap(address, size, node=None):
    handle = ok(cu.cuMemCreate(size, home(node=node), 0))
    ok(cu.cuMemMap(address, size, 0, handle, 0))
    ok(cu.cuMemSetAccess(address, size, [access()], 1))
    ok(cu.cuMemRelease(handle))


def unmap(address, size):
    ok(cu.cuMemUnmap(address, size))


def pinned(size):
    return int(ok(cu.cuMemHostAlloc(size, 0)))


def touching(name):
    """A kernel of three 64-bit parameters."""
    text = f"{PTX}.visible .entry {name}(.param .u64 a, .param .u64 b, .param .u64 c) {{ ret; }}"
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(text.encode())), name.encode()))


def go(function, *values, stream=0):
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, (values, (ctypes.c_uint64,) * 3), 0))


def filled(address, words, value):
    """Makes a kernel store a value."""
    go(touching("touch_fill"), address, words, value)


def total(address, words, room):
    """The sum of words, computed by a kernel; `room`: memory for the result."""
    go(touching("touch_sum"), room, address, words)
    out = ctypes.c_uint64()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(out), room, 8))
    return out.value
