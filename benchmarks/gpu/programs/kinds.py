"""The driver's answers about a pointer, and the kinds of copies and fills that it accepts there.

Runs with tests/native on its path.
"""

from ctypes import Structure, addressof, byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p

from driver_client import cu, ok

#: CUpointer_attribute of cuda.h
ATTRIBUTES = {
    "context": 1, "memory type": 2, "device pointer": 3, "host pointer": 4, "buffer id": 7, "managed": 8,
    "device": 9, "legacy IPC": 10, "range start": 11, "range size": 12, "mapped": 13, "handle types": 14,
    "GPUDirect RDMA": 15,
}  # fmt: skip
#: the driver's own numbers, which differ from block to block
OF_EACH_BLOCK = ("context", "buffer id")
HOST, DEVICE, UNIFIED = 1, 2, 4  # CUmemorytype
PIECE = 64 << 10
WIDTH, HEIGHT = 256, 64  # size of two-dimensional copies


class Copy2D(Structure):
    """CUDA_MEMCPY2D of cuda.h."""

    _fields_ = [
        ("source_x", c_size_t), ("source_y", c_size_t), ("source_type", c_int), ("source_host", c_void_p),
        ("source_device", c_uint64), ("source_array", c_void_p), ("source_pitch", c_size_t),
        ("x", c_size_t), ("y", c_size_t), ("type", c_int), ("host", c_void_p), ("device", c_uint64),
        ("array", c_void_p), ("pitch", c_size_t), ("width", c_size_t), ("height", c_size_t),
    ]  # fmt: skip


def attributes(pointer: int, size: int) -> dict[str, str]:
    """Attributes for the middle of a block of `size` bytes: value, or the driver's error.

    Addresses are reported as their distance from the beginning of the block.
    """
    told, inside = {}, pointer + size // 2
    for name, which in ATTRIBUTES.items():
        value = c_uint64()
        status = cu.cuPointerGetAttribute(byref(value), which, c_uint64(inside))
        if status:
            told[name] = f"error {status}"
        elif name in OF_EACH_BLOCK:
            told[name] = "one" if value.value else "none"
        elif name in ("device pointer", "range start"):
            told[name] = f"{value.value - pointer:+d}"
        elif name == "host pointer":
            told[name] = "one" if value.value else "none"
        else:
            told[name] = str(value.value)
    base, length = c_uint64(), c_size_t()
    status = cu.cuMemGetAddressRange_v2(byref(base), byref(length), c_uint64(inside))
    told["address range"] = f"error {status}" if status else f"{base.value - pointer:+d}, {length.value}"
    return told


def refused(pointer: int, other: int) -> dict[str, str]:
    """Kinds of copies and fills of PIECE bytes at `pointer` that fail or write wrong bytes, with their result.

    `other`: as many bytes of a card. The function writes to both.
    """
    bad = {}
    for number, (name, work) in enumerate(KINDS.items(), 1):
        pattern = (c_ubyte * PIECE)(*((number + place) % 251 for place in range(PIECE)))
        found = (c_ubyte * PIECE)()
        try:
            ok(cu.cuMemsetD8_v2(c_uint64(pointer), 0, c_size_t(PIECE)))
            status, expected = work(pointer, other, pattern)
            ok(cu.cuCtxSynchronize())
            ok(cu.cuMemcpyDtoH_v2(found, c_uint64(pointer), c_size_t(PIECE)))
        except AssertionError as error:
            bad[name] = f"beside it: {error}"
            continue
        if status:
            bad[name] = f"error {status}"
        elif bytes(found) != expected:
            bad[name] = "wrong bytes"
    return bad


def _to_device(pointer, _other, pattern):
    return cu.cuMemcpyHtoD_v2(c_uint64(pointer), pattern, c_size_t(PIECE)), bytes(pattern)


def _to_device_async(pointer, _other, pattern):
    return cu.cuMemcpyHtoDAsync_v2(c_uint64(pointer), pattern, c_size_t(PIECE), None), bytes(pattern)


