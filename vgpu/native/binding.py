"""The compiled module, loaded when first needed: most commands and every pure test do without it."""

from functools import cache
from typing import Any


@cache
def load() -> tuple[Any, Any]:
    """cffi's `ffi` and `lib` of the binding; raises ImportError with what to run when it was not built."""
    try:
        from vgpu.native._region import ffi, lib
    except ImportError as error:
        raise ImportError(f"cannot load vgpu's compiled part ({error}): run `make build`") from error
    return ffi, lib


def c_string(value: Any) -> str:
    """The text in a char array; bytes that are no UTF-8 (a container may write them) become U+FFFD."""
    ffi, _ = load()
    text: bytes = ffi.string(value)
    return text.decode("utf-8", "replace")
