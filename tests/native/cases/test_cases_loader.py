"""Reported bugs of intercept libraries about look-up, start and manners of the library."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import compiled, environment, python, run

from vgpu.native import paths

PRELUDE = "from driver_client import *\n"
#: what a script's dlsym finds: "object:symbol", as the dynamic linker names it
SYMBOLS = """
import ctypes
libc = ctypes.CDLL(None)
libc.dlsym.restype = libc.dlvsym.restype = libc.dlopen.restype = c_void_p

class Info(Structure):
    _fields_ = [("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("address", c_void_p)]

def where(address):
    info = Info()
    if not address or not libc.dladdr(c_void_p(address), byref(info)):
        return "-"
    return info.file.decode().split("/")[-1] + ":" + (info.symbol or b"?").decode()

def find(name, handle=None):
    first, again = (libc.dlsym(c_void_p(handle), name.encode()) for _ in range(2))
    return where(first) if first == again else "changes"
"""
NEXT = 2**64 - 1


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "not linked"])
def test_a_library_that_asks_its_own_handle(env: dict[str, str], tmp_path: Path, linked: bool) -> None:
    """Case 22, and one not linked with the driver as another of its kind: a look-up in its own handle hangs."""
    asker = compiled(
        "self_handle.c", "-shared", "-fPIC", "-Wl,--no-as-needed", output=f"libasker{linked}.so", driver=linked
    )
    script = (
        PRELUDE
        + f"""
import ctypes
start()
asker = ctypes.CDLL({str(asker)!r}, mode=ctypes.RTLD_LOCAL)
handle = c_ulonglong()
properties = AllocationProperties(type=1, location=Location(1, 0))
print(asker.create_by_own_handle(byref(handle), c_size_t(1002 * MIB), byref(properties)),
      asker.create_by_own_handle(byref(handle), c_size_t(1000 * MIB), byref(properties)))
"""
    )
    assert python(script, env) == ["2 0" if linked else "1000 1000"]
    assert python(script, environment(tmp_path, preload=False)) == ["0 0" if linked else "1000 1000"]


def test_the_export_table_is_the_drivers_own(env: dict[str, str], tmp_path: Path) -> None:
    """Case 45: programs hang with drivers that call their own private tables; here the library passes these through."""
    script = (
        PRELUDE
        + SYMBOLS
        + """
table = c_void_p()
print(cu.cuGetExportTable(byref(table), bytes(range(16))), table.value, cu.cuGetExportTable(None, None))
print(find("cuGetExportTable", cu._handle))
"""
    )
    assert python(script, env) == python(script, environment(tmp_path, preload=False))


def test_the_export_table_by_look_up_is_the_drivers_own(env: dict[str, str]) -> None:
    """Case 45, another of its kind: reached by cuGetProcAddress, before and after the start."""
    script = (
        PRELUDE
        + SYMBOLS
        + """
for _ in range(2):
    found, status = c_void_p(), c_int()
    ok(cu.cuGetProcAddress_v2(b"cuGetExportTable", byref(found), 12000, c_uint64(0), byref(status)))
    print(where(found.value))
    start()
"""
    )
    assert python(script, env) == ["libcuda.so.1:cuGetExportTable"] * 2


def test_only_public_symbols_of_the_c_library() -> None:
    """Case 46: the library needs private symbols of one glibc; the next one lacks them, and programs do not start."""
    listing = run(["readelf", "--dyn-syms", "-W", paths.libvgpu()], os.environ).stdout
    undefined = re.findall(r" UND (\S+)", listing)
    assert undefined
    assert not [name for name in undefined if "PRIVATE" in name or name.startswith(("_dl_", "__libc_dl"))]


def test_every_symbol_is_bound_at_the_start(env: dict[str, str]) -> None:
    """Case 46, another of its kind: programs that bind everything at their start do start, and are limited."""
    strict = env | {"LD_BIND_NOW": "1"}
    run(["/bin/true"], {k: v for k, v in strict.items() if k != "LD_LIBRARY_PATH"})
    assert python(PRELUDE + "start()\nprint(alloc(1001 * MIB)[0])", strict) == ["2"]


def test_the_next_definition_of_a_name_is_always_the_same(env: dict[str, str], tmp_path: Path) -> None:
    """Case 47, another of its kind: RTLD_NEXT of names of the C library and of the look-up functions themselves."""
    script = (
        PRELUDE
        + SYMBOLS
        + f"""
for name in ("malloc", "dlopen", "dlsym", "dlvsym", "getenv", "cuNoSuchThing", "cudaMalloc"):
    print(name, find(name, {NEXT}))
"""
    )
    assert python(script, env) == python(script, environment(tmp_path, preload=False))


def test_libraries_whose_names_begin_like_the_drivers(env: dict[str, str], tmp_path: Path) -> None:
    """Case 48, another of its kind: cuBLAS, cuFFT, cuSOLVER, NVTX … asked by the program, next and default handle."""
    wrapper = compiled("wrapper.c", "-shared", "-fPIC", "-Wl,-Bsymbolic", output="libwrapper.so")
    script = (
        PRELUDE
        + SYMBOLS
        + f"""
own = libc.dlopen({str(wrapper)!r}.encode(), 2)
for name in ("cudnnCreate", "cublasLtCreate", "cufftPlan1d", "cusolverDnCreate", "curandGenerate", "cu", "c", "", "nv",
             "nvml", "nvtxMarkA", "nvmlInit", "cuMemAlloc_v2_ptds", "cumemalloc_v2", "CUMEMALLOC_V2"):
    print(name, find(name), find(name, {NEXT}), find(name, own), find(name, libc.dlopen(None, 2)))
"""
    )
    lines = python(script, env)
    assert lines == python(script, environment(tmp_path, preload=False))
    assert "libwrapper.so:cudnnCreate" in lines[0]


def test_handlers_and_mask_of_the_program_stay(env: dict[str, str]) -> None:
    """Case 49, another of its kind: a program's own handlers are there after refusals, launches and forks."""
    script = (
        PRELUDE
        + """
import os, signal
caught = []
signals = [getattr(signal, "SIG" + name) for name in "USR1 USR2 TERM CHLD BUS PROF ALRM".split()]
for number in signals:
    signal.signal(number, lambda number, frame: caught.append(number))
os.umask(0o027)
if os.fork() == 0:
    start()
    os._exit(alloc(1001 * MIB)[0])
print(os.wait()[1] >> 8)
start()
print(alloc(1001 * MIB)[0], alloc(10 * MIB)[0], launch(function("k_100us")), cu.cuCtxSynchronize())
for number in signals:
    os.kill(os.getpid(), number)
print(set(signals) <= set(caught), oct(os.umask(0)))
"""
    )
    assert python(script, env | {"CUDA_DEVICE_SM_LIMIT": "50"}) == ["2", "2 0 0 0", "True 0o27"]


def test_a_missing_driver_is_reported_as_before(tmp_path: Path) -> None:
    """Case 51, another of its kind: a program that tries for a driver and finds none sees the linker's own message."""
    script = (
        "import ctypes\ntry:\n    ctypes.CDLL('libcuda.so.1')\nexcept OSError as error:\n    print(error)\n"
        "ctypes.CDLL(None).dlsym.restype = ctypes.c_void_p\n"
        "print(ctypes.CDLL(None).dlsym(ctypes.c_void_p(ctypes.CDLL(None)._handle), b'cuNoSuchThing'))"
    )
    bare, limited = environment(tmp_path, preload=False), environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m")
    for variables in (bare, limited):
        variables.pop("LD_LIBRARY_PATH")
    assert python(script, limited) == python(script, bare)


def test_other_interfaces_are_named_as_not_counted() -> None:
    """Case 60: Vulkan allocates without the library; the page about limits says so."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "limits.md").read_text()
    for interface in ("Vulkan", "OpenGL", "NVENC"):
        assert interface in text


@pytest.mark.parametrize("name", ["libcuda.so.999.01.02", "libcuda.so.1"])
def test_a_driver_of_an_unknown_version(tmp_path: Path, name: str) -> None:
    """Case 64, and one opened by its path as another of its kind: drivers of unknown versions are not found."""
    folder = tmp_path / "driver"
    folder.mkdir()
    shutil.copy(paths.simulator() / "libcuda.so.1", folder / name)
    if name != "libcuda.so.1":
        (folder / "libcuda.so.1").symlink_to(name)
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m")
    script = PRELUDE + "start()\nprint(alloc(1001 * MIB)[0], alloc(1000 * MIB)[0], info()[1] // MIB)"
    if name == "libcuda.so.1":
        env.pop("LD_LIBRARY_PATH")
        script = script.replace(
            "from driver_client", f"import ctypes; ctypes.CDLL({str(folder / name)!r})\nfrom driver_client"
        )
    else:
        env["LD_LIBRARY_PATH"] = str(folder)
    assert python(script, env) == ["2 0 1000"]


def test_the_next_definition_of_a_hooked_name_is_the_hook(env: dict[str, str]) -> None:
    """Case 71, another of its kind: RTLD_NEXT and dlvsym of other hooked names, from a library that came later."""
    script = (
        PRELUDE
        + SYMBOLS
        + f"""
nvml = ctypes.CDLL("libnvidia-ml.so.1")
for name in ("cuMemAllocAsync", "cuGetProcAddress_v2", "cuMemCreate", "nvmlDeviceGetMemoryInfo"):
    print(find(name, {NEXT}), find(name, nvml._handle if name[0] == "n" else cu._handle))
"""
    )
    names = ("cuMemAllocAsync", "cuGetProcAddress_v2", "cuMemCreate", "nvmlDeviceGetMemoryInfo")
    assert python(script, env) == [f"libvgpu.so:{name} libvgpu.so:{name}" for name in names]


def test_threads_that_look_up_and_start_together(env: dict[str, str]) -> None:
    """Cases 8, 69, another of their kind: look-ups and the start race in eight threads."""
    script = (
        PRELUDE
        + SYMBOLS
        + """
import os, threading
answers, contexts, gate = [], [], threading.Barrier(8)
def work():
    gate.wait()
    found = c_void_p()
    asked = cu.cuGetProcAddress_v2(b"cuMemAlloc", byref(found), 12000, c_uint64(0), None)
    here = find("cuMemAlloc_v2", cu._handle), asked
    contexts.append(start())
    answers.append((*here, where(found.value), alloc(10 * MIB)[0]))
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
ok(cu.cuCtxSetCurrent(contexts[0]))
print(len(answers), set(answers), used() // MIB)
"""
    )
    once = ("libvgpu.so:cuMemAlloc_v2", 0, "libvgpu.so:cuMemAlloc_v2", 0)
    assert python(script, env) == [f"8 {{{once}}} 80"]


def test_a_statically_started_interpreter_is_left_alone(tmp_path: Path) -> None:
    """Case 51, another of its kind: shells that start shells with an empty environment end as before."""
    command = ["sh", "-c", f"env -i {sys.executable} -c 'print(6 * 7)'; exec env -i sh -c 'exit 7'"]
    bare = environment(tmp_path, preload=False)
    preloaded = environment(tmp_path)
    plain, ours = (
        subprocess.run(command, env=e, capture_output=True, text=True, check=False) for e in (bare, preloaded)
    )
    assert (
        (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr) == (7, "42\n", "")
    )
