"""Reported bugs of intercept libraries about NVML, queries of devices, and what nvidia-smi shows."""

import shutil
from pathlib import Path

import pytest
from cases_slice import slice_of
from preloaded import MIB, environment, python

from vgpu.native import CardLimit, Limits, Region, paths, simulator

NVML = """
import pynvml as n
n.nvmlInit()
cards = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
"""
PRELUDE = "from driver_client import *\n" + NVML
CREW = "from crew import *\n"


def both(folder: Path, script: str, cards: str) -> list[str]:
    """What a script prints inside a slice, which has to be what it prints without the library."""
    limited = python(PRELUDE + script, slice_of(folder, cards=cards))
    assert limited == python(PRELUDE + script, environment(folder, cards=cards, preload=False))
    return limited


def test_nothing_to_write_the_answer_to(tmp_path: Path) -> None:
    """Case 18, another of its kind: NULL and wrong versions in every hooked NVML query and the 32-bit CUDA ones."""
    script = """
import ctypes
lib, card = ctypes.CDLL("libnvidia-ml.so.1"), cards[0]
print(lib.nvmlDeviceGetUtilizationRates(card, None), lib.nvmlDeviceGetUtilizationRates(None, None))
print(lib.nvmlDeviceGetProcessUtilization(card, None, None, c_ulonglong(0)))
for kind in ("Compute", "Graphics", "MPSCompute"):
    for version in ("", "_v2", "_v3"):
        query = getattr(lib, f"nvmlDeviceGet{kind}RunningProcesses{version}")
        print(query(card, None, None), query(None, None, None), query(None, byref(c_uint(4)), None))
for version in (0, 1, 0x2000028 + 8):
    print(lib.nvmlDeviceGetMemoryInfo_v2(card, byref((c_ulonglong * 5)(version))))
start()
print(cu.cuMemGetInfo(None, None), cu.cuDeviceTotalMem(None, 0), cu.cuDeviceTotalMem(byref(c_uint()), 9))
"""
    both(tmp_path, script, "T4")


