"""The CUDA runtime through ctypes, for any libcudart, with a kernel and a variable registered as nvcc's code does."""

import ctypes
import struct
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p

PTX = (
    b".version 8.0\n.target sm_70\n.address_size 64\n"
    b".visible .global .align 4 .b8 numbers[64];\n"
    b".visible .entry spin_2ms(.param .u64 p) { ret; }\n\0"
)
MEMORY_ALLOCATION, INITIALIZATION, NO_SYMBOL = 2, 3, 500
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3

REGISTER = "__cudaRegisterFatBinary"


def fatbin(ptx: bytes = PTX) -> bytes:
    """One uncompressed part of PTX (kind 1), as libvgpu/simulator/cuda/images.c describes it."""
    padded = ptx.ljust(-(-len(ptx) // 8) * 8, b"\0")
    part = struct.pack("<HHIQ5I", 1, 0x101, 64, len(padded), 0, 0, 0, 70, 64).ljust(64, b"\0") + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(part)) + part


class Dim3(ctypes.Structure):
    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


class Runtime:
    """Calls by name; `ok` requires success, `code` returns the number of the error."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.cudaGetErrorName.restype = ctypes.c_char_p
        getattr(self.library, REGISTER).restype = c_void_p  # such a name would be mangled inside the class
        self.kept: list[object] = []

    def code(self, name: str, *arguments: object) -> int:
        return int(getattr(self.library, name)(*arguments))

    def ok(self, name: str, *arguments: object) -> None:
        code = self.code(name, *arguments)
        if code:
            raise RuntimeError(f"{name}: {self.library.cudaGetErrorName(code).decode()}")

    def made(self, name: str, *arguments: object) -> c_void_p:
        """The handle or address that a call stores through its first argument."""
        out = c_void_p()
        self.ok(name, byref(out), *arguments)
        return out

    def number(self, name: str, *arguments: object) -> int:
        out = c_int()
        self.ok(name, byref(out), *arguments)
        return out.value

    def malloc(self, size: int) -> c_void_p:
        return self.made("cudaMalloc", c_size_t(size))

    def refused(self, size: int) -> bool:
        """Whether the size is out of memory, with no error left behind."""
        codes = self.code("cudaMalloc", byref(c_void_p()), c_size_t(size)), self.code("cudaGetLastError")
        return codes == (MEMORY_ALLOCATION, MEMORY_ALLOCATION) and self.code("cudaGetLastError") == 0

    def memory(self) -> tuple[int, int]:
        """Bytes free and in all."""
        free, total = c_size_t(), c_size_t()
        self.ok("cudaMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def copy(self, to: object, source: object, size: int, kind: int) -> None:
        self.ok("cudaMemcpy", to, source, c_size_t(size), kind)

    def properties(self) -> tuple[str, int]:
        """Name and bytes of device 0: the fields of cudaDeviceProp that are at the same place in every version."""
        room = ctypes.create_string_buffer(4096)
        name = "cudaGetDeviceProperties_v2" if hasattr(self.library, "cudaGetDeviceProperties_v2") else ""
        self.ok(name or "cudaGetDeviceProperties", room, 0)
        return room.value.decode(), struct.unpack_from("<Q", room.raw, 288)[0]

    def register(self) -> tuple[c_void_p, c_void_p]:
        """The host addresses of the kernel and the variable of PTX."""
        image, kernel, variable = ctypes.create_string_buffer(fatbin()), ctypes.create_string_buffer(8), (c_int * 16)()
        wrapper = ctypes.create_string_buffer(struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(image), 0))
        self.kept += [image, wrapper, kernel, variable]
        handle = c_void_p(getattr(self.library, REGISTER)(wrapper))
        self.code("__cudaRegisterFunction", handle, kernel, b"spin_2ms", b"spin_2ms", -1, *[None] * 5)
        self.code("__cudaRegisterVar", handle, variable, b"numbers", b"numbers", 0, c_size_t(64), 0, 0)
        self.code("__cudaRegisterFatBinaryEnd", handle)
        return c_void_p(ctypes.addressof(kernel)), c_void_p(ctypes.addressof(variable))

    def launch(self, kernel: c_void_p, stream: c_void_p | None = None) -> None:
        argument = c_uint64(0)
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        self.ok("cudaLaunchKernel", kernel, Dim3(1, 1, 1), Dim3(32, 1, 1), arguments, c_size_t(0), stream)

    def elapsed(self, begin: c_void_p, end: c_void_p) -> float:
        out = c_float()
        self.ok("cudaEventElapsedTime", byref(out), begin, end)
        return out.value
