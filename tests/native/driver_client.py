"""A small client of the driver interface for test scripts: ctypes, hence dlsym, without knowledge of libvgpu."""

from ctypes import (
    CDLL,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_ushort,
    c_void_p,
)

MIB = 1 << 20
cu = CDLL("libcuda.so.1")


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProperties(Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", c_char * 8),
    ]


class PoolProperties(Structure):
    """CUmemPoolProps of cuda.h."""

    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("max_size", c_size_t),
        ("usage", c_ushort),
        ("reserved", c_char * 54),
    ]


class ArrayDescriptor(Structure):
    """CUDA_ARRAY_DESCRIPTOR of cuda.h."""

    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_int), ("channels", c_uint)]


class Array3DDescriptor(Structure):
    """CUDA_ARRAY3D_DESCRIPTOR of cuda.h."""

    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


UINT8 = 1  # CU_AD_FORMAT_UNSIGNED_INT8


def ok(result: int) -> None:
    assert result == 0, f"driver error {result}"


def device(ordinal: int = 0) -> int:
    found = c_int()
    ok(cu.cuDeviceGet(byref(found), ordinal))
    return found.value


def context(ordinal: int = 0) -> c_void_p:
    made = c_void_p()
    ok(cu.cuCtxCreate_v2(byref(made), 0, device(ordinal)))
    return made


def start(ordinal: int = 0) -> c_void_p:
    ok(cu.cuInit(0))
    return context(ordinal)


def alloc(size: int) -> tuple[int, int]:
    """Status and pointer."""
    pointer = c_uint64()
    return cu.cuMemAlloc_v2(byref(pointer), c_size_t(size)), pointer.value


def alloc_async(size: int, stream: int = 0) -> tuple[int, int]:
    pointer = c_uint64()
    return cu.cuMemAllocAsync(byref(pointer), c_size_t(size), c_void_p(stream)), pointer.value


def free(pointer: int) -> int:
    return cu.cuMemFree_v2(c_uint64(pointer))


def free_async(pointer: int, stream: int = 0) -> int:
    return cu.cuMemFreeAsync(c_uint64(pointer), c_void_p(stream))


def info() -> tuple[int, int]:
    """Free and total bytes."""
    left, total = c_size_t(), c_size_t()
    ok(cu.cuMemGetInfo_v2(byref(left), byref(total)))
    return left.value, total.value


def used() -> int:
    left, total = info()
    return total - left


def total_mem(ordinal: int = 0) -> int:
    total = c_size_t()
    ok(cu.cuDeviceTotalMem_v2(byref(total), device(ordinal)))
    return total.value


def create(size: int, kind: int = 1, where: int = 0) -> tuple[int, int]:
    """cuMemCreate; kind: CU_MEM_LOCATION_TYPE_DEVICE 1, HOST 2, HOST_NUMA 3."""
    handle = c_ulonglong()
    properties = AllocationProperties(type=1, location=Location(kind, where))
    return cu.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_ulonglong(0)), handle.value


def reserve(size: int) -> int:
    address = c_uint64()
    ok(cu.cuMemAddressReserve(byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_ulonglong(0)))
    return address.value


def map_block(address: int, size: int, handle: int) -> int:
    return cu.cuMemMap(c_uint64(address), c_size_t(size), c_size_t(0), c_ulonglong(handle), c_ulonglong(0))


def unmap(address: int, size: int) -> int:
    return cu.cuMemUnmap(c_uint64(address), c_size_t(size))


def release(handle: int) -> int:
    return cu.cuMemRelease(c_ulonglong(handle))


def pool(kind: int = 1, where: int = 0) -> c_void_p:
    made = c_void_p()
    properties = PoolProperties(type=1, location=Location(kind, where))
    ok(cu.cuMemPoolCreate(byref(made), byref(properties)))
    return made


def function(name: str) -> c_void_p:
    """A kernel whose name contains its duration."""
    module, found = c_void_p(), c_void_p()
    text = f".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry {name}()\n{{ ret; }}\n"
    ok(cu.cuModuleLoadData(byref(module), c_char_p(text.encode())))
    ok(cu.cuModuleGetFunction(byref(found), module, c_char_p(name.encode())))
    return found


def launch(kernel: c_void_p, stream: int = 0) -> int:
    return cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, c_void_p(stream), None, None)
