"""Host memory of simulated cards: where cuMemCreate makes it, what is counted, and how much is left."""

from pathlib import Path

import pytest
from simulated import MIB, Machine, heard, tell

CLIENT = "from simulator_client import *\nfrom simulator_blocks import *\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "A100-40x2")


KINDS = {
    "physical": ("p = ok(cu.cuMemCreate(6 * MIB, home(node=1), 0))", "ok(cu.cuMemRelease(p))", 6 * MIB),
    "mapped": ("p = mapped(4 * MIB, node=0)", "unmap(p, 4 * MIB)", 4 * MIB),
    "pinned": ("p = pinned(3_000_001)", "ok(cu.cuMemFreeHost(p))", 3_000_001),
    "pinned the old way": ("p = ok(cu.cuMemAllocHost(MIB))", "ok(cu.cuMemFreeHost(p))", MIB),
    "registered": (
        "import mmap; own = mmap.mmap(-1, 2 * MIB); p = ctypes.addressof(ctypes.c_char.from_buffer(own))\n"
        "ok(cu.cuMemHostRegister(p, 2 * MIB, 0))",
        "ok(cu.cuMemHostUnregister(p))",
        2 * MIB,
    ),
    "of a context": (
        "own = ok(cu.cuCtxCreate(None, 0, 1)); p = pinned(MIB)\n"
        "ok(cu.cuCtxSetCurrent(first)); ok(cu.cuCtxPushCurrent(own))",
        "ok(cu.cuCtxDestroy(own))",
        MIB,
    ),
    "registered for a context": (
        "import mmap; memory = mmap.mmap(-1, MIB); p = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "own = ok(cu.cuCtxCreate(None, 0, 1)); ok(cu.cuMemHostRegister(p, MIB, 0))",
        "ok(cu.cuCtxDestroy(own))",
        MIB,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_is_counted_and_given_back(machine: Machine, kind: str) -> None:
    make, drop, size = KINDS[kind]
    client = machine.start(
        f"{CLIENT}import ctypes\nfirst = context()\nbefore = free()\n{make}\nreport(before - free())\nwait()\n"
        f"{drop}\nreport(1)\nwait()"
    )
    taken = heard(client)
    card = int("a context" in kind)
    assert taken == 0 or card
    held = [0, 0]
    held[card] = size
    assert [machine.card(i).host for i in range(2)] == held
    assert machine.process(client.pid).host == tuple(held)
    tell(client)
    heard(client)
    assert [machine.card(i).host for i in range(2)] == [0, 0]
    assert machine.process(client.pid).host == (0, 0)
    assert machine.process(client.pid).host_peak == tuple(held)
    tell(client)
    assert client.wait() == 0


def test_host_memory_goes_with_its_process(machine: Machine) -> None:
    script = f"{CLIENT}context()\nmapped(8 * MIB, node=0)\npinned(MIB)\nreport(1)\nwait()"
    clients = [machine.start(script), machine.start(script)]
    for client in clients:
        heard(client)
    assert machine.card().host == 18 * MIB
    clients[0].kill()
    clients[0].wait()
    assert machine.card().host == 9 * MIB
    assert machine.process(clients[0].pid).host == (0, 0)
    assert machine.process(clients[0].pid).host_peak == (9 * MIB, 0)
    tell(clients[1])
    assert clients[1].wait() == 0
    assert machine.card().host == 0


MAKER = (
    CLIENT
    + """
context()
p = home(node=0)
p.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
handle = ok(cu.cuMemCreate(4 * MIB, p, 0))
report(int(ok(cu.cuMemExportToShareableHandle(handle, p.requestedHandleTypes, 0))))
wait()
ok(cu.cuMemRelease(handle))
report(1)
wait()
"""
)
TAKER = (
    CLIENT
    + """
context()
fd = os.open("/proc/{pid}/fd/{fd}", os.O_RDWR)
kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
handle = ok(cu.cuMemImportFromShareableHandle(fd, kind))
report(1)
wait()
report(free())
wait()
ok(cu.cuMemRelease(handle))
report(1)
wait()
"""
)


@pytest.mark.parametrize("death", [False, True])
def test_shared_host_memory_is_paid_for_by_who_still_has_it(machine: Machine, *, death: bool) -> None:
    """The creator frees the memory or is killed, then the importer frees it."""
    maker = machine.start(MAKER)
    fd = heard(maker)
    taker = machine.start(TAKER.format(pid=maker.pid, fd=fd))
    heard(taker)
    payers = (maker.pid, taker.pid)
    assert [machine.process(pid).host[0] for pid in payers] == [4 * MIB, 0]
    if death:
        maker.kill()
        maker.wait()
    else:
        tell(maker)
        heard(maker)
    tell(taker)  # asks the card, which is when it pays for a dead one
    heard(taker)
    assert [machine.process(pid).host[0] for pid in payers] == [0, 4 * MIB]
    tell(taker)
    heard(taker)
    assert machine.card().host == 0
    for client in (taker,) if death else (maker, taker):
        tell(client)
        assert client.wait() == 0


PLACES = """
from cuda.bindings import driver as cu
kind = cu.CUmemLocationType
def made(place, id, handles=0):
    p = home()
    p.location.type, p.location.id = place, id
    if handles:
        p.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    made = cu.cuMemCreate(2 * MIB, p, 0)
    if not code(made):
        ok(cu.cuMemRelease(made[1]))
    return code(made)
A = cu.CUdevice_attribute
def ask(attribute, card):
    error, value = cu.cuDeviceGetAttribute(attribute, card)
    return -error.value if error else value
context()
NUMA, HOST, MINE = (
    kind.CU_MEM_LOCATION_TYPE_HOST_NUMA, kind.CU_MEM_LOCATION_TYPE_HOST, kind.CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
report({
    "nodes": [made(NUMA, i) for i in (-1, 0, 1, 2)],
    "any": made(HOST, 7),
    "any, to be exported": made(HOST, 0, 1),
    "of the thread": made(MINE, 0),
    "supported": ask(A.CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0),
    "node": [ask(A.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, card) for card in range(ok(cu.cuDeviceGetCount()))],
})
"""


@pytest.mark.parametrize(
    ("spec", "strict", "nodes", "anywhere", "exported", "mine", "supported", "node"),
    [
        ("A100-40x2", "", [1, 0, 0, 1], 0, 1, 1, 1, [0, 1]),
        ("H100", "", [1, 0, 1, 1], 0, 1, 1, 1, [0]),
        ("H100", "host-memory", [1, 801, 1, 1], 801, 801, 1, 0, [0]),
        ("GB10", "", [1, 801, 1, 1], 801, 801, 1, 0, [0]),
        ("A100-80x4@12.4", "", [1, 0, 0, 1], 1, 1, 1, -1, [0, 0, 1, 1]),
        ("T4x2@11.8", "", [1, 1, 1, 1], 1, 1, 1, -1, [-1, -1]),
    ],
)
def test_where_host_memory_can_be_made(
    tmp_path: Path,
    spec: str,
    strict: str,
    nodes: list[int],
    anywhere: int,
    exported: int,
    mine: int,
    supported: int,
    node: list[int],
) -> None:
    machine = Machine(tmp_path / "cards", spec)
    assert machine.run(CLIENT + PLACES, VGPU_SIM_STRICT=strict) == {
        "nodes": nodes,
        "any": anywhere,
        "any, to be exported": exported,
        "of the thread": mine,
        "supported": supported,
        "node": node,
    }


def test_a_full_card_refuses_every_kind_until_its_holder_is_gone(machine: Machine) -> None:
    """What another process holds counts for plain and for physical memory alike; host memory is still available."""
    holder = machine.start(f"{CLIENT}context()\nok(cu.cuMemAlloc(free() - 600 * MIB))\nreport(1)\nwait()")
    heard(holder)
    client = machine.start(
        CLIENT
        + """
context()
ask = lambda: [code(cu.cuMemAlloc(256 * MIB)), code(cu.cuMemCreate(256 * MIB, home(), 0))]
report([*ask(), code(cu.cuMemCreate(256 * MIB, home(node=0), 0)), code(cu.cuMemHostAlloc(256 * MIB, 0))])
wait()
report(ask())
wait()
"""
    )
    assert heard(client) == [2, 2, 0, 0]
    holder.kill()
    holder.wait()
    tell(client)
    assert heard(client) == [0, 0]
    tell(client)
    assert client.wait() == 0
