"""The simulated driver's start, devices, visible cards and error codes, by cuda-bindings and ctypes."""

from pathlib import Path

import pytest
from simulated import Machine

from vgpu.native import simulator

CLIENT = "from simulator_client import *\n"
COUNT = CLIENT + "report([code(cu.cuInit(0)), cu.cuDeviceGetCount()[1]])"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x3")


@pytest.mark.parametrize(
    ("spec", "name", "usable", "capability", "processors"),
    [
        ("T4", "Tesla T4", 14912, (7, 5), 40),
        ("A100-40", "NVIDIA A100-SXM4-40GB", 40377, (8, 0), 108),
        ("A100-80x2", "NVIDIA A100-SXM4-80GB", 81050, (8, 0), 108),
        ("H100x8", "NVIDIA H100 80GB HBM3", 81079, (9, 0), 132),
    ],
)
def test_a_device_says_what_its_profile_says(
    tmp_path: Path, spec: str, name: str, usable: int, capability: tuple[int, int], processors: int
) -> None:
    found = Machine(tmp_path / "cards", spec).run(
        CLIENT
        + """
ok(cu.cuInit(0))
A = cu.CUdevice_attribute
ask = lambda a: ok(cu.cuDeviceGetAttribute(a, 0))
report([ok(cu.cuDeviceGetName(96, 0)).rstrip(b'\\0 ').decode(), ok(cu.cuDeviceTotalMem(0)) // MIB,
        [ask(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), ask(A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)],
        ask(A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), ask(A.CU_DEVICE_ATTRIBUTE_WARP_SIZE)])
"""
    )
    assert found == [name, usable, list(capability), processors, 32]


def test_uuids_are_stable_distinct_and_the_same_for_everybody(machine: Machine) -> None:
    script = (
        CLIENT
        + """
ok(cu.cuInit(0))
report([ok(cu.cuDeviceGetUuid(i)).bytes.hex() for i in range(3)])
"""
    )
    first, second = machine.run(script), machine.run(script)
    truth = [card.uuid for card in simulator.cards(machine.folder)]
    assert first == second == [uuid.removeprefix("GPU-").replace("-", "") for uuid in truth]
    assert len(set(truth)) == 3


