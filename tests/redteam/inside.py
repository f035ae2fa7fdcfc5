"""An intruder's tools inside the container: the driver by ctypes, and the container's own files."""

import ctypes
import os
import struct
import subprocess
from collections.abc import Callable, Sequence

MIB = 1 << 20
USAGE, LIMITS, GRAB, DRIVER = "/run/vgpu/usage", "/run/vgpu/limits", "/run/bin/grab", "/run/lib/libcuda.so.1"
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Driver:
    """The driver's functions, found in one of several ways."""

    def __init__(self, library: "ctypes.CDLL | ByAddress") -> None:
        self.library = library

    def start(self) -> tuple[int, int]:
        """The results of cuInit and cuCtxCreate."""
        return self.library.cuInit(0), self.library.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)

    def alloc(self, size: int) -> tuple[int, int]:
        pointer = ctypes.c_uint64()
        return self.library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)), pointer.value

    def free(self, pointer: int) -> int:
        return self.library.cuMemFree_v2(ctypes.c_uint64(pointer))

    def export(self, size: int) -> tuple[int, int]:
        """A block of that size: its handle, and a descriptor with which other processes can import it."""
        handle, file = ctypes.c_uint64(), ctypes.c_int()
        properties = struct.pack("iiiiQQ", 1, 1, 1, 0, 0, 0)  # CUmemAllocationProp: pinned, by descriptor, on device 0
        made = self.library.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(size), properties, ctypes.c_uint64(0))
        assert made == 0
        assert self.library.cuMemExportToShareableHandle(ctypes.byref(file), handle, 1, ctypes.c_uint64(0)) == 0
        return handle.value, file.value

    def take(self, path: str) -> int:
        """The result of importing a block, whose descriptor is at a path."""
        file = ctypes.c_void_p(os.open(path, os.O_RDWR))
        return self.library.cuMemImportFromShareableHandle(ctypes.byref(ctypes.c_uint64()), file, 1)

    def release(self, handle: int) -> int:
        return self.library.cuMemRelease(ctypes.c_uint64(handle))

    def fill(self) -> int:
        """Allocates everything that is available, to the last byte; returns the number of bytes."""
        total, size = 0, 1 << 34
        while size:
            status, _ = self.alloc(size)
            if status == 0:
                total += size
            else:
                size //= 2
        return total


class ByAddress:
    """Functions of a library by their offset in its file, without asking the dynamic linker."""

    def __init__(self, path: str) -> None:
        ctypes.CDLL(path)
        self.offsets = dynamic_symbols(path)
        with open("/proc/self/maps") as maps:
            self.base = next(int(line.split("-")[0], 16) for line in maps if line.endswith(f"{path}\n"))

    def __getattr__(self, name: str) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int)(self.base + self.offsets[name])


def dynamic_symbols(path: str) -> dict[str, int]:
    """Name -> offset of a 64-bit ELF file's dynamic symbols."""
    with open(path, "rb") as file:
        data = file.read()
    sections, (size, count) = struct.unpack_from("<Q", data, 0x28)[0], struct.unpack_from("<HH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + i * size) for i in range(count)]
    table = next(header for header in headers if header[1] == 11)  # SHT_DYNSYM
    names = headers[table[6]][4]
    found = {}
    for offset in range(table[4], table[4] + table[5], 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, offset)
        found[data[names + name : data.index(b"\0", names + name)].decode()] = value
    return found


def driver(library: str = "libcuda.so.1", mode: int = os.RTLD_NOW) -> Driver:
    return Driver(ctypes.CDLL(library, mode=mode))


def started() -> Driver:
    found = driver()
    assert found.start() == (0, 0)
    return found


class Other:
    """Another process of the container that allocates all it can get, and holds it until it is asked to end."""

    def __init__(self, *words: str, through: Sequence[str] = (), program: Sequence[str] = (GRAB,)) -> None:
        self.process = subprocess.Popen(
            [*through, *program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.said = self.process.stdout.readline().strip()

    @property
    def answers(self) -> tuple[int, int]:
        """The results of cuInit and cuCtxCreate."""
        first, second, _ = map(int, self.said.split())
        return first, second

    @property
    def got(self) -> int:
        return int(self.said.split()[2]) if self.said else 0

    def end(self) -> int:
        """Exit status; negative: the signal."""
        self.process.communicate()
        return self.process.returncode


def other(*words: str, through: Sequence[str] = ()) -> int:
    """The bytes that another process gets; then the process ends."""
    one = Other(*words, through=through)
    got = one.got
    one.end()
    return got


def attempt(action: object, *arguments: object) -> str:
    """Does something that should fail: "" or the error's name."""
    try:
        action(*arguments)  # type: ignore[operator]  # any callable
    except OSError as e:
        return errno_name(e.errno or 0)
    return ""


def errno_name(number: int) -> str:
    import errno

    return errno.errorcode.get(number, str(number))


def overwrite(data: bytes, offset: int = 0) -> None:
    with open(USAGE, "r+b") as usage:
        usage.seek(offset)
        usage.write(data)


def spoil(how: str) -> None:
    """Damages the usage file in place."""
    size = os.stat(USAGE).st_size
    match how:
        case "zeros":
            overwrite(bytes(size))
        case "noise":
            overwrite(os.urandom(size))
        case "another version":
            overwrite((99).to_bytes(4, "little"), 8)
        case "cut":
            os.truncate(USAGE, 0)
        case "cut and stretched":
            os.truncate(USAGE, 0)
            os.truncate(USAGE, size)
        case "grown":
            os.truncate(USAGE, size + 4096)
        case "half":
            os.truncate(USAGE, 4096)
        case _:
            raise ValueError(how)
