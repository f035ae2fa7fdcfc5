"""The tables of cuGetExportTable, by which the CUDA runtime starts (libvgpu/simulator/cuda/export_tables.c)."""

import struct
from pathlib import Path
from typing import Any

import md2
import pytest
from simulated import HERE, Machine

CLIENT = "from table_client import *\n"
READY = CLIENT + "lib.cuInit(0)\n"
NOT_FOUND, NOT_SUPPORTED, NOT_INITIALIZED = 500, 801, 3
INVALID_CONTEXT, INVALID_HANDLE, DESTROYED = 201, 400, 709
KEY = bytes.fromhex("146addae53a9a752aa0841360bf55a9f")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4x2")


def test_tables_begin_with_their_size(machine: Machine) -> None:
    found = machine.run(
        CLIENT + "report([words(name, 1)[0] for name in (RUNTIME, HOOKS, THREAD, CHECKS, CONTEXT, RUNTIME_CHECK)])"
    )
    assert found == [8 * words for words in (13, 7, 4, 15, 95, 3)]


@pytest.mark.parametrize("name", ["f8cff951-2146-8b4e-b9e2-fb469e7c0dd9", "00000000-0000-0000-0000-000000000000"])
def test_an_unknown_table_is_not_there(machine: Machine, name: str) -> None:
    assert machine.run(f"{CLIENT}report(asked({name!r}))") == [NOT_FOUND, None]


def test_a_question_without_an_id_or_a_place_is_wrong(machine: Machine) -> None:
    found = machine.run(f"{CLIENT}report([lib.cuGetExportTable(0, bytes(16)), lib.cuGetExportTable(bytes(8), 0)])")
    assert found == [1, 1]


def test_unknown_slots_are_not_supported(machine: Machine) -> None:
    slots = {
        "RUNTIME": (3, 5, 9, 11),
        "HOOKS": (1, 3, 5),
        "THREAD": (1, 3),
        "CHECKS": (1, 4, 14),
        "CONTEXT": (1, 5, 94),
    }
    calls = ", ".join(f"slot({table}, {index})()" for table, every in slots.items() for index in every)
    before, after = machine.run(f"{CLIENT}before = [{calls}]\nlib.cuInit(0)\nreport([before, [{calls}]])")
    assert (set(before), set(after)) == ({NOT_INITIALIZED}, {NOT_SUPPORTED})


def test_no_tool_wants_to_hear_of_anything(machine: Machine) -> None:
    found = machine.run(
        CLIENT
        + """
def wanted(index):
    where, count = c_void_p(), ctypes.c_size_t()
    slot(HOOKS, index, c_void_p, c_void_p, result=None)(byref(where), byref(count))
    return [count.value, sum((c_uint * count.value).from_address(where.value))]
report([wanted(2), wanted(6)])
"""
    )
    assert found == [[1024, 0], [14, 0]]


def test_contexts_are_looked_up(machine: Machine) -> None:
    """The current one of a thread, the device and the number of one, and that nothing is wrong with it."""
    found = machine.run(
        READY
        + """
context = ok(cu.cuDevicePrimaryCtxRetain(1))
before = c_void_p(7)
codes = [slot(THREAD, 2, c_void_p)(byref(before))]
ok(cu.cuCtxSetCurrent(context))
current, device, number, flags, detail = c_void_p(), c_int(9), c_uint64(), c_uint(9), c_void_p(7)
codes.append(slot(THREAD, 2, c_void_p)(byref(current)))
codes.append(slot(CONTEXT, 3, c_void_p, c_void_p)(int(context), byref(device)))
codes.append(slot(CONTEXT, 4, c_void_p, c_void_p)(int(context), byref(number)))
codes.append(slot(CHECKS, 2, c_void_p, c_void_p, c_void_p)(int(context), byref(flags), byref(detail)))
report([codes, before.value, current.value == int(context), device.value, number.value == ok(cu.cuCtxGetId(context)),
        flags.value, detail.value, slot(CHECKS, 3)(),
        slot(CONTEXT, 3, c_void_p, c_void_p)(primary(0), byref(device))])
"""
    )
    assert found == [[0] * 5, None, True, 1, True, 0, 7, 0, INVALID_CONTEXT]