def test_a_bus_id_leads_back_to_its_device(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
ok(cu.cuInit(0))
ids = [ok(cu.cuDeviceGetPCIBusId(16, i)).rstrip(b'\\0 ') for i in range(3)]
report([[int(ok(cu.cuDeviceGetByPCIBusId(i))) for i in ids], len(set(ids))])
"""
    )
    assert found == [[0, 1, 2], 3]


def test_the_board_has_the_ids_that_nvml_says(machine: Machine) -> None:
    """The attributes of CUDA 12.9 that cuBLAS asks for."""
    found = machine.run(
        CLIENT
        + """
import pynvml
ok(cu.cuInit(0))
pynvml.nvmlInit()
pci = pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
names = ("CU_DEVICE_ATTRIBUTE_GPU_PCI_DEVICE_ID", "CU_DEVICE_ATTRIBUTE_GPU_PCI_SUBSYSTEM_ID")
report([*(ok(cu.cuDeviceGetAttribute(getattr(cu.CUdevice_attribute, name), 0)) for name in names),
        pci.pciDeviceId, pci.pciSubSystemId])
"""
    )
    assert found[:2] == found[2:]
    assert found[0] & 0xFFFF == 0x10DE  # NVIDIA


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),  # everything behind the first invalid entry is not visible
        ("-1", []),
        ("", []),
        ("0,0", []),
        ("uuid:2", [2]),
        ("uuid:1,uuid:0", [1, 0]),
        ("prefix:1", [1]),
        ("GPU-", []),  # the beginning of more than one
        ("MIG-0", []),
    ],
)
def test_cuda_visible_devices(machine: Machine, visible: str | None, cards: list[int]) -> None:
    simulator.create(machine.folder, machine.spec)
    uuids = [card.uuid for card in simulator.cards(machine.folder)]
    variables = {}
    if visible is not None:
        entries = [
            uuids[int(e[5:])] if e.startswith("uuid:") else uuids[int(e[7:])][:16] if e.startswith("prefix:") else e
            for e in visible.split(",")
        ]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(entries)
    script = (
        CLIENT
        + "count = 0 if code(cu.cuInit(0)) else ok(cu.cuDeviceGetCount())\n"
        + "report([ok(cu.cuDeviceGetUuid(i)).bytes.hex() for i in range(count)])"
    )
    assert machine.run(script, **variables) == [uuids[i].removeprefix("GPU-").replace("-", "") for i in cards]


@pytest.mark.parametrize(
    ("container", "inside", "count"),
    [("all", None, 3), ("1,2", None, 2), ("1,2", "1", 1), ("1,2", "2", 0), ("none", None, 0), ("void", None, 0)],
)
def test_nvidia_visible_devices_restricts_what_cuda_can_choose(
    machine: Machine, container: str, inside: str | None, count: int
) -> None:
    variables = {"NVIDIA_VISIBLE_DEVICES": container} | ({} if inside is None else {"CUDA_VISIBLE_DEVICES": inside})
    code, found = machine.run(COUNT, **variables)
    assert (code, found or 0) == ((0, count) if count else (100, 0))


def test_no_state_is_no_device(tmp_path: Path) -> None:
    assert Machine(tmp_path / "none").run(COUNT, VGPU_SIMULATE="")[0] == 100


def test_an_existing_state_needs_no_profile(machine: Machine) -> None:
    simulator.create(machine.folder, machine.spec)
    assert machine.run(COUNT, VGPU_SIMULATE="") == [0, 3]


def test_another_profile_for_the_same_state_is_refused_by_both_sides(machine: Machine) -> None:
    simulator.create(machine.folder, machine.spec)
    simulator.create(machine.folder, machine.spec)
    assert machine.run(COUNT, VGPU_SIMULATE="H100")[0] == 803  # CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    with pytest.raises(FileExistsError, match="H100"):
        simulator.create(machine.folder, "H100")


@pytest.mark.parametrize("spec", ["", "T5", "T4x", "T4x0", "T4x17", "T4x1.5", "t4", "T4xx2", "A100"])
def test_a_profile_that_does_not_exist_is_named(tmp_path: Path, spec: str) -> None:
    with pytest.raises(ValueError, match="T4, A100-40"):
        simulator.create(tmp_path, spec)


def test_truth_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        simulator.cards(tmp_path)
    with pytest.raises(FileNotFoundError):
        simulator.processes(tmp_path)
    (tmp_path / "state").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not the state"):
        simulator.cards(tmp_path)


def test_a_state_of_another_boot_starts_empty_with_the_same_cards(machine: Machine) -> None:
    simulator.create(machine.folder, machine.spec)
    before = [card.uuid for card in simulator.cards(machine.folder)]
    machine.run(CLIENT + "context(); ok(cu.cuMemAlloc(MIB))")
    assert machine.card().peak > 0
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    state = machine.folder / "state"
    with state.open("r+b") as file:
        file.seek(file.read(4096).index(boot))
        file.write(boot[::-1])
    assert [card.uuid for card in simulator.cards(machine.folder)] == before
    assert machine.card().peak == 0


def test_error_codes_are_those_of_the_driver(machine: Machine) -> None:
    codes = machine.run(
        CLIENT
        + """
import ctypes
lib = ctypes.CDLL("libcuda.so.1")
p, n, one = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_size_t(1)
here = ctypes.byref(p)
def raw(name, *args):
    return getattr(lib, name)(*args)
out = {}
out["before init"] = [raw("cuMemAlloc_v2", here, n), raw("cuDeviceGetCount", here), raw("cuCtxSynchronize")]
out["flags of init"] = raw("cuInit", 1)
ok(cu.cuInit(0))
out["no context"] = [raw("cuMemAlloc_v2", here, one), raw("cuCtxSynchronize"), raw("cuMemGetInfo_v2", here,
    ctypes.byref(n))]
out["bad device"] = [raw("cuDeviceGet", here, 3), raw("cuDevicePrimaryCtxRetain", here, -1)]
context()
out["null"] = [raw("cuMemAlloc_v2", None, one), raw("cuDeviceGetCount", None), raw("cuLaunchKernelEx", None, None,
    None, None), raw("cuArrayCreate_v2", here, None)]
out["zero"] = raw("cuMemAlloc_v2", here, ctypes.c_size_t(0))
wild = [0x1000, 0xdeadbeef000, 0x7fffffffffff0000]
out["wild stream"] = [raw("cuStreamSynchronize", ctypes.c_void_p(w)) for w in wild]
out["wild event"] = [raw("cuEventQuery", ctypes.c_void_p(w)) for w in wild]
out["wild function"] = [raw("cuLaunchKernel", ctypes.c_void_p(w), 1, 1, 1, 1, 1, 1, 0, None, None,
    None) for w in wild]
out["wild context"] = [raw("cuCtxSetCurrent", ctypes.c_void_p(w)) for w in wild]
out["wild pointer"] = [raw("cuMemFree_v2", ctypes.c_uint64(w)) for w in wild]
event = ok(cu.cuEventCreate(0))
ok(cu.cuEventDestroy(event))
out["destroyed event"] = code(cu.cuEventQuery(event))
f = kernel("k")
shapes = (0, 1, 1, 1, 1, 1), (1, 1, 1, 1025, 1, 1), (1, 1, 1, 32, 32, 2), (1, 65536, 1, 1, 1, 1)
out["launch shape"] = [code(cu.cuLaunchKernel(f, *shape, 0, 0, 0, 0)) for shape in shapes]
out["image"] = code(cu.cuModuleLoadData(b"no image"))
out["no function"] = code(cu.cuModuleGetFunction(ok(cu.cuFuncGetModule(f)), b"other"))
report(out)
"""
    )
    assert codes == {
        "before init": [3, 3, 3],
        "flags of init": 1,
        "no context": [201, 201, 201],
        "bad device": [101, 101],
        "null": [1, 1, 1, 1],
        "zero": 1,
        "wild stream": [400, 400, 400],
        "wild event": [400, 400, 400],
        "wild function": [400, 400, 400],
        "wild context": [201, 201, 201],
        "wild pointer": [1, 1, 1],
        "destroyed event": 400,
        "launch shape": [1, 1, 1, 1],
        "image": 200,
        "no function": 500,
    }


def test_a_forked_child_finds_the_driver_not_initialised(machine: Machine) -> None:
    codes = machine.run(
        CLIENT
        + """
context()
read, write = os.pipe()
if not os.fork():
    os.write(write, bytes([code(cu.cuInit(0)), code(cu.cuMemGetInfo()), code(cu.cuMemAlloc(1))]))
    os._exit(0)
os.wait()
report([list(os.read(read, 9)), code(cu.cuMemAlloc(1))])
"""
    )
    assert codes == [[3, 3, 3], 0]


def test_contexts_form_a_stack_per_thread(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
import threading
ok(cu.cuInit(0))
a = ok(cu.cuCtxCreate(None, 0, 0))
b = ok(cu.cuCtxCreate(None, 0, 1))
seen = [int(ok(cu.cuCtxGetDevice()))]
other = []
t = threading.Thread(target=lambda: other.append(int(ok(cu.cuCtxGetCurrent()))))
t.start(); t.join()
ok(cu.cuCtxPopCurrent())
seen.append(int(ok(cu.cuCtxGetDevice())))
ok(cu.cuCtxDestroy(b))
ok(cu.cuCtxDestroy(a))
primary = ok(cu.cuDevicePrimaryCtxRetain(0))
again = ok(cu.cuDevicePrimaryCtxRetain(0))
report([seen, other, code(cu.cuCtxGetDevice()), int(primary) == int(again),
    list(ok(cu.cuDevicePrimaryCtxGetState(0)))[1],
        [code(cu.cuDevicePrimaryCtxRelease(0)) for _ in range(3)], list(ok(cu.cuDevicePrimaryCtxGetState(0)))[1]])
"""
    )
    assert found == [[1, 0], [0], 201, True, 1, [0, 0, 201], 0]
