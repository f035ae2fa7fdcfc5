"""Kernels that use memory, and their helpers, for the programs of the tier. Runs with tests/native on its path.

The simulator knows their names and does the same itself. Words have 8 bytes; their number is always even.
"""

from collections.abc import Callable
from ctypes import addressof, byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p

from driver_client import AllocationProperties, Location, c_ulonglong, cu, device, ok

GIB = 1 << 30
GRANULE = 2 << 20
WORD = 8
THREADS, BLOCKS_PER_PROCESSOR = 256, 8
PROCESSORS, HOST_NODE, HOST_NODE_MAPS_MEMORY = 16, 134, 141  # CUdevice_attribute of cuda.h
CARD, HOST_NUMA = 1, 3  # CUmemLocationType
ACCESS_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE

# Each thread takes two words, then two words at a distance of all threads' words: neighbours read neighbouring words.
ENTRY = """
.visible .entry {name}(.param .u64 a, .param .u64 b, .param .u64 c)
{{
    .reg .pred %more;
    .reg .b32 %block, %size, %thread, %blocks;
    .reg .b64 %a, %b, %c, %at, %step, %end, %here, %one, %two, %sum;
    ld.param.u64 %a, [a];
    ld.param.u64 %b, [b];
    ld.param.u64 %c, [c];
    mov.u32 %block, %ctaid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %thread, %block, %size, %thread;
    mul.lo.u32 %blocks, %blocks, %size;
    mul.wide.u32 %at, %thread, 16;
    mul.wide.u32 %step, %blocks, 16;
    mov.u64 %sum, 0;
    {head}
again:
    setp.lt.u64 %more, %at, %end;
    @!%more bra done;
    {body}
    add.u64 %at, %at, %step;
    bra again;
done:
    {tail}
    ret;
}}
"""
PARTS = {
    "touch_fill": (
        "shl.b64 %end, %b, 3;",
        "add.u64 %here, %a, %at; st.global.v2.u64 [%here], {%c, %c};",
        "",
    ),
    "touch_add": (
        "shl.b64 %end, %b, 3;",
        "add.u64 %here, %a, %at; ld.global.v2.u64 {%one, %two}, [%here]; add.u64 %one, %one, %c;"
        " add.u64 %two, %two, %c; st.global.v2.u64 [%here], {%one, %two};",
        "",
    ),
    "touch_sum": (
        "shl.b64 %end, %c, 3;",
        "add.u64 %here, %b, %at; ld.global.v2.u64 {%one, %two}, [%here]; add.u64 %sum, %sum, %one;"
        " add.u64 %sum, %sum, %two;",
        "red.global.add.u64 [%a], %sum;",
    ),
}
# Does nothing. On the simulator it takes 50 ms, in which the host has done the work that the measured kernel stands
# for.
LEAD = "lead_50ms"
PTX = (
    ".version 6.0\n.target sm_70\n.address_size 64\n"
    + "".join(ENTRY.format(name=name, head=head, body=body, tail=tail) for name, (head, body, tail) in PARTS.items())
    + f".visible .entry {LEAD}() {{ ret; }}\n"
)


class Kernels:
    """The kernels in the current context; each call launches one kernel in the legacy stream."""

    def __init__(self) -> None:
        module = c_void_p()
        ok(cu.cuModuleLoadData(byref(module), c_char_p(PTX.encode())))
        self._functions = {}
        for name in (*PARTS, LEAD):
            self._functions[name] = c_void_p()
            ok(cu.cuModuleGetFunction(byref(self._functions[name]), module, name.encode()))
        self._blocks = BLOCKS_PER_PROCESSOR * (attribute(PROCESSORS) or 1)
        self._result = c_uint64()
        ok(cu.cuMemAlloc_v2(byref(self._result), c_size_t(WORD)))

    def fill(self, pointer: int, size: int, value: int) -> None:
        self._launch("touch_fill", pointer, size // WORD, value)

    def add(self, pointer: int, size: int, value: int) -> None:
        self._launch("touch_add", pointer, size // WORD, value)

    def read(self, pointer: int, size: int) -> None:
        """Adds up the words of the memory, onto earlier sums."""
        self._launch("touch_sum", self._result.value, pointer, size // WORD)

    def sum(self, pointer: int, size: int) -> int:
        """The sum of all words, modulo 2**64."""
        ok(cu.cuMemsetD8_v2(self._result, 0, c_size_t(WORD)))
        self.read(pointer, size)
        found = c_uint64()
        ok(cu.cuMemcpyDtoH_v2(byref(found), self._result, c_size_t(WORD)))
        return found.value

    def end(self) -> None:
        """Frees the memory for the sums."""
        ok(cu.cuMemFree_v2(self._result))

    def shortest_ms(self, work: Callable[[], object], turns: int) -> float:
        """Shortest time of `work` by events of the card: several turns, after one turn that does not count."""
        first, last, took, shortest = event(), event(), c_float(), float("inf")
        for turn in range(turns + 1):
            ok(cu.cuLaunchKernel(self._functions[LEAD], 1, 1, 1, 1, 1, 1, 0, None, None, None))
            ok(cu.cuEventRecord(first, None))
            work()
            ok(cu.cuEventRecord(last, None))
            ok(cu.cuEventSynchronize(last))
            ok(cu.cuEventElapsedTime(byref(took), first, last))
            if turn:
                shortest = min(shortest, took.value)
        return shortest

    def _launch(self, name: str, *values: int) -> None:
        numbers = (c_uint64 * 3)(*values)
        parameters = (c_void_p * 3)(*(addressof(numbers) + WORD * place for place in range(3)))
        shape = self._blocks, 1, 1, THREADS, 1, 1, 0
        ok(cu.cuLaunchKernel(self._functions[name], *shape, None, parameters, None))


def attribute(which: int) -> int | None:
    """An attribute of the first device; None: the driver does not know the attribute."""
    value = c_int()
    return None if cu.cuDeviceGetAttribute(byref(value), which, device()) else value.value


def event() -> c_void_p:
    made = c_void_p()
    ok(cu.cuEventCreate(byref(made), 0))
    return made


def create(kind: int, size: int) -> tuple[int, int]:
    """Status and handle of memory of the card, or of the host's NUMA node next to the card."""
    node = max(attribute(HOST_NODE) or 0, 0)  # -1: the machine has no NUMA nodes
    handle = c_ulonglong()
    properties = AllocationProperties(type=1, location=Location(kind, device() if kind == CARD else node))
    return cu.cuMemCreate(byref(handle), c_size_t(size), byref(properties), c_ulonglong(0)), handle.value


def maps_host() -> bool:
    """Whether the driver reports that it maps memory of the host's NUMA nodes."""
    return bool(attribute(HOST_NODE_MAPS_MEMORY))


def map_at(address: int, size: int, handle: int) -> None:
    ok(cu.cuMemMap(c_uint64(address), c_size_t(size), c_size_t(0), c_ulonglong(handle), c_ulonglong(0)))


def give_access(address: int, size: int) -> None:
    access = (c_int * 3)(CARD, device(), ACCESS_READ_WRITE)  # CUmemAccessDesc of cuda.h: location type, id, flags
    ok(cu.cuMemSetAccess(c_uint64(address), c_size_t(size), byref(access), c_size_t(1)))
