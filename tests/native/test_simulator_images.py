"""Images of modules: variables, and names that cannot be read (libvgpu/simulator/cuda/images.c)."""

import struct
from pathlib import Path

import pytest
from simulated import MIB, Machine

NOT_FOUND, INVALID_VALUE, INVALID_HANDLE = 500, 1, 400
VARIABLES = (
    ".global .align 4 .b8 table[64];\n.visible .global .u64 word;\n.const .f32 factors[3] = {1.0, 2.0, 3.0};\n"
    ".visible .entry kernel(.param .u64 p)\n{ ld.global.u32 %r1, [%rd1]; ret; }\n"
)
PTX = f".version 8.0\n.target sm_75\n.address_size 64\n{VARIABLES}".encode() + b"\0"
CLIENT = """
from simulator_client import *
context()
image = bytes.fromhex({image!r})
module = ok(cu.cuModuleLoadData(image))
library = ok(cu.cuLibraryLoadData(image, None, None, 0, None, None, 0))

def variable(name, module=module):
    error, address, size = cu.cuModuleGetGlobal(module, name)
    return error.value or size

def function(name):
    return code(cu.cuModuleGetFunction(module, name)), code(cu.cuLibraryGetKernel(library, name))
"""


def fatbin(*parts: tuple[int, int, bytes]) -> bytes:
    """A fatbin of parts with a kind (1 PTX, 2 cubin), flags and contents."""
    made = b""
    for kind, flags, contents in parts:
        padded = contents.ljust(-(-len(contents) // 8) * 8, b"\0")
        made += (
            struct.pack("<HHIQ6IQ", kind, 0x101, 64, len(padded), 0, 0, 0, 75, 64, 0, flags).ljust(64, b"\0") + padded
        )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(made)) + made


def cubin(variables: dict[str, int], functions: tuple[str, ...] = ("kernel",)) -> bytes:
    """An ELF file with a symbol for each variable, and the names of sections with code."""
    names, symbols = b"\0", bytes(24)
    for name, size in variables.items():
        symbols += struct.pack("<IBBHQQ", len(names), 0x11, 0, 1, 0, size)  # global, an object
        names += name.encode() + b"\0"
    sections = b"\0" + b"".join(f".text.{name}\0".encode() for name in functions)
    contents = (b"", names, symbols, sections)
    at, headers = 64, b""
    for kind, link, data in zip((0, 3, 2, 3), (0, 0, 1, 0), contents, strict=True):  # strings, symbols
        headers += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, len(data), link, 0, 1, 24)
        at += len(data)
    identity = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header = identity + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, at, 0, 64, 0, 0, 64, 4, 3)
    return header + b"".join(contents) + headers


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards")


READABLE = {
    "ptx": PTX,
    "fatbin of ptx": fatbin((1, 0x11, PTX)),
    "cubin": cubin({"table": 64, "word": 8, "factors": 12}),
    "fatbin of a cubin": fatbin((2, 0x11, cubin({"table": 64, "word": 8, "factors": 12}))),
}


@pytest.mark.parametrize("kind", READABLE)
def test_variables_have_the_size_that_the_image_says(machine: Machine, kind: str) -> None:
    names = "[b'table', b'word', b'factors', b'kernel', b'']"
    found = machine.run(
        CLIENT.format(image=READABLE[kind].hex())
        + f"report([[variable(name) for name in {names}], function(b'kernel'), function(b'other')])"
    )
    assert found == [[64, 8, 12, NOT_FOUND, NOT_FOUND], [0, 0], [NOT_FOUND, NOT_FOUND]]


def test_a_variable_has_one_address_and_contents(machine: Machine) -> None:
    found = machine.run(
        CLIENT.format(image=PTX.hex())
        + """
before = free()
(table, _), (again, _), (word, _) = [ok(cu.cuModuleGetGlobal(module, name)) for name in (b"table", b"table", b"word")]
ok(cu.cuMemcpyHtoD(table, bytes(range(64)), 64))
read = bytearray(64)
ok(cu.cuMemcpyDtoH(read, again, 64))
other, size = ok(cu.cuLibraryGetGlobal(library, b"table"))
after = free()
codes = [code(cu.cuMemFree(table)), code(cu.cuMemcpyHtoD(table, bytes(65), 65))]
ok(cu.cuModuleUnload(module))
codes += [code(cu.cuMemcpyHtoD(table, bytes(64), 64)), code(cu.cuModuleGetGlobal(module, b"table"))]
codes.append(code(cu.cuLibraryGetGlobal(library, b"other")))
report([int(table) == int(again), int(table) in (int(word), int(other)), read == bytes(range(64)), size, before - after,
        codes])
"""
    )
    assert found == [
        True, False, True, 64, machine.card().module_bytes,
        [INVALID_VALUE, INVALID_VALUE, INVALID_VALUE, INVALID_HANDLE, NOT_FOUND],
    ]  # fmt: skip


@pytest.mark.parametrize("flag", [0x2000, 0x8000])
def test_a_compressed_part_may_hold_any_name(machine: Machine, flag: int) -> None:
    """LZ4 and Zstandard; names that can be read are found."""
    image = fatbin((2, 0x11, cubin({"table": 64})), (2, 0x11 | flag, b"compressed"))
    found = machine.run(
        CLIENT.format(image=image.hex())
        + "report([variable(b'table'), variable(b'other'), variable(b''), function(b'kernel'), function(b'other')])"
    )
    assert found == [64, MIB, NOT_FOUND, [0, 0], [0, 0]]


@pytest.mark.parametrize("section", [1, 2])
@pytest.mark.parametrize("field", [24, 32])
def test_what_would_lie_behind_the_image_is_not_read(machine: Machine, section: int, field: int) -> None:
    """The offset and the size of a cubin's symbols, and of their names."""
    broken = bytearray(cubin({"table": 64}))
    (sections,) = struct.unpack_from("<Q", broken, 40)
    struct.pack_into("<Q", broken, sections + 64 * section + field, 1 << 40)
    found = machine.run(CLIENT.format(image=fatbin((2, 0x11, bytes(broken))).hex()) + "report(variable(b'table'))")
    assert found == NOT_FOUND


def test_a_part_that_is_longer_than_its_fatbin_is_not_read(machine: Machine) -> None:
    broken = bytearray(fatbin((2, 0x11, cubin({"table": 64}))))
    struct.pack_into("<Q", broken, 16 + 8, 1 << 40)
    found = machine.run(CLIENT.format(image=broken.hex()) + "report(variable(b'table'))")
    assert found == NOT_FOUND
