"""The simulated libnvidia-ml, by nvidia-ml-py: identity, memory, processes, load, topology, events, struct versions."""

from pathlib import Path

import pytest
from simulated import MIB, Machine, heard, tell

from vgpu.native import simulator

CLIENT = """
import json, os, sys
from pynvml import *
def report(value):
    print(json.dumps(value), flush=True)
def code(call, *arguments):
    try:
        return call(*arguments)
    except NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")
def text(value):
    return value.decode() if isinstance(value, bytes) else value
"""
START = CLIENT + "nvmlInit()\nh = nvmlDeviceGetHandleByIndex(0)\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x4")


def test_devices_are_found_by_index_uuid_address_and_serial(machine: Machine) -> None:
    found = machine.run(
        START
        + """
out = []
for i in range(nvmlDeviceGetCount()):
    d = nvmlDeviceGetHandleByIndex(i)
    same = [nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(d)),
    nvmlDeviceGetHandleByPciBusId(nvmlDeviceGetPciInfo(d).busId),
            nvmlDeviceGetHandleBySerial(nvmlDeviceGetSerial(d))]
    out.append([text(nvmlDeviceGetUUID(d)), [nvmlDeviceGetIndex(x) for x in same], nvmlDeviceGetMinorNumber(d),
    text(nvmlDeviceGetName(d))])
report([out, code(nvmlDeviceGetHandleByIndex, 4), code(nvmlDeviceGetHandleByUUID, b"GPU-0"),
    code(nvmlDeviceGetHandleByPciBusId, b"0000:FF:00.0")])
"""
    )
    uuids = [card.uuid for card in simulator.cards(machine.folder)]
    assert found == [
        [[uuid, [i, i, i], i, "Tesla T4"] for i, uuid in enumerate(uuids)],
        "InvalidArgument",
        "NotFound",
        "NotFound",
    ]


def test_cuda_and_nvml_agree_on_memory(machine: Machine) -> None:
    holder = machine.start(
        "from simulator_client import *\ncontext()\nok(cu.cuMemAlloc(100 * MIB))\n"
        "report([ok(cu.cuDeviceTotalMem(0)), free()])\nwait()"
    )
    total, free = heard(holder)
    first, second, processes = machine.run(
        START
        + """
one, two = nvmlDeviceGetMemoryInfo(h), nvmlDeviceGetMemoryInfo(h, version=nvmlMemory_v2)
three = [[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetComputeRunningProcesses(h)]
report([[one.total, one.free, one.used], [two.total, two.reserved, two.free, two.used], three])
"""
    )
    card = machine.card()
    assert second == [card.memory + card.reserved, card.reserved, free, card.context_bytes + 100 * MIB]
    assert first == [second[0], free, second[3] + card.reserved]
    assert total == card.memory == second[0] - second[1]
    assert processes == [[holder.pid, second[3]]]
    tell(holder)
    holder.wait()
    assert machine.run(START + "report(len(nvmlDeviceGetComputeRunningProcesses(h)))") == 0


def test_every_version_of_the_process_list(machine: Machine) -> None:
    holders = [machine.start("from simulator_client import *\ncontext()\nreport(1)\nwait()") for _ in range(2)]
    for holder in holders:
        heard(holder)
    found = machine.run(
        START
        + """
import ctypes, pynvml
class V1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]
class V2(ctypes.Structure):
    _fields_ = [*V1._fields_, ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]
out = []
for name, struct in (("", V1), ("_v2", V2), ("_v3", V2)):
    call = getattr(pynvml.nvmlLib, "nvmlDeviceGetComputeRunningProcesses" + name)
    n = ctypes.c_uint(0)
    small = call(h, ctypes.byref(n), None)
    items, room = (struct * 5)(), ctypes.c_uint(5)
    assert call(h, ctypes.byref(room), items) == 0
    out.append([small, n.value, [items[i].pid for i in range(room.value)],
    [items[0].gi if struct is V2 else 0xffffffff]])
    n = ctypes.c_uint(7)
    for other in ("Graphics", "MPSCompute"):
        call = getattr(pynvml.nvmlLib, f"nvmlDeviceGet{other}RunningProcesses" + name)
        assert call(h, ctypes.byref(n), items) == 0 and n.value == 0
report([out, text(nvmlSystemGetProcessName(out[0][2][0])), code(nvmlSystemGetProcessName, 2**22 + 1)])
"""
    )
    pids = [holder.pid for holder in holders]
    versions, name, nobody = found
    assert [[small, count, sorted(listed), marks] for small, count, listed, marks in versions] == [
        [7, 2, sorted(pids), [0xFFFFFFFF]]
    ] * 3
    assert name == str(Path(f"/proc/{pids[0]}/exe").readlink())
    assert nobody == "NotFound"
    for holder in holders:
        tell(holder)
        holder.wait()


