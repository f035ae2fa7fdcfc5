"""Memory that several processes map: IPC handles, shareable handles, memory of other interfaces."""

import subprocess
from pathlib import Path

import pytest
from simulated import MIB, Machine, eventually, heard, tell

CLIENT = "from simulator_client import *\nimport ctypes\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "H100x2")


EXPORT = (
    CLIENT
    + """
context()
p = ok(cu.cuMemAlloc(10 * MIB + 3))
ok(cu.cuMemsetD8(int(p) + 9 * MIB, 7, 100))
handles = [ok(cu.cuIpcGetMemHandle(x)) for x in (p, int(p) + 5)]
first, again = (ctypes.string_at(h.getPtr(), 64) for h in handles)
report([first.hex(), first == again])
def byte(at):
    value = ctypes.c_ubyte()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(value), int(p) + at, 1))
    return value.value
while (line := wait()) != "end":
    if line == "free":
        ok(cu.cuMemFree(p))
    report([byte(9 * MIB + 5), byte(3)] if line == "read" else line)
"""
)
IMPORT = (
    CLIENT
    + """
primary = context(int(os.environ.get("DEVICE", "0")))
def handle(text):
    h = cu.CUipcMemHandle()
    ctypes.memmove(h.getPtr(), bytes.fromhex(text), 64)
    return h
def opened(text, flags=1):
    return cu.cuIpcOpenMemHandle(handle(text), flags)
def byte(p, at):
    value = ctypes.c_ubyte()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(value), int(p) + at, 1))
    return value.value
text = os.environ["HANDLE"]
p = ok(opened(text))
"""
)


def exporter(machine: Machine) -> tuple[subprocess.Popen[str], str]:
    process = machine.start(EXPORT)
    text, same = heard(process)
    assert same
    return process, text


def test_an_importer_sees_the_same_bytes_and_pays_nothing(machine: Machine) -> None:
    source, text = exporter(machine)
    card = machine.card()
    held = card.used
    found = machine.run(
        IMPORT
        + """
before = [byte(p, 9 * MIB + 5), byte(p, 0)]
ok(cu.cuMemsetD8(int(p) + 3, 99, 1))
A = cu.CUpointer_attribute
ask = lambda a: int(ok(cu.cuPointerGetAttribute(a, int(p) + 1)))
told = [ask(A.CU_POINTER_ATTRIBUTE_RANGE_SIZE), ask(A.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE),
    ask(A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)]
report([before, told, int(ok(opened(text))) == int(p), code(opened(text, 0)), code(opened("00" * 64)),
    code(cu.cuMemFree(p)), code(cu.cuIpcGetMemHandle(p)),
    [code(cu.cuIpcCloseMemHandle(p)) for _ in range(3)], code(cu.cuMemsetD8(p, 1, 1))])
""",
        HANDLE=text,
    )
    assert found == [[7, 0], [10 * MIB + 3, 0, 0], True, 1, 400, 1, 1, [0, 0, 1], 1]
    tell(source, "read")
    assert heard(source) == [7, 99]
    assert machine.card().used == held == card.context_bytes + 10 * MIB + 3
    assert machine.card().peak == held + card.context_bytes
    tell(source, "end")
    assert source.wait(10) == 0
    assert list(machine.folder.glob("shared.*")) == []


def test_an_importer_on_the_other_card_needs_a_link_between_them(tmp_path: Path) -> None:
    for spec, answer in (("H100x2", 0), ("T4x2", 205)):
        machine = Machine(tmp_path / spec, spec)
        source, text = exporter(machine)
        script = IMPORT.replace("p = ok(opened(text))", "report(code(opened(text)))")
        assert machine.run(script, HANDLE=text, DEVICE="1") == answer
        assert machine.run(script, HANDLE=text, CUDA_VISIBLE_DEVICES="1") == 101
        tell(source, "end")
        source.wait(10)


def test_a_handle_ends_with_its_memory_and_its_process(machine: Machine) -> None:
    script = IMPORT.replace("p = ok(opened(text))", "report(code(opened(text)))")
    source, text = exporter(machine)
    tell(source, "free")
    heard(source)
    assert machine.run(script, HANDLE=text) == 400
    source.kill()
    source.wait()
    source, text = exporter(machine)
    source.kill()
    source.wait()
    assert machine.run(script, HANDLE=text) == 400
    third, _ = exporter(machine)
    assert len(list(machine.folder.glob("shared.*"))) == 1  # what the killed one left is swept
    tell(third, "end")
    third.wait(10)


