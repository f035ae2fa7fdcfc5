"""A driver that itself looks up functions: with our hooks, it would call itself."""

from pathlib import Path
from shutil import copy

import pytest
from preloaded import compiled, environment, python

from vgpu.native import paths

ROUTES = ("handle", "versioned", "next", "standard")
SHARED = ("-shared", "-fPIC", "-fvisibility=hidden")
USE = """
from driver_client import *
from ctypes import CFUNCTYPE
def proc(name, version):
    address, found = c_void_p(), c_int()
    status = cu.cuGetProcAddress_v2(name, byref(address), version, c_uint64(0), byref(found)), found.value
    print(*status, bool(address))
    return CFUNCTYPE(c_int, c_void_p, c_size_t)(address.value)
start()
print(alloc(500 * MIB)[0], info()[1] // MIB, total_mem() // MIB)
p = c_uint64()
print(proc(b"cuMemAlloc", 3020)(byref(p), 1), proc(b"cuMemAlloc", 12000)(byref(p), MIB) != 0 or free(p.value))
"""


def implementation(folder: Path, name: str = "libreal.so.1") -> None:
    """Puts the simulated driver into `folder` under another name; a name of the same length stands inside, too."""
    folder.mkdir(exist_ok=True)
    data, old, new = (paths.simulator() / "libcuda.so.1").read_bytes(), b"libcuda.so.1\0", name.encode() + b"\0"
    (folder / name).write_bytes(data.replace(old, new) if len(old) == len(new) else data)


def shim(folder: Path, soname: str, below: str, how: str, *more: str) -> None:
    """Puts a library into `folder` that passes calls on to the library `below`."""
    flags = [*SHARED, f"-Wl,-soname,{soname}", f'-DBELOW="{below}"', f"-DHOW={how}", *more]
    if soname != "libcuda.so.1":
        versions = folder / "versions"
        versions.write_text("ANY_1 { global: cu*; local: *; };")
        flags.append(f"-Wl,--version-script={versions}")
    if how == "standard":
        flags.append("-DFLAGS=RTLD_GLOBAL")
    if how == "next":
        flags += ["-Wl,--no-as-needed", f"-L{folder}", f"-l:{below}", "-Wl,--as-needed"]
    copy(compiled("shim.c", *flags, output=f"{soname}.built"), folder / soname)
    compiled.cache_clear()


def below(folder: Path, real: str, how: str) -> str:
    """The symbols that a shim may look up in this way: the simulated driver has no versions."""
    if how != "versioned":
        return real
    shim(folder, "libversioned.so", real, "handle")
    return "libversioned.so"


def outcome(folder: Path, tmp_path: Path, **options: object) -> list[str]:
    env = environment(tmp_path, **options)  # type: ignore[arg-type]
    return python(USE, env | {"LD_LIBRARY_PATH": f"{folder}:{env['LD_LIBRARY_PATH']}"})


def is_invisible_and_limits(folder: Path, tmp_path: Path) -> None:
    bare = outcome(folder, tmp_path, preload=False)
    assert bare[0] == "0 14912 14912"
    assert outcome(folder, tmp_path) == bare
    limited = outcome(folder, tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m")
    assert limited == ["0 500 500", bare[1], bare[2], "2 True"]


@pytest.mark.parametrize(
    ("how", "name"),
    [(how, "libreal.so.1") for how in ROUTES] + [(how, "libcuda.so.1.1") for how in ROUTES if how != "next"],
)
def test_a_driver_of_one_shim(how: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    implementation(folder, name)
    shim(folder, "libcuda.so.1", below(folder, name, how), how)
    is_invisible_and_limits(folder, tmp_path)


@pytest.mark.parametrize("upper", ROUTES)
@pytest.mark.parametrize("lower", ROUTES)
def test_a_driver_of_two_shims(upper: str, lower: str, tmp_path: Path) -> None:
    if (upper, lower) == ("standard", "standard"):
        pytest.skip("the lower one finds itself, with and without the library")
    folder = tmp_path / "driver"
    implementation(folder)
    shim(folder, "libbetween.so", below(folder, "libreal.so.1", lower), lower)
    shim(folder, "libcuda.so.1", "libbetween.so", upper)
    is_invisible_and_limits(folder, tmp_path)


@pytest.mark.parametrize("name", ["libreal.so.1", "libcuda.so.1.1"])
@pytest.mark.parametrize("flags", ["-DFLAGS=RTLD_DEEPBIND", "-DEARLY"])
def test_a_shim_that_binds_deep_or_asks_while_it_is_loaded(flags: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    implementation(folder, name)
    shim(folder, "libbetween.so", name, "handle", flags)
    shim(folder, "libcuda.so.1", "libbetween.so", "handle", flags)
    is_invisible_and_limits(folder, tmp_path)


def test_a_shim_whose_helper_asks(tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    implementation(folder, "libcuda.so.1.1")
    helper = compiled("shim.c", *SHARED, "-DIS_HELPER", "-Wl,-soname,libhelper.so", output="libhelper.so")
    copy(helper, folder / "libhelper.so")
    shim(folder, "libcuda.so.1", "libcuda.so.1.1", "handle", "-DHELPER", f"-L{folder}", "-l:libhelper.so")
    is_invisible_and_limits(folder, tmp_path)


def test_a_shim_that_finds_what_it_opens_by_its_own_runpath(tmp_path: Path) -> None:
    folder, inner = tmp_path / "driver", tmp_path / "driver" / "inner"
    folder.mkdir()
    implementation(inner, "libreal.so.1")
    shim(folder, "libcuda.so.1", "libreal.so.1", "handle", "-Wl,-rpath,$ORIGIN/inner")
    is_invisible_and_limits(folder, tmp_path)
    (folder / "libcuda.so.1").unlink()
    shim(folder, "libcuda.so.1", "$ORIGIN/inner/libreal.so.1", "handle")
    is_invisible_and_limits(folder, tmp_path)


def test_a_tool_that_the_driver_opens_is_limited_as_programs_are(tmp_path: Path) -> None:
    """A profiler's library (CUDA_INJECTION64_PATH) belongs to the user, even if the driver opens it."""
    folder = tmp_path / "driver"
    implementation(folder, "libcuda.so.1.1")
    shim(folder, "libtool.so", "libcuda.so.1.1", "handle")
    shim(folder, "libcuda.so.1", "libcuda.so.1.1", "handle", f'-DTOOL="{folder}/libtool.so"')
    script = """
from driver_client import *
start()
import ctypes
tool = ctypes.CDLL("libtool.so", mode=ctypes.RTLD_NOLOAD if hasattr(ctypes, "RTLD_NOLOAD") else 4)
p = c_uint64()
print(tool.cuMemAlloc_v2(byref(p), c_size_t(501 * MIB)), tool.cuMemAlloc_v2(byref(p), c_size_t(500 * MIB)))
"""
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m", CUDA_INJECTION64_PATH=f"{folder}/libtool.so")
    assert python(script, env | {"LD_LIBRARY_PATH": f"{folder}:{env['LD_LIBRARY_PATH']}"}) == ["2 0"]