def test_load_is_the_share_of_time_with_kernels(machine: Machine) -> None:
    idle = machine.run(
        START + "report([nvmlDeviceGetUtilizationRates(h).gpu, code(nvmlDeviceGetProcessUtilization, h, 0),"
        "nvmlDeviceGetPowerUsage(h), nvmlDeviceGetClockInfo(h, 1)])"
    )
    assert idle == [0, "NotFound", 12000, 300]
    worker = machine.start(
        """
from simulator_client import *
context()
f = kernel("k_5ms")
def half():
    launch(f)
    ok(cu.cuCtxSynchronize())
    time.sleep(0.005)
end = time.monotonic() + 1.2
while time.monotonic() < end:
    half()
report(1)
while True:
    half()
"""
    )
    heard(worker)
    load, samples, watts, clock = machine.run(
        START
        + """
s = nvmlDeviceGetProcessUtilization(h, 0)
report([nvmlDeviceGetUtilizationRates(h).gpu, [[x.pid, x.smUtil] for x in s], nvmlDeviceGetPowerUsage(h),
    nvmlDeviceGetClockInfo(h, 1)])
"""
    )
    worker.kill()
    worker.wait()
    assert 5 < load < 60  # never above a half and a sampling error; a slow machine sleeps longer
    assert [pid for pid, _ in samples] == [worker.pid]
    assert abs(samples[0][1] - load) <= 5
    assert 12000 < watts < 70000
    assert clock == 1590


def test_xids_reach_whoever_registered(machine: Machine) -> None:
    watcher = machine.start(
        START
        + """
events = nvmlEventSetCreate()
for i in (0, 1):
    nvmlDeviceRegisterEvents(nvmlDeviceGetHandleByIndex(i), nvmlEventTypeXidCriticalError, events)
report(code(nvmlEventSetWait, events, 1))
for _ in range(2):
    e = nvmlEventSetWait(events, 20000)
    report([nvmlDeviceGetIndex(e.device), e.eventType == nvmlEventTypeXidCriticalError, e.eventData])
report(code(nvmlEventSetWait, events, 1))
"""
    )
    assert heard(watcher) == "Timeout"
    simulator.inject_xid(machine.folder, 2, 48)  # nobody registered for this card
    simulator.inject_xid(machine.folder, 1, 79)
    assert heard(watcher) == [1, True, 79]
    simulator.inject_xid(machine.folder, 1, 0)
    simulator.inject_xid(machine.folder, 0, 13)
    assert heard(watcher) == [0, True, 13]
    assert heard(watcher) == "Timeout"
    watcher.wait()
    with pytest.raises(IndexError, match="no card 4"):
        simulator.inject_xid(machine.folder, 4, 79)


@pytest.mark.parametrize(
    ("visible", "cards"), [("all", [0, 1, 2, 3]), ("2", [2]), ("3,1", [1, 3]), ("uuid:2", [2]), ("none", []), ("9", [])]
)
def test_a_container_sees_its_cards_with_the_machine_s_minor_numbers(
    machine: Machine, visible: str, cards: list[int]
) -> None:
    simulator.create(machine.folder, machine.spec)
    if visible.startswith("uuid:"):
        visible = simulator.cards(machine.folder)[int(visible[5:])].uuid
    script = (
        CLIENT + "nvmlInit()\nhandles = [nvmlDeviceGetHandleByIndex(i) for i in range(nvmlDeviceGetCount())]\n"
        "report([nvmlDeviceGetMinorNumber(h) for h in handles])"
    )
    assert machine.run(script, NVIDIA_VISIBLE_DEVICES=visible, CUDA_VISIBLE_DEVICES="0") == cards


@pytest.mark.parametrize(
    ("variables", "answer"),
    [
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, "DriverNotLoaded"),
        ({"VGPU_SIMULATE": "H100"}, "LibRmVersionMismatch"),
        ({"VGPU_SIM_DIR": "/nonexistent", "VGPU_SIMULATE": ""}, "DriverNotLoaded"),
    ],
)
def test_no_driver(machine: Machine, variables: dict[str, str], answer: str) -> None:
    simulator.create(machine.folder, machine.spec)
    assert machine.run(CLIENT + "report(code(nvmlInit))", **variables) == answer


