"""A program on the plain CUDA runtime; its argument is the libcudart."""

import ctypes
import os
import sys
from ctypes import byref, c_char, c_size_t, c_void_p

from cudart import DEVICE_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_DEVICE, INITIALIZATION, MEMORY_ALLOCATION, Runtime
from steps import step

MIB = 1 << 20
rt = Runtime(sys.argv[1])


def told(name: str) -> int:
    free, total = rt.memory()
    step(name, free, total)
    return free


assert rt.number("cudaGetDeviceCount") == 1
assert rt.number("cudaDriverGetVersion") >= rt.number("cudaRuntimeGetVersion") // 1000 * 1000
name, size = rt.properties()
assert name == "Tesla T4", name
assert size == rt.memory()[1]
kernel, variable = rt.register()

free = told("started")
assert rt.refused(free + 1)
first, rest = rt.malloc(100 * MIB), rt.malloc(free - 100 * MIB)
assert told("full") == 0
assert rt.refused(1)
rt.ok("cudaFree", first)
rt.ok("cudaFree", rest)
assert told("freed") == free

text = ctypes.create_string_buffer(b"what is copied comes back", 64)
other = ctypes.create_string_buffer(64)
one, two = rt.malloc(64), rt.malloc(64)
rt.copy(one, text, 64, HOST_TO_DEVICE)
rt.copy(two, one, 64, DEVICE_TO_DEVICE)
rt.ok("cudaMemset", one, 7, c_size_t(64))
rt.copy(other, two, 64, DEVICE_TO_HOST)
assert other.raw == text.raw
rt.copy(other, one, 64, DEVICE_TO_HOST)
assert other.raw == b"\7" * 64

stream = rt.made("cudaStreamCreate")
pooled = rt.made("cudaMallocAsync", c_size_t(20 * MIB), stream)
rt.ok("cudaMemsetAsync", pooled, 1, c_size_t(20 * MIB), stream)
told("stream-ordered")
rt.ok("cudaFreeAsync", pooled, stream)
rt.ok("cudaStreamSynchronize", stream)
assert rt.code("cudaMallocAsync", byref(c_void_p()), c_size_t(free + MIB), stream) == MEMORY_ALLOCATION
rt.code("cudaGetLastError")

begin, end = rt.made("cudaEventCreate"), rt.made("cudaEventCreate")
rt.ok("cudaEventRecord", begin, stream)
rt.launch(kernel, stream)
rt.ok("cudaEventRecord", end, stream)
rt.ok("cudaEventSynchronize", end)
assert rt.elapsed(begin, end) >= 2
rt.ok("cudaMemcpyToSymbol", variable, b"\5" * 64, c_size_t(64), c_size_t(0), HOST_TO_DEVICE)
rt.ok("cudaMemcpyFromSymbol", other, variable, c_size_t(64), c_size_t(0), DEVICE_TO_HOST)
assert other.raw == b"\5" * 64
bytes_of = c_size_t()
rt.ok("cudaGetSymbolSize", byref(bytes_of), variable)
assert bytes_of.value == 64
assert rt.number("cudaOccupancyMaxActiveBlocksPerMultiprocessor", kernel, 256, c_size_t(0)) == 4
rt.ok("cudaFuncSetAttribute", kernel, 8, 48 << 10)
rt.ok("cudaFuncGetAttributes", ctypes.create_string_buffer(1024), kernel)
told("kernel")

rt.ok("cudaStreamBeginCapture", stream, 0)
rt.launch(kernel, stream)
rt.ok("cudaMemsetAsync", one, 9, c_size_t(64), stream)
graph = c_void_p()
rt.ok("cudaStreamEndCapture", stream, byref(graph))
executable = rt.made("cudaGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
rt.ok("cudaGraphLaunch", executable, stream)
rt.ok("cudaStreamSynchronize", stream)
rt.copy(other, one, 64, DEVICE_TO_HOST)
assert other.raw == b"\11" * 64
rt.ok("cudaGraphExecDestroy", executable)
rt.ok("cudaGraphDestroy", graph)

pinned = rt.made("cudaMallocHost", c_size_t(MIB))
rt.ok("cudaMemcpyAsync", pinned, one, c_size_t(64), DEVICE_TO_HOST, stream)
rt.ok("cudaStreamSynchronize", stream)
assert (c_char * 64).from_address(pinned.value or 0).raw == b"\11" * 64
rt.ok("cudaFreeHost", pinned)
managed = rt.made("cudaMallocManaged", c_size_t(3 * MIB), 1)
told("managed")
rt.ok("cudaFree", managed)

child = os.fork()
if not child:
    os._exit(rt.code("cudaMalloc", byref(c_void_p()), c_size_t(MIB)))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == INITIALIZATION

rt.ok("cudaProfilerStart")
rt.ok("cudaProfilerStop")
for event in (begin, end):
    rt.ok("cudaEventDestroy", event)
rt.ok("cudaStreamDestroy", stream)
rt.ok("cudaDeviceReset")
assert told("reset") == free
again = rt.malloc(free)
told("full again")