def test_the_runtime_loads_modules_of_fatbins(machine: Machine) -> None:
    found = machine.run(
        READY
        + """
import struct
from cudart import fatbin
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
image = ctypes.create_string_buffer(fatbin())
wrapper = ctypes.create_string_buffer(struct.pack("<IIQQ", 0x466243B1, 1, ctypes.addressof(image), 0))

def loaded(index, *arguments):
    module, function = c_void_p(), c_void_p()
    arguments = [byref(module) if a == "module" else a for a in arguments]
    code = slot(RUNTIME, index, *[c_void_p] * len(arguments))(*arguments)
    return code or lib.cuModuleGetFunction(byref(function), module, b"spin_2ms")

slot(RUNTIME, 7, c_void_p, result=None)(wrapper)
report([loaded(1, "module", wrapper), loaded(6, "module", wrapper, None, None, None),
        loaded(6, "module", wrapper, None, None, 1), loaded(8, image, "module", None, None, None),
        slot(RUNTIME, 12)()])
""",
        PYTHONPATH=f"{HERE}:{HERE.parent / 'programs'}",
    )
    assert found == [0, 0, NOT_SUPPORTED, 0, 0]


# the handle of a primary context


def test_the_handle_of_a_primary_context_is_there_before_and_after_it(machine: Machine) -> None:
    found = machine.run(
        READY
        + """
active = lambda: ok(cu.cuDevicePrimaryCtxGetState(0))[1]
handles, states = [primary()], [active()]
for end in cu.cuDevicePrimaryCtxRelease, cu.cuDevicePrimaryCtxReset:
    handles.append(int(ok(cu.cuDevicePrimaryCtxRetain(0))))
    handles.append(primary())
    states.append(active())
    ok(end(0))
    handles.append(primary())
    states.append(active())
report([len(set(handles)), handles[0] == primary(1), states, slot(RUNTIME, 2, c_void_p, c_int)(byref(c_void_p()), 2)])
"""
    )
    assert found == [1, False, [0, 1, 0, 1, 0], 101]
    assert machine.card().used == 0


def test_a_primary_context_that_is_not_active_may_be_current(machine: Machine) -> None:
    found = machine.run(
        READY
        + """
handle = primary()
size, current = c_uint64(), c_void_p()
codes = lambda: [lib.cuMemAlloc_v2(byref(size), ctypes.c_size_t(1)), lib.cuCtxSynchronize(),
                 lib.cuCtxGetCurrent(byref(current)), current.value == handle]
found = [lib.cuCtxSetCurrent(c_void_p(handle)), codes()]
ok(cu.cuDevicePrimaryCtxRetain(0))
found.append(codes())
ok(cu.cuDevicePrimaryCtxReset(0))
found.append(codes())
found += [lib.cuCtxPushCurrent_v2(c_void_p(handle)), lib.cuCtxSetCurrent(c_void_p(handle + 512 * 1000))]
report(found)
"""
    )
    gone = [DESTROYED, DESTROYED, 0, True]
    assert found == [0, gone, [0, 0, 0, True], gone, 0, INVALID_CONTEXT]


def test_nothing_of_a_primary_context_is_left_in_its_next_life(machine: Machine) -> None:
    found = machine.run(
        READY
        + """
def life():
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
    limit = cu.CUlimit.CU_LIMIT_STACK_SIZE
    before = ok(cu.cuCtxGetLimit(limit))
    ok(cu.cuCtxSetLimit(limit, 4096))
    ok(cu.cuMemAlloc(1 << 20))
    number = ok(cu.cuCtxGetId(0))
    ok(cu.cuDevicePrimaryCtxReset(0))
    return before, number
first, second = life(), life()
report([first[0], second[0], first[1] == second[1]])
"""
    )
    assert found == [1024, 1024, False]
    assert machine.card().used == 0


# context-local storage


