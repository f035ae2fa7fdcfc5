"""The compiled module, loaded on first use: most commands and all pure tests work without it."""

from functools import cache
from typing import Any


@cache
def load() -> tuple[Any, Any]:
    """cffi's `ffi` and `lib` of the binding; when it was not built, raises ImportError with the command to run."""
    try:
        from vgpu.native._region import ffi, lib
    except ImportError as error:
        raise ImportError(f"cannot load vgpu's compiled part ({error}): run `make build`") from error
    return ffi, lib


def c_string(value: Any) -> str:
    """The text in a char array; bytes that are not UTF-8 (a container may write such bytes) become U+FFFD."""
    ffi, _ = load()
    text: bytes = ffi.string(value)
    return text.decode("utf-8", "replace")
