"""Drivers of several CUDA versions: their reported versions, and their entry points."""

from pathlib import Path

import pytest
from simulated import Machine
from test_simulator_entry import CLIENT, NOT_FOUND, SUCCESS, VERSION

from vgpu.native import simulator

ABIS = {
    "11.8": {
        ("cuCtxCreate", 11080): "cuCtxCreate_v3",
        ("cuGetProcAddress", 11080): "cuGetProcAddress",
        ("cuMemAdvise", 11080): "cuMemAdvise",
        ("cuMemPrefetchAsync", 11080): "cuMemPrefetchAsync",
        ("cuLaunchKernelEx", 11080): "cuLaunchKernelEx",
        ("cuLaunchKernelEx", 11050): VERSION,
        ("cuCtxGetId", 11080): NOT_FOUND,
        ("cuMulticastCreate", 11080): NOT_FOUND,
        ("cuMemAlloc", 12000): None,
    },
    "12.4": {
        ("cuCtxCreate", 12040): "cuCtxCreate_v3",
        ("cuGetProcAddress", 12040): "cuGetProcAddress_v2",
        ("cuMemAdvise", 12000): "cuMemAdvise",
        ("cuMemAdvise", 12040): "cuMemAdvise_v2",
        ("cuMulticastCreate", 12000): VERSION,
        ("cuMulticastCreate", 12040): "cuMulticastCreate",
        ("cuStreamGetDevice", 12040): NOT_FOUND,
        ("cuCtxCreate", 12050): None,
    },
    "13.0": {
        ("cuCtxCreate", 11040): "cuCtxCreate_v3",
        ("cuCtxCreate", 12050): "cuCtxCreate_v4",
        ("cuMemAdvise", 13000): "cuMemAdvise_v2",
        ("cuCtxSynchronize", 12090): "cuCtxSynchronize",
        ("cuCtxSynchronize", 13000): "cuCtxSynchronize_v2",
        ("cuMemGetInfo", 2000): "cuMemGetInfo",
        ("cuMemcpyHtoD", 3010): "cuMemcpyHtoD",
        ("cuMemcpyHtoD", 3020): "cuMemcpyHtoD_v2",
        ("cuArray3DCreate", 2000): "cuArray3DCreate",
        ("cuMemAlloc", 13010): None,
    },
}


@pytest.mark.parametrize("driver", ABIS)
def test_a_driver_answers_what_its_version_has(tmp_path: Path, driver: str) -> None:
    machine = Machine(tmp_path / "cards", f"T4@{driver}")
    found = machine.run(
        CLIENT
        + f"""
version = ctypes.c_int()
lib.cuDriverGetVersion(ctypes.byref(version))
answers = []
for (symbol, number), entry in {ABIS[driver]!r}.items():
    code, status, address = ask(symbol.encode(), number, 0)
    answers.append(None if code == 1 else entry if isinstance(entry, str) and not status
        and address == address_of(entry) else status)
nvml = ctypes.CDLL("libnvidia-ml.so.1")
text, number = ctypes.create_string_buffer(80), ctypes.c_int()
nvml.nvmlInit_v2(), nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
nvml.nvmlSystemGetDriverVersion(text, 80)
print(json.dumps([answers, version.value, number.value, text.value.decode(), lib.cuInit(0)]))
"""
    )
    major, minor = driver.split(".")
    number = int(major) * 1000 + int(minor) * 10
    name = {"11.8": "520.61.05", "12.4": "550.54.15", "13.0": "580.105.08"}[driver]
    assert found == [list(ABIS[driver].values()), number, number, name, 0]
    assert SUCCESS == 0


def test_the_first_form_of_the_look_up_answers_for_its_driver(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cards", "T4@11.8")
    found = machine.run(
        CLIENT
        + """
p = ctypes.c_void_p()
ask = lambda name, version: lib.cuGetProcAddress(name, ctypes.byref(p), version, ctypes.c_uint64(0))
print(json.dumps([ask(b"cuMemAlloc", 11080), ask(b"cuCtxGetId", 11080), ask(b"cuMemAlloc", 12000)]))
"""
    )
    assert found == [0, 500, 1]


def test_the_environment_names_another_driver_than_the_cards(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "cards", "T4")
    script = (
        CLIENT
        + "v = ctypes.c_int()\nlib.cuDriverGetVersion(ctypes.byref(v))\nprint(json.dumps([v.value, lib.cuInit(0)]))"
    )
    assert machine.run(script, VGPU_SIM_DRIVER="12.4") == [12040, 0]
    assert machine.run(script) == [13000, 0]
    assert machine.run(script, VGPU_SIM_DRIVER="12.99") == [13000, 100]


def test_a_state_remembers_its_driver(tmp_path: Path) -> None:
    simulator.create(tmp_path / "cards", "H100x2@12.4")
    machine = Machine(tmp_path / "cards", "")
    script = (
        CLIENT
        + "v = ctypes.c_int()\nlib.cuDriverGetVersion(ctypes.byref(v))\nprint(json.dumps([v.value, lib.cuInit(0)]))"
    )
    assert machine.run(script) == [12040, 0]
    assert len(simulator.cards(tmp_path / "cards")) == 2


def test_unknown_drivers_are_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"T4@10.2.*11\.8"):
        simulator.create(tmp_path / "cards", "T4@10.2")


NARROW = """
import ctypes, json
lib = ctypes.CDLL("libcuda.so.1")
class Narrow(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint) for n in ("Width", "Height", "Depth", "Format", "NumChannels", "Flags")]
out = lambda kind=ctypes.c_uint: kind()
ref = ctypes.byref
lib.cuInit(0)
context, array, address, pitch = out(ctypes.c_void_p), out(ctypes.c_void_p), out(), out()
lib.cuCtxCreate(ref(context), 0, 0)
"""


def test_the_32_bit_entry_points(tmp_path: Path) -> None:
    """Calls with a device address cannot work: the addresses of this driver are wider. Arrays work as usual."""
    found = Machine(tmp_path / "cards").run(
        NARROW
        + """
free, total, again = out(), out(), Narrow()
shape = Narrow(5, 3, 2, 0x20, 1, 0)
data, back = (ctypes.c_uint * 5)(1, 2, 3, 4, 5), (ctypes.c_uint * 5)()
codes = [lib.cuMemGetInfo(ref(free), ref(total)), lib.cuMemAlloc(ref(address), 100), lib.cuMemAlloc(None, 1),
    lib.cuMemAllocPitch(ref(address), ref(pitch), 8, 8, 4), lib.cuMemFree(0), lib.cuMemFree(5),
    lib.cuMemGetAddressRange(None, None, 4096), lib.cuMemcpyHtoD(4096, data, 4), lib.cuMemsetD32(4096, 1, 1)]
arrays = [lib.cuArray3DCreate(ref(array), ref(shape)), lib.cuArray3DGetDescriptor(ref(again), array),
    lib.cuMemcpyHtoA(array, 0, data, 20), lib.cuMemcpyAtoH(back, array, 0, 20), lib.cuArray3DCreate(ref(array), None)]
print(json.dumps([codes, arrays, bytes(shape) == bytes(again), list(back), total.value == 2**32 - 1]))
"""
    )
    assert found == [[0, 2, 1, 2, 0, 1, 500, 1, 1], [0, 0, 0, 0, 1], True, [1, 2, 3, 4, 5], True]
