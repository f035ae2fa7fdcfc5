"""cuGetProcAddress of the simulated driver: versions, default streams, status codes."""

import re
from pathlib import Path

import pytest
from simulated import Machine

CLIENT = """
import ctypes, json
lib = ctypes.CDLL("libcuda.so.1")

def ask(symbol, version, flags):
    address, status = ctypes.c_void_p(), ctypes.c_int(-1)
    found = ctypes.byref(address), version, ctypes.c_uint64(flags), ctypes.byref(status)
    return lib.cuGetProcAddress_v2(symbol, *found), status.value, address.value

def address_of(export):
    return ctypes.cast(getattr(lib, export), ctypes.c_void_p).value
"""
SUCCESS, NOT_FOUND, VERSION = 0, 1, 2


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards")


@pytest.mark.parametrize(
    ("symbol", "version", "flags", "status", "entry"),
    [
        ("cuMemAlloc", 12000, 0, SUCCESS, "cuMemAlloc_v2"),
        ("cuMemAlloc", 3020, 0, SUCCESS, "cuMemAlloc_v2"),
        ("cuMemAlloc", 2000, 0, SUCCESS, "cuMemAlloc"),
        ("cuCtxCreate", 11000, 0, SUCCESS, "cuCtxCreate_v2"),
        ("cuCtxCreate", 12000, 0, SUCCESS, "cuCtxCreate_v3"),
        ("cuCtxCreate", 13000, 0, SUCCESS, "cuCtxCreate_v4"),
        ("cuMemAdvise", 12000, 0, SUCCESS, "cuMemAdvise"),
        ("cuMemAdvise", 12020, 0, SUCCESS, "cuMemAdvise_v2"),
        ("cuMemPrefetchAsync", 12000, 2, SUCCESS, "cuMemPrefetchAsync_ptsz"),
        ("cuMemPrefetchAsync", 12020, 2, SUCCESS, "cuMemPrefetchAsync_v2_ptsz"),
        ("cuLaunchKernel", 12000, 0, SUCCESS, "cuLaunchKernel"),
        ("cuLaunchKernel", 12000, 1, SUCCESS, "cuLaunchKernel"),
        ("cuLaunchKernel", 12000, 2, SUCCESS, "cuLaunchKernel_ptsz"),
        ("cuLaunchKernel", 6000, 2, SUCCESS, "cuLaunchKernel"),
        ("cuMemcpyHtoD", 12000, 2, SUCCESS, "cuMemcpyHtoD_v2_ptds"),
        ("cuMemFree", 12000, 2, SUCCESS, "cuMemFree_v2"),
        ("cuGetProcAddress", 11030, 0, SUCCESS, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, SUCCESS, "cuGetProcAddress_v2"),
        ("cuEventElapsedTime", 12070, 0, SUCCESS, "cuEventElapsedTime"),
        ("cuEventElapsedTime", 12080, 0, SUCCESS, "cuEventElapsedTime_v2"),
        ("cuGraphicsMapResources", 12000, 0, SUCCESS, "cuGraphicsMapResources"),
        ("cuMemAllocAsync", 11010, 0, VERSION, None),
        ("cuLaunchKernelEx", 11050, 0, VERSION, None),
        ("cuMemAlloc_v2", 12000, 0, NOT_FOUND, None),
        ("cuNoSuchCall", 12000, 0, NOT_FOUND, None),
    ],
)
def test_answers(machine: Machine, symbol: str, version: int, flags: int, status: int, entry: str | None) -> None:
    found = machine.run(
        f"{CLIENT}code, status, address = ask({symbol.encode()!r}, {version}, {flags})\n"
        f"entry = {entry!r}\n"
        "print(json.dumps([code, status, address == (entry and address_of(entry))]))"
    )
    assert found == [0, status, True]


def test_wrong_questions(machine: Machine) -> None:
    found = machine.run(
        f"{CLIENT}name = b'cuMemAlloc'\n"
        "questions = (None, 12000, 0), (name, 12000, 4), (name, 12000, 3), (name, 99000, 0)\n"
        "print(json.dumps([ask(*question)[0] for question in questions]))"
    )
    assert found == [1, 1, 1, 1]


def test_the_first_version_has_an_error_in_place_of_a_status(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
p = ctypes.c_void_p()
ask = lambda name, version: lib.cuGetProcAddress(name, ctypes.byref(p), version, ctypes.c_uint64(0))
print(json.dumps([ask(b"cuMemAlloc", 12000), ask(b"cuNoSuchCall", 12000), ask(b"cuMemAllocAsync", 11010)]))
"""
    )
    assert found == [0, 500, 500]


def test_every_entry_point_is_exported_and_named_once(machine: Machine) -> None:
    folder = Path(__file__).resolve().parents[2] / "libvgpu" / "simulator" / "cuda"
    text = "".join((folder / name).read_text() for name in ("entries.def", "unsupported.def"))
    lines = re.findall(r"^[A-Z_]+\((\w+), (\w+), (\d+)(?:, (\w+), \d+)?\)$", text, re.M)
    symbols = [symbol for _, first, _, second in lines for symbol in (first, second) if symbol]
    assert len(set(symbols)) == len(symbols) > 500
    assert len({(base, version) for base, _, version, _ in lines}) == len(lines)
    missing = machine.run(f"{CLIENT}print(json.dumps([s for s in {symbols} if not hasattr(lib, s)]))")
    assert missing == []


def test_unplayed_calls_say_that_they_are_not_supported(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
before = lib.cuGraphicsMapResources(0, None, None)
lib.cuInit(0)
table = ctypes.c_void_p()
after = lib.cuGraphicsMapResources(0, None, None)
print(json.dumps([before, after, lib.cuGetExportTable(ctypes.byref(table), bytes(16))]))
"""
    )
    assert found == [3, 801, 500]