def test_storage_keeps_a_value_for_each_context_and_key(machine: Machine) -> None:
    found = machine.run(
        READY
        + """
one, two = int(ok(cu.cuDevicePrimaryCtxRetain(0))), int(ok(cu.cuDevicePrimaryCtxRetain(1)))
found = [get(None, 1)[0]]
lib.cuCtxSetCurrent(c_void_p(one))
found += [get(None, 1), put(None, 1, 11), put(two, 1, 21), put(one, 2, 12), get(None, 1), get(two, 1), get(one, 2)]
found += [put(one, 1, 13), get(one, 1), delete(None, 1), delete(None, 1), get(one, 1), get(two, 1), get(one + 3, 1)]
report([found, words(STORAGE, 4)[3]])
"""
    )
    kept, ended = found
    assert kept[:8] == [INVALID_CONTEXT, [INVALID_HANDLE, 99], 0, 0, 0, [0, 11], [0, 21], [0, 12]]
    assert kept[8:12] == [0, [0, 13], 0, INVALID_HANDLE]
    assert kept[12:] == [[INVALID_HANDLE, 99], [0, 21], [INVALID_CONTEXT, 99]]
    assert ended is None


def test_storage_says_that_a_primary_context_has_to_be_started(machine: Machine) -> None:
    """As the runtime starts one: 709, 400, and then its own value, which the next life does not see."""
    found = machine.run(
        READY
        + """
lib.cuCtxSetCurrent(c_void_p(primary()))
found = [get(None, 1)[0], put(None, 1, 2), get(primary(), 1)[0]]
ok(cu.cuDevicePrimaryCtxRetain(0))
found += [get(None, 1)[0], put(None, 1, 2), get(None, 1)[0]]
ok(cu.cuDevicePrimaryCtxRelease(0))
found.append(get(None, 1)[0])
ok(cu.cuDevicePrimaryCtxRetain(0))
report([*found, get(None, 1)[0]])
"""
    )
    assert found == [DESTROYED, DESTROYED, DESTROYED, INVALID_HANDLE, 0, 0, DESTROYED, INVALID_HANDLE]


def test_storage_of_a_green_context_is_its_primary_contexts(tmp_path: Path) -> None:
    found = Machine(tmp_path / "cards", "A100-40").run(
        READY
        + """
primary = ok(cu.cuDevicePrimaryCtxRetain(0))
whole = ok(cu.cuDeviceGetDevResource(0, cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
part = ok(cu.cuDevSmResourceSplitByCount(1, whole, 0, 16))[0]
green = ok(cu.cuCtxFromGreenCtx(ok(cu.cuGreenCtxCreate(ok(cu.cuDevResourceGenerateDesc(part, 1)), 0, 1))))
found = [put(int(green), 1, 11), get(int(primary), 1)]
ok(cu.cuCtxSetCurrent(green))
report([*found, get(None, 1)])
"""
    )
    assert found == [0, [0, 11], [0, 11]]


ENDS = {
    "release": "context = ok(cu.cuDevicePrimaryCtxRetain(0))\nend = lambda: cu.cuDevicePrimaryCtxRelease(0)",
    "reset": "context = ok(cu.cuDevicePrimaryCtxRetain(0))\nend = lambda: cu.cuDevicePrimaryCtxReset(0)",
    "destroy": "context = ok(cu.cuCtxCreate(None, 0, 0))\nend = lambda: cu.cuCtxDestroy(context)",
}


@pytest.mark.parametrize("end", ENDS)
def test_destructors_may_call_the_driver(machine: Machine, end: str) -> None:
    """None of the simulator's locks is held, and the context is still there."""
    found = machine.run(
        f"{READY}{ENDS[end]}"
        + """
ok(cu.cuCtxSetCurrent(context))
block = ok(cu.cuMemAlloc(1 << 20))
seen = []

@DESTROY
def destroy(where, key, value):
    other = ok(cu.cuCtxCreate(None, 0, 1))
    ok(cu.cuCtxDestroy(other))
    seen.append([where == int(context), key, value, cu.cuMemFree(block)[0].value, get(where, key)[0], put(where, 8, 1)])

codes = [put(None, 5, 6, ctypes.cast(destroy, c_void_p)), put(None, 7, 9, None)]
ok(end())
report([codes, seen, cu.cuCtxSynchronize()[0].value])
"""
    )
    assert found == [[0, 0], [[True, 5, 6, 0, INVALID_HANDLE, 0]], INVALID_CONTEXT if end == "destroy" else DESTROYED]
    assert machine.card().used == 0