def test_init_and_shutdown_are_counted(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
out = [code(nvmlDeviceGetCount)] if nvmlInit() is None and nvmlShutdown() is None else []
nvmlInit(); nvmlInit(); nvmlShutdown()
out.append(nvmlDeviceGetCount())
nvmlShutdown()
report(out + [code(nvmlDeviceGetCount), code(nvmlShutdown)])
"""
    )
    assert found == ["Uninitialized", 4, "Uninitialized", "Uninitialized"]


def test_topology_and_links(tmp_path: Path) -> None:
    script = (
        START
        + """
n = nvmlDeviceGetCount()
all = [nvmlDeviceGetHandleByIndex(i) for i in range(n)]
report([[nvmlDeviceGetTopologyCommonAncestor(h, d) for d in all],
        [nvmlDeviceGetIndex(d) for d in nvmlDeviceGetTopologyNearestGpus(h, NVML_TOPOLOGY_NODE)],
        [code(nvmlDeviceGetNvLinkState, h, i) for i in (0, 11, 12, 99)],
        [nvmlDeviceGetMemoryAffinity(d, 1, 0)[0] for d in all],
        n > 1 and text(nvmlDeviceGetNvLinkRemotePciInfo(h, 0).busId) == text(nvmlDeviceGetPciInfo(all[1]).busId),
        code(nvmlDeviceGetMigMode, h)])
"""
    )
    a100 = Machine(tmp_path / "a", "A100-40x8").run(script)
    assert a100 == [
        [0, 10, 40, 40, 50, 50, 50, 50],
        [2, 3],
        [1, 1, "NotSupported", "InvalidArgument"],
        [1, 1, 1, 1, 2, 2, 2, 2],
        True,
        [0, 0],
    ]
    t4 = Machine(tmp_path / "t").run(script)
    assert t4 == [[0], [], ["NotSupported"] * 3 + ["InvalidArgument"], [1], False, "NotSupported"]


def test_wrong_struct_versions_are_refused(machine: Machine) -> None:
    found = machine.run(
        START
        + """
import ctypes, pynvml
memory = c_nvmlMemory_v2_t()
out = []
for version in (0, nvmlMemory_v2, nvmlMemory_v2 + 1, 2):
    memory.version = version
    out.append(pynvml.nvmlLib.nvmlDeviceGetMemoryInfo_v2(h, ctypes.byref(memory)))
report(out)
"""
    )
    assert found == [25, 0, 25, 25]


def test_what_a_monitoring_tool_asks_has_an_answer(machine: Machine) -> None:
    """Every function that nvidia-ml-py knows exists; what the boards lack returns "not supported"."""
    missing = machine.run(
        START
        + """
import inspect, re, pynvml
names = set(re.findall(r'_nvmlGetFunctionPointer\\("(\\w+)"', inspect.getsource(pynvml)))
report([n for n in names if not hasattr(pynvml.nvmlLib, n)])
"""
    )
    assert missing == []
    values = machine.run(
        START
        + """
report([code(nvmlDeviceGetFanSpeed, h), code(nvmlDeviceGetTemperature, h, 0),
    code(nvmlDeviceGetPowerManagementLimit, h),
        code(nvmlDeviceGetEccMode, h), code(nvmlDeviceGetPersistenceMode, h), code(nvmlDeviceGetPerformanceState, h),
        code(nvmlDeviceGetComputeMode, h), code(nvmlDeviceGetCudaComputeCapability,
        h), code(nvmlDeviceGetTotalEccErrors, h, 0, 0),
        code(nvmlDeviceGetMaxClockInfo, h, 1), code(nvmlDeviceGetBrand, h), nvmlSystemGetCudaDriverVersion()])
"""
    )
    assert values == ["NotSupported", 33, 70000, [1, 1], 1, 0, 0, [7, 5], 0, 1590, 14, 13000]


def test_a_board_without_memory_of_its_own(tmp_path: Path) -> None:
    """Its memory is the machine's: CUDA has a total and counts, NVML does not support the question."""
    machine = Machine(tmp_path / "cards", "GB10")
    found = machine.run(
        START
        + """
from cuda.bindings import driver as cu
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
before = cu.cuMemGetInfo()[1]
cu.cuMemAlloc(1 << 30)
report([code(nvmlDeviceGetMemoryInfo, h), code(nvmlDeviceGetMemoryInfo, h, nvmlMemory_v2),
    code(nvmlDeviceGetBAR1MemoryInfo, h), nvmlDeviceGetName(h), before - cu.cuMemGetInfo()[1],
    cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, 0)[1],
    len(nvmlDeviceGetComputeRunningProcesses(h)), cu.cuMemGetInfo()[2]])
"""
    )
    assert found == [*["NotSupported"] * 3, "NVIDIA GB10", 1 << 30, 1, 1, machine.card().memory]