def test_an_importer_outlives_its_exporter_and_the_reverse(machine: Machine) -> None:
    source, text = exporter(machine)
    user = machine.start(IMPORT + "report(1)\nwait()\nreport(byte(p, 9 * MIB + 5))\nwait()", HANDLE=text)
    heard(user)
    source.kill()
    source.wait()
    tell(user)
    assert heard(user) == 7
    assert machine.card().used == machine.card().context_bytes
    user.kill()
    user.wait()
    source, text = exporter(machine)
    user = machine.start(IMPORT + "report(1)\nwait()", HANDLE=text)
    heard(user)
    user.kill()
    user.wait()
    tell(source, "read")
    assert heard(source) == [7, 0]
    eventually("only the exporter's memory", lambda: machine.card().used == machine.card().context_bytes + 10 * MIB + 3)
    tell(source, "end")
    source.wait(10)


def test_what_has_no_handle(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
p = ok(cu.cuMemAlloc(100))
h = ok(cu.cuIpcGetMemHandle(p))
kinds = ok(cu.cuMemAllocAsync(100, 0)), ok(cu.cuMemAllocManaged(100, 1)), ok(cu.cuMemHostAlloc(100, 0)), 4096
report([code(cu.cuIpcOpenMemHandle(h, 1)), [code(cu.cuIpcGetMemHandle(int(x))) for x in kinds],
    code(cu.cuMemFree(p)), code(cu.cuIpcCloseMemHandle(p))])
"""
    )
    assert found == [201, [1, 1, 1, 1], 0, 1]


def test_memory_of_another_interface_is_paid_by_whoever_imports_it(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
context()
rest = free()
def description(size, fd=None, kind=cu.CUexternalMemoryHandleType.CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD):
    d = cu.CUDA_EXTERNAL_MEMORY_HANDLE_DESC()
    d.type, d.size, d.handle.fd = kind, size, fd
    return d
def buffer(offset, size):
    b = cu.CUDA_EXTERNAL_MEMORY_BUFFER_DESC()
    b.offset, b.size = offset, size
    return b
fd = os.memfd_create("frame")
os.truncate(fd, 8 * MIB)
os.pwrite(fd, b"frame", MIB + 100)
mine = os.dup(fd)
memory = ok(cu.cuImportExternalMemory(description(8 * MIB, fd)))
costs = [rest - free()]
p = ok(cu.cuExternalMemoryGetMappedBuffer(memory, buffer(MIB + 100, 2 * MIB)))
back = ctypes.create_string_buffer(5)
ok(cu.cuMemcpyDtoH(ctypes.addressof(back), p, 5))
ok(cu.cuMemcpyHtoD(int(p) + 5, b"!", 1))
costs.append(rest - free())
wrong = [code(cu.cuExternalMemoryGetMappedBuffer(memory, buffer(7 * MIB, MIB + 1))),
    code(cu.cuImportExternalMemory(description(9 * MIB, mine))), code(cu.cuImportExternalMemory(description(1, 12345)))]
ok(cu.cuDestroyExternalMemory(memory))
costs.append(rest - free())
wrong += [code(cu.cuDestroyExternalMemory(memory)), code(cu.cuExternalMemoryGetMappedBuffer(memory, buffer(0, 1)))]
ok(cu.cuMemFree(p))
costs.append(rest - free())
try:
    os.fstat(fd)
    closed = False
except OSError:
    closed = True
report([back.raw.decode(), os.pread(mine, 6, MIB + 100).decode(), costs, wrong, closed, code(cu.cuMemFree(p))])
"""
    )
    assert found == ["frame", "frame!", [8 * MIB, 8 * MIB, 8 * MIB, 0], [1, 1, 1, 400, 400], True, 1]