@pytest.mark.parametrize(("end", "active"), [("Release", 1), ("Reset", 0)])
def test_a_context_that_a_destructor_retains_stays_unless_it_is_reset(machine: Machine, end: str, active: int) -> None:
    found = machine.run(
        READY
        + f"""
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))

@DESTROY
def destroy(where, key, value):
    ok(cu.cuDevicePrimaryCtxRetain(0))

put(None, 5, 6, ctypes.cast(destroy, c_void_p))
ok(cu.cuDevicePrimaryCtx{end}(0))
state = ok(cu.cuDevicePrimaryCtxGetState(0))[1]
report([state, get(None, 5)[0], cu.cuDevicePrimaryCtxRelease(0)[0].value, ok(cu.cuDevicePrimaryCtxGetState(0))[1]])
"""
    )
    assert found == ([1, INVALID_HANDLE, 0, 0] if active else [0, DESTROYED, INVALID_CONTEXT, 0])
    assert machine.card().used == 0


# the integrity check


def test_the_reference_is_md2() -> None:
    """RFC 1319, appendix A.5."""
    vectors = {
        b"": "8350e5a3e24c153df2275c9f80692773",
        b"a": "32ec01ec4a6dac72c0ab96fb34c0b5d1",
        b"message digest": "ab4f496bfb2a530b219ff33031fe06b0",
        b"1234567890" * 8: "d5976f79d83d3a0dc9806c3c66f3efd8",
    }
    assert {message: md2.md2(message).hex() for message in vectors} == vectors


def test_the_integrity_check_is_what_the_runtime_computes(machine: Machine) -> None:
    found: dict[str, Any] = machine.run(
        READY
        + """
import os, threading
check = slot(RUNTIME_CHECK, 1, c_uint, c_uint64, c_void_p)

def answer(version):
    out = ctypes.create_string_buffer(16)
    assert check(version, 1234567890, out) == 0
    return out.raw.hex()

def card(device):
    uuid = ctypes.create_string_buffer(16)
    lib.cuDeviceGetUuid_v2(uuid, device)
    pci = [cu.CUdevice_attribute(number) for number in (50, 33, 34)]
    return uuid.raw.hex(), [ok(cu.cuDeviceGetAttribute(one, device)) for one in pci]

report({
    "answers": [answer(13000), answer(13001), answer(13002), answer(12092)], "nowhere": check(13000, 0, None),
    "driver": ok(cu.cuDriverGetVersion()), "process": os.getpid(), "thread": threading.get_ident() & 0xFFFFFFFF,
    "tables": [address(RUNTIME), address(RUNTIME_CHECK), words(RUNTIME_CHECK, 2)[1]], "cards": [card(0), card(1)],
    "rest": words(RUNTIME_CHECK, 3)[2],
})
"""
    )

    def expected(version: int) -> str:
        message = struct.pack("<4I", found["driver"], version, found["process"], found["thread"])
        message += struct.pack("<4Q", *found["tables"], 1234567890)
        for uuid, pci in found["cards"]:
            message += bytes.fromhex(uuid) + struct.pack("<3i", *pci)
        return md2.hmac(KEY, message).hex()

    assert found["answers"] == [
        struct.pack("<2Q", 0x3341181C03CB675C, 0x8ED383AA1F4CD1E8).hex(),
        struct.pack("<2Q", 0x1841181C03CB675C, 0x8ED383AA1F4CD1E8).hex(),
        expected(13002),
        expected(12092),
    ]
    assert (found["nowhere"], found["rest"]) == (1, None)
    assert found["cards"][0] != found["cards"][1]