def _from_device_async(pointer, _other, pattern):
    """Copies there and back: the bytes that came back are compared."""
    ok(cu.cuMemcpyHtoD_v2(c_uint64(pointer), pattern, c_size_t(PIECE)))
    back = (c_ubyte * PIECE)()
    status = cu.cuMemcpyDtoHAsync_v2(back, c_uint64(pointer), c_size_t(PIECE), None)
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemcpyHtoD_v2(c_uint64(pointer), back, c_size_t(PIECE)))
    return status, bytes(pattern)


def _between(pointer, other, pattern):
    ok(cu.cuMemcpyHtoD_v2(c_uint64(other), pattern, c_size_t(PIECE)))
    return cu.cuMemcpyDtoD_v2(c_uint64(pointer), c_uint64(other), c_size_t(PIECE)), bytes(pattern)


def _back(pointer, other, pattern):
    ok(cu.cuMemcpyHtoD_v2(c_uint64(pointer), pattern, c_size_t(PIECE)))
    ok(cu.cuMemsetD8_v2(c_uint64(other), 0, c_size_t(PIECE)))
    status = cu.cuMemcpyDtoDAsync_v2(c_uint64(other), c_uint64(pointer), c_size_t(PIECE), None)
    back = (c_ubyte * PIECE)()
    ok(cu.cuMemcpyDtoH_v2(back, c_uint64(other), c_size_t(PIECE)))
    ok(cu.cuMemcpyHtoD_v2(c_uint64(pointer), back, c_size_t(PIECE)))
    return status, bytes(pattern)


def _by_pointer(pointer, _other, pattern):
    """cuMemcpy itself finds out where each pointer is."""
    return cu.cuMemcpy(c_uint64(pointer), c_uint64(addressof(pattern)), c_size_t(PIECE)), bytes(pattern)


def _by_pointer_async(pointer, other, pattern):
    ok(cu.cuMemcpyHtoD_v2(c_uint64(other), pattern, c_size_t(PIECE)))
    return cu.cuMemcpyAsync(c_uint64(pointer), c_uint64(other), c_size_t(PIECE), None), bytes(pattern)


def _two_dimensions(pointer, _other, pattern, kind=DEVICE):
    shape = Copy2D()
    shape.source_type, shape.source_host, shape.source_pitch = HOST, addressof(pattern), WIDTH
    shape.type, shape.device, shape.pitch, shape.width, shape.height = kind, pointer, WIDTH, WIDTH, HEIGHT
    copied = WIDTH * HEIGHT
    return cu.cuMemcpy2D_v2(byref(shape)), bytes(pattern)[:copied] + bytes(PIECE - copied)


def _two_dimensions_unified(pointer, other, pattern):
    return _two_dimensions(pointer, other, pattern, UNIFIED)


def _fill_8(pointer, _other, _pattern):
    return cu.cuMemsetD8Async(c_uint64(pointer), 0x5A, c_size_t(PIECE), None), b"\x5a" * PIECE


def _fill_16(pointer, _other, _pattern):
    return cu.cuMemsetD16_v2(c_uint64(pointer), c_ushort(0x1234), c_size_t(PIECE // 2)), b"\x34\x12" * (PIECE // 2)


def _fill_32(pointer, _other, _pattern):
    word = (0x12345678).to_bytes(4, "little")
    return cu.cuMemsetD32_v2(c_uint64(pointer), c_uint(0x12345678), c_size_t(PIECE // 4)), word * (PIECE // 4)


def _fill_rows(pointer, _other, _pattern):
    shape = c_size_t(2 * WIDTH), 0x77, c_size_t(WIDTH), c_size_t(HEIGHT)
    rows = (b"\x77" * WIDTH + bytes(WIDTH)) * HEIGHT
    return cu.cuMemsetD2D8_v2(c_uint64(pointer), *shape), rows + bytes(PIECE - len(rows))


KINDS = {
    "HtoD": _to_device,
    "HtoD async": _to_device_async,
    "DtoH async": _from_device_async,
    "DtoD from the card": _between,
    "DtoD to the card": _back,
    "cuMemcpy": _by_pointer,
    "cuMemcpyAsync": _by_pointer_async,
    "2D": _two_dimensions,
    "2D, unified": _two_dimensions_unified,
    "fill D8 async": _fill_8,
    "fill D16": _fill_16,
    "fill D32": _fill_32,
    "fill D2D8": _fill_rows,
}