PHYSICAL = (
    CLIENT
    + """
context()
fd_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
def properties(handles=fd_type, device=0):
    p = cu.CUmemAllocationProp()
    p.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    p.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    p.location.id = device
    p.requestedHandleTypes = handles
    return p
def mapped(handle, size=4 * MIB):
    va = ok(cu.cuMemAddressReserve(size, 0, 0, 0))
    ok(cu.cuMemMap(va, size, 0, handle, 0))
    a = cu.CUmemAccessDesc()
    a.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    a.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(cu.cuMemSetAccess(va, size, [a], 1))
    return va
def byte(p, at):
    value = ctypes.c_ubyte()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(value), int(p) + at, 1))
    return value.value
"""
)
CREATOR = (
    PHYSICAL
    + """
handle = ok(cu.cuMemCreate(4 * MIB, properties(), 0))
va = mapped(handle)
ok(cu.cuMemsetD8(int(va) + MIB, 5, 10))
fd = ok(cu.cuMemExportToShareableHandle(handle, fd_type, 0))
report([os.getpid(), fd])
while (line := wait()) != "end":
    if line == "drop":
        ok(cu.cuMemUnmap(va, 4 * MIB))
        ok(cu.cuMemRelease(handle))
    report([byte(va, MIB), byte(va, 0)] if line == "read" else line)
"""
)
HOLDER = (
    PHYSICAL
    + """
fd = os.open("/proc/{}/fd/{}".format(*os.environ["FILE"].split()), os.O_RDWR)
handle = ok(cu.cuMemImportFromShareableHandle(fd, fd_type))
os.close(fd)
va = mapped(handle)
report(byte(va, MIB))
while (line := wait()) != "end":
    if line == "write":
        ok(cu.cuMemsetD8(va, 9, 1))
    if line == "drop":
        ok(cu.cuMemRelease(handle))
        ok(cu.cuMemUnmap(va, 4 * MIB))
    report(free() if line == "free" else byte(va, MIB) if line == "read" else line)
"""
)


def shared_between_two(machine: Machine) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    creator = machine.start(CREATOR)
    pid, fd = heard(creator)
    holder = machine.start(HOLDER, FILE=f"{pid} {fd}")
    assert heard(holder) == 5
    return creator, holder


def ask(process: subprocess.Popen[str], line: str) -> object:
    tell(process, line)
    return heard(process)


def paid(machine: Machine, process: subprocess.Popen[str]) -> int:
    return machine.process(process.pid).used[0] - machine.card().context_bytes


def test_physical_memory_is_paid_once_by_one_of_its_holders(machine: Machine) -> None:
    creator, holder = shared_between_two(machine)
    ask(holder, "write")
    assert ask(creator, "read") == [5, 9]
    assert [paid(machine, creator), paid(machine, holder)] == [4 * MIB, 0]
    ask(creator, "drop")
    assert [paid(machine, creator), paid(machine, holder)] == [0, 4 * MIB]
    assert ask(holder, "read") == 5
    ask(holder, "drop")
    assert [paid(machine, creator), paid(machine, holder)] == [0, 0]
    for process in (creator, holder):
        tell(process, "end")
        assert process.wait(10) == 0
    assert machine.card().used == 0


def test_a_killed_payer_is_replaced_by_the_next_holder(machine: Machine) -> None:
    creator, holder = shared_between_two(machine)
    creator.kill()
    creator.wait()
    left = ask(holder, "free")
    card = machine.card()
    assert left == card.memory - card.context_bytes - 4 * MIB
    assert paid(machine, holder) == 4 * MIB
    assert ask(holder, "read") == 5
    holder.kill()
    holder.wait()
    eventually("the end of the memory", lambda: machine.card().used == 0)


def test_a_killed_holder_costs_its_creator_nothing(machine: Machine) -> None:
    creator, holder = shared_between_two(machine)
    holder.kill()
    holder.wait()
    assert ask(creator, "read") == [5, 0]
    ask(creator, "drop")
    assert paid(machine, creator) == 0
    tell(creator, "end")
    creator.wait(10)


def test_handles_are_counted_by_create_import_and_map(machine: Machine) -> None:
    found = machine.run(
        PHYSICAL
        + """
rest = free()
cost = lambda: (rest - free()) // MIB
handle = ok(cu.cuMemCreate(4 * MIB, properties(), 0))
fd = ok(cu.cuMemExportToShareableHandle(handle, fd_type, 0))
second = ok(cu.cuMemImportFromShareableHandle(fd, fd_type))
steps = [cost()]
ok(cu.cuMemRelease(handle))
steps.append(cost())
va = mapped(second)
ok(cu.cuMemRelease(second))
steps.append(cost())
plain = ok(cu.cuMemCreate(2 * MIB, properties(cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE), 0))
wrong = [code(cu.cuMemExportToShareableHandle(plain, fd_type, 0)), code(cu.cuMemRelease(second)),
    code(cu.cuMemImportFromShareableHandle(987, fd_type)),
    code(cu.cuMemImportFromShareableHandle(os.open("/proc/self/exe", os.O_RDONLY), fd_type)),
    code(cu.cuMemExportToShareableHandle(plain, cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC, 0))]
ok(cu.cuMemRelease(plain))
ok(cu.cuMemUnmap(va, 4 * MIB))
steps.append(cost())
report([steps, wrong])
"""
    )
    assert found == [[4, 4, 4, 0], [1, 1, 1, 1, 801]]
