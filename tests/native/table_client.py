"""The tables of cuGetExportTable through ctypes, for scripts on simulated cards."""

import ctypes
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p
from uuid import UUID

from simulator_client import cu, ok, report

RUNTIME = "6bd5fb6c-5bf4-e74a-8987-d93912fd9df9"
HOOKS = "a094798c-2e74-2e74-93f2-0800200c0a66"
THREAD = "42d85a81-23f6-cb47-8298-f6e78a3aecdc"
STORAGE = "c693336e-1121-df11-a8c3-68f355d89593"
CHECKS = "263e8860-7cd2-6143-92f6-bbd5006dfa7e"
CONTEXT = "21318c60-9714-3248-8ca6-41ff7324c8f2"
RUNTIME_CHECK = "d4082055-bde6-704b-8d34-ba123c66e1f2"
DESTROY = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)

__all__ = [
    "CHECKS", "CONTEXT", "DESTROY", "HOOKS", "RUNTIME", "RUNTIME_CHECK", "STORAGE", "THREAD", "address", "asked",
    "byref", "c_int", "c_uint", "c_uint64", "c_void_p", "ctypes", "cu", "delete", "get", "lib", "ok", "primary", "put",
    "report", "slot", "words",
]  # fmt: skip

lib = ctypes.CDLL("libcuda.so.1")


def asked(name: str) -> tuple[int, int | None]:
    """The error, and the table's address, which begins as something else than NULL."""
    table = c_void_p(1)
    code = lib.cuGetExportTable(byref(table), UUID(name).bytes)
    return code, table.value


def address(name: str) -> int:
    code, found = asked(name)
    assert code == 0, code
    assert found
    return found


def words(name: str, count: int) -> list[int | None]:
    return list((c_void_p * count).from_address(address(name)))


def slot(name: str, index: int, *types: type, result: type | None = c_int):
    """The function in a table's slot."""
    return ctypes.CFUNCTYPE(result, *types)(words(name, index + 1)[index])


def primary(device: int = 0) -> int | None:
    """The handle of a primary context, as the runtime gets it."""
    out = c_void_p()
    code = slot(RUNTIME, 2, c_void_p, c_int)(byref(out), device)
    assert code == 0, code
    return out.value


def put(context, key, value, destroy=None) -> int:
    return slot(STORAGE, 0, c_void_p, c_void_p, c_void_p, c_void_p)(context, key, value, destroy)


def delete(context, key) -> int:
    return slot(STORAGE, 1, c_void_p, c_void_p)(context, key)


def get(context, key) -> tuple[int, int | None]:
    out = c_void_p(99)
    code = slot(STORAGE, 2, c_void_p, c_void_p, c_void_p)(byref(out), context, key)
    return code, out.value
