"""Runs scripts on the driver of libvgpu/tests/clients/other_driver.c, through the preloaded library.

This driver counts what it holds, and calls the program back in the middle of its work.
"""

from pathlib import Path

from preloaded import compiled

PRELUDE = """
import os, struct, threading
from ctypes import CFUNCTYPE, c_char_p, c_uint64, cast
from driver_client import *
CALL = CFUNCTYPE(None, c_char_p, c_int)
held, slot = c_uint64.in_dll(cu, "other_held"), c_void_p.in_dll(cu, "other_meanwhile")
kept = []
def meanwhile(entry, after, work):  # does the work once, in the middle of the next call of that entry point
    def call(name, when):
        if (name.decode(), when) == (entry, after):
            slot.value = None
            work()
    kept.append(CALL(call))
    slot.value = cast(kept[-1], c_void_p).value
def charged():
    left, total = info()
    return (total - left) // MIB
def books():  # what is charged and what is held, in MiB
    return charged(), held.value // MIB
ok(cu.cuInit(0))
HOST, DEVICE, DOMAIN, MANAGED = 2, 1, 6, 2
def made(size, where):  # by cuMemCreate
    handle = c_ulonglong()
    properties = AllocationProperties(type=1, handles=1, location=Location(where, 0))
    return cu.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_ulonglong(0)), handle.value, properties
def pool_of(where, type=1):
    handle = c_void_p()
    ok(cu.cuMemPoolCreate(byref(handle), byref(PoolProperties(type=type, handles=0, location=Location(where, 0)))))
    return handle
def from_pool(pool, size, stream=1):
    pointer = c_ulonglong()
    return cu.cuMemAllocFromPoolAsync(byref(pointer), c_size_t(size), pool, c_void_p(stream))
"""
SPARSE = """
MAP, UNMAP, SPARSE = 1, 2, 0x40
def sparse():
    array = c_void_p()
    ok(cu.cuArray3DCreate_v2(byref(array), byref(Array3DDescriptor(1 << 16, 1 << 16, 0, UINT8, 1, SPARSE))))
    return array
def tiles(array, operation, memory=0, width=1024):
    info = bytearray(96)  # CUarrayMapInfo of cuda.h
    struct.pack_into("<Q", info, 8, array.value)
    struct.pack_into("<8I", info, 24, 0, 0, 0, 0, 0, width, 1024, 1)
    struct.pack_into("<iiQQII", info, 56, operation, 0, memory, 0, 1, 0)
    return cu.cuMemMapArrayAsync((c_char * len(info)).from_buffer(info), 1, None)
"""


def library(folder: Path, source: str, soname: str, *more: str) -> None:
    """Compiles a library that replaces a driver's library; `more`: compiler flags."""
    flags = ("-shared", "-fPIC", f"-Wl,-soname,{soname},-Bsymbolic", *more)
    folder.mkdir(exist_ok=True)
    (folder / soname).symlink_to(compiled(source, *flags, output=f"{source}{''.join(more)}.so"))