@pytest.mark.parametrize("memory", [1000, 300, 500_000])
def test_all_totals_are_the_limit_that_holds_now(tmp_path: Path, memory: int) -> None:
    """Case 26, another of its kind: totals of CUDA and NVML part after a change of the limit; also above the card."""
    folder = tmp_path / "region"
    folder.mkdir()
    simulator.create(tmp_path / "cards", "T4x2")
    cards = simulator.cards(tmp_path / "cards")
    script = """
import ctypes
start()
alloc(600 * MIB)
print("go")
input()
for i in (0, 1):
    one, two = n.nvmlDeviceGetMemoryInfo(cards[i]), n.nvmlDeviceGetMemoryInfo(cards[i], version=n.nvmlMemory_v2)
    print({one.total, two.total, total_mem(i), info()[1] if i == 0 else one.total} == {one.total}, one.total // MIB)
    adds_up = one.used + one.free == one.total, two.used + two.free + two.reserved == two.total
    print(*adds_up, one.used // MIB, one.free // MIB)
print(info()[0] == n.nvmlDeviceGetMemoryInfo(cards[0]).free, alloc(1)[0] == (0 if info()[0] else 2))
"""
    limits = Limits(tuple(CardLimit(card.uuid, 1000 * MIB) for card in cards))
    with Region.create(folder, limits) as region:
        env = environment(tmp_path, cards="T4x2", VGPU_DIR=str(folder))
        changed = f"""
from vgpu.native import CardLimit, Limits, Region
from pathlib import Path
with Region.open(Path({str(folder)!r}), writable=True) as region:
    old = region.limits()
    region.set_limits(Limits(tuple(CardLimit(c.uuid, {memory} * MIB) for c in old.cards)))
"""
        lines = python(PRELUDE + script.replace("input()", changed), env)
        assert region.limits().cards[0].memory == memory * MIB
    assert lines[0] == "go"
    total = min(memory, cards[0].memory // MIB)
    used = min(600, total) if total < cards[0].memory // MIB else None
    assert lines[1] == lines[3] == f"True {total}"
    assert lines[2].startswith("True True ")
    if used is not None:
        assert lines[2] == f"True True {used} {total - used}"
        assert lines[4] == f"True True 0 {total}"
    assert lines[5] == "True True"


def test_processes_come_and_go_in_the_list(env: dict[str, str]) -> None:
    """Case 54, another of its kind: a killed process leaves the list, and a forked one has an entry of its own."""
    script = (
        NVML
        + """
def listed():
    return sorted((p.pid, p.usedGpuMemory // MIB) for p in n.nvmlDeviceGetComputeRunningProcesses(cards[0]))

members = crew(3)
sizes = (100, 200, 300)
for member, size in zip(members, sizes):
    member.do("start()")
    member.ask(f"alloc({size} * MIB)[0]")
expected = sorted((m.pid, s) for m, s in zip(members, sizes))
print(listed() == expected, [n.nvmlSystemGetProcessName(m.pid) != "" for m in members])
members[1].kill()
late = Member()
print(late.do("start()"), late.ask("alloc(701 * MIB)[0]"), late.ask("alloc(600 * MIB)[0]"))
expected = sorted([(members[0].pid, 100), (members[2].pid, 300), (late.pid, 600)])
print(listed() == expected)
members[0].leave()
members[2].kill()
import time
deadline = time.monotonic() + 30
while len(listed()) > 1 and time.monotonic() < deadline:
    pass
print(listed() == [(late.pid, 600)])
"""
    )
    assert python(CREW + script, env) == ["True [True, True, True]", "None 2 0", "True", "True"]


def costs(tmp_path: Path, contexts: int) -> list[str]:
    """Memory by NVML and by CUDA of a process with that many contexts, in a slice that knows what one costs."""
    folder = tmp_path / "region"
    folder.mkdir()
    simulator.create(tmp_path / "cards", "T4")
    (card,) = simulator.cards(tmp_path / "cards")
    script = f"""
ok(cu.cuInit(0))
for _ in range({contexts}):
    context()
alloc(300 * MIB)
memory = n.nvmlDeviceGetMemoryInfo(cards[0])
mine = n.nvmlDeviceGetComputeRunningProcesses(cards[0])[0].usedGpuMemory
print(memory.used, used(), mine)
"""
    with Region.create(folder, Limits((CardLimit(card.uuid, 2000 * MIB, context_bytes=card.context_bytes),))) as region:
        lines = python(PRELUDE + script, environment(tmp_path, VGPU_DIR=str(folder)))
        region.reap()
        assert region.usage().cards[0].used == 0
    return lines


def test_a_context_shows_in_the_container_as_on_the_host(tmp_path: Path) -> None:
    """Case 55: the pod shows hundreds of MiB less than the host, because contexts are not counted."""
    lines = costs(tmp_path, 1)
    (truth,) = simulator.processes(tmp_path / "cards")
    assert lines == [" ".join([str(truth.peak[0])] * 3)]


def test_every_context_is_counted(tmp_path: Path) -> None:
    """Case 55, another of its kind: a process with three contexts on one card."""
    lines = costs(tmp_path, 3)
    (truth,) = simulator.processes(tmp_path / "cards")
    assert lines == [" ".join([str(truth.peak[0])] * 3)]


@pytest.mark.parametrize("cards", ["T4x2", "H100x2"])
def test_peers_are_as_the_driver_says(tmp_path: Path, cards: str) -> None:
    """Case 57: under a hook, direct access between cards is off, or device numbers are invalid."""
    script = """
ok(cu.cuInit(0))
first, second = context(0), context(1)
can, value = c_int(-1), c_int(-1)
print([(cu.cuDeviceCanAccessPeer(byref(can), a, b), can.value) for a in (0, 1, 7) for b in (0, 1)])
print([(cu.cuDeviceGetP2PAttribute(byref(value), kind, 0, 1), value.value) for kind in (1, 2, 3, 4, 99)])
print(cu.cuCtxEnablePeerAccess(first, 0), cu.cuCtxEnablePeerAccess(first, 0), cu.cuCtxDisablePeerAccess(first))
class Multicast(Structure):
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_ulonglong), ("flags", c_ulonglong)]
handle, step = c_ulonglong(), c_size_t()
group = Multicast(2, 2 * MIB, 0, 0)
print(cu.cuMulticastGetGranularity(byref(step), byref(group), 0), cu.cuMulticastCreate(byref(handle), byref(group)))
print(cu.cuMulticastCreate(None, None))
"""
    both(tmp_path, script, cards)


def test_links_are_as_the_driver_says(tmp_path: Path) -> None:
    """Case 57, another of its kind: what collective libraries ask NVML about links and distances."""
    script = """
def said(call, *arguments):
    try:
        return call(*arguments)
    except n.NVMLError as error:
        return str(error)
for link in (0, 1, 17, 99):
    print(said(n.nvmlDeviceGetNvLinkState, cards[0], link), said(n.nvmlDeviceGetNvLinkVersion, cards[0], link))
print(said(n.nvmlDeviceGetTopologyCommonAncestor, *cards), said(n.nvmlDeviceGetP2PStatus, *cards, 0))
print(list(n.nvmlDeviceGetMemoryAffinity(cards[0], 1, 0)), said(n.nvmlDeviceGetCudaComputeCapability, cards[1]))
print([n.nvmlDeviceGetPciInfo(card).busId for card in cards])
"""
    both(tmp_path, script, "H100x2")


def test_accounting_needs_no_nvml(tmp_path: Path) -> None:
    """Case 58: with MPS the driver lists other processes than those that allocate; here there is no NVML at all."""
    folder = tmp_path / "driver"
    folder.mkdir()
    shutil.copy(paths.simulator() / "libcuda.so.1", folder)
    script = """
members = crew(3)
for member in members:
    member.do("start()")
print([m.ask("alloc(300 * MIB)[0]") for m in members], members[0].ask("alloc(101 * MIB)[0]"))
members[1].kill()
print(members[0].ask("alloc(401 * MIB)[0]"), members[0].ask("alloc(400 * MIB)[0]"), members[2].ask("used() // MIB"))
"""
    env = slice_of(tmp_path) | {"LD_LIBRARY_PATH": str(folder)}
    assert python(CREW + script, env) == ["[0, 0, 0] 2", "2 0 1000"]


def test_processes_under_one_server_are_counted_apart(env: dict[str, str]) -> None:
    """Case 58, another of its kind: a server that holds memory, and clients forked from it."""
    script = (
        NVML
        + """
members = crew(2)
start()
alloc(200 * MIB)
for member in members:
    member.do("start()")
print([m.ask("alloc(300 * MIB)[0]") for m in members], used() // MIB, alloc(201 * MIB)[0])
print(sorted(p.usedGpuMemory // MIB for p in n.nvmlDeviceGetComputeRunningProcesses(cards[0])),
      n.nvmlDeviceGetMPSComputeRunningProcesses(cards[0]))
members[0].kill()
print(alloc(501 * MIB)[0], alloc(500 * MIB)[0], members[1].ask("used() // MIB"))
"""
    )
    assert python(CREW + script, env) == ["[0, 0] 800 2", "[200, 300, 300] []", "2 0 1000"]


@pytest.mark.parametrize("cards", ["T4", "H100"])
def test_what_a_card_is_does_not_change(tmp_path: Path, cards: str) -> None:
    """Case 67: caches of compiled models are refused because attributes, name or UUID of the device differ."""
    script = """
ok(cu.cuInit(0))
value, name, uuid = c_int(), (c_char * 64)(), (c_char * 16)()
print([(cu.cuDeviceGetAttribute(byref(value), i, 0), value.value) for i in range(1, 150)])
print(cu.cuDeviceGetName(name, 64, 0), name.value)
print(cu.cuDeviceGetUuid_v2(uuid, 0), uuid.raw, cu.cuDeviceGetUuid(uuid, 0), uuid.raw)
print(cu.cuDeviceGetPCIBusId(name, 64, 0), name.value)
"""
    both(tmp_path, script, cards)


def test_what_a_card_was_made_for_does_not_change(tmp_path: Path) -> None:
    """Case 67, another of its kind: capability, properties and limits by the older questions and by NVML."""
    script = """
start()
major, minor, properties, size = c_int(), c_int(), (c_int * 64)(), c_size_t()
print(cu.cuDeviceComputeCapability(byref(major), byref(minor), 0), major.value, minor.value)
print(cu.cuDeviceGetProperties(properties, 0), list(properties))
print([(cu.cuCtxGetLimit(byref(size), i), size.value) for i in range(8)])
print(n.nvmlDeviceGetCudaComputeCapability(cards[0]), n.nvmlDeviceGetName(cards[0]), n.nvmlDeviceGetBrand(cards[0]))
print(n.nvmlSystemGetCudaDriverVersion(), n.nvmlDeviceGetMinorNumber(cards[0]))
"""
    both(tmp_path, script, "T4")
