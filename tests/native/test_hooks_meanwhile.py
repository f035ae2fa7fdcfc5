"""Charges while other threads of the program write arguments, and with behaviour of newer drivers.

The driver is libvgpu/tests/clients/other_driver.c: it counts what it holds and calls the program back in the middle of
its work.
"""

import sys
from pathlib import Path
from shutil import copy

import pytest
from other_driver import PRELUDE, SPARSE, library
from preloaded import MIB, environment, python, run

from vgpu.native import CardLimit, Limits, Region


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    library(tmp_path / "driver", "other_driver.c", "libcuda.so.1")
    return environment(tmp_path, LD_LIBRARY_PATH=str(tmp_path / "driver"), CUDA_DEVICE_MEMORY_LIMIT_0="100m")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            """
handle, properties = c_ulonglong(), AllocationProperties(type=1, handles=1, location=Location(HOST, 0))
meanwhile("cuMemCreate", 0, lambda: setattr(properties.location, "type", DEVICE))
cu.cuMemCreate(byref(handle), c_size_t(200 * MIB), byref(properties), c_ulonglong(0))
""",
            id="block",
        ),
        pytest.param(
            """
array, shape = c_void_p(), Array3DDescriptor(1 * MIB, 1, 0, UINT8, 1, 0)
meanwhile("cuArray3DCreate", 0, lambda: setattr(shape, "width", 200 * MIB))
cu.cuArray3DCreate_v2(byref(array), byref(shape))
""",
            id="array",
        ),
        pytest.param(
            """
memory, words = c_void_p(), (c_uint64 * 13)()  # CUDA_EXTERNAL_MEMORY_HANDLE_DESC: type, handle (16 bytes), size
words[0], words[3] = 1, MIB
meanwhile("cuImportExternalMemory", 0, lambda: words.__setitem__(3, 200 * MIB))
cu.cuImportExternalMemory(byref(memory), byref(words))
""",
            id="external",
        ),
        pytest.param(
            """
pool, properties = c_void_p(), PoolProperties(type=1, handles=0, location=Location(DEVICE, 0))
meanwhile("cuMemPoolCreate", 1, lambda: setattr(properties.location, "type", HOST))
cu.cuMemPoolCreate(byref(pool), byref(properties))
from_pool(pool, 200 * MIB)
""",
            id="pool",
        ),
    ],
)
def test_a_description_that_changes_meanwhile_gives_nothing_uncharged(env: dict[str, str], script: str) -> None:
    lines = python(PRELUDE + script + "print(charged() >= held.value // MIB, held.value <= 100 * MIB)", env)
    assert lines == ["True True"]


def test_a_pointer_that_is_overwritten_before_it_is_booked_stands_for_nothing_else(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
small = alloc(MIB)[1]
large = c_ulonglong()
meanwhile("cuMemAlloc", 1, lambda: setattr(large, "value", small))
ok(cu.cuMemAlloc_v2(byref(large), c_size_t(60 * MIB)))
ok(free(small))
print(*books())
pitch, pointer = c_size_t(), c_ulonglong()
meanwhile("cuMemAllocPitch", 1, lambda: setattr(pitch, "value", 1))
ok(cu.cuMemAllocPitch_v2(byref(pointer), byref(pitch), c_size_t(512), c_size_t(20 * 2048), 4))
print(*books())
""",
        env,
    )
    assert lines == ["60 60", "80 80"]


def test_a_handle_that_is_overwritten_before_it_is_booked_stands_for_nothing_else(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
small = made(2 * MIB, DEVICE)[1]
large, properties = c_ulonglong(), AllocationProperties(type=1, handles=1, location=Location(DEVICE, 0))
meanwhile("cuMemCreate", 1, lambda: setattr(large, "value", small))
ok(cu.cuMemCreate(byref(large), c_size_t(60 * MIB), byref(properties), c_ulonglong(0)))
ok(release(small))
print(*books())
""",
        env,
    )
    assert lines == ["60 60"]


def test_the_descriptor_of_an_export_is_the_drivers_answer(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
_, handle, _ = made(60 * MIB, DEVICE)
decoy, fd = os.open("/dev/null", os.O_RDONLY), c_int()
meanwhile("cuMemExportToShareableHandle", 1, lambda: setattr(fd, "value", decoy))
ok(cu.cuMemExportToShareableHandle(byref(fd), c_ulonglong(handle), 1, c_ulonglong(0)))
os.close(decoy)
ok(release(handle))
print(charged(), fd.value != decoy)
os.close(fd.value)
print(charged())
""",
        env,
    )
    assert lines == ["60 True", "0"]


def test_the_drivers_own_address_is_never_to_be_seen(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
found, seen = c_void_p(), []
cu.cuMemAlloc_v2  # known from then on
meanwhile("cuGetProcAddress", 1, lambda: seen.append(found.value))
ok(cu.cuGetProcAddress_v2(b"cuMemAlloc", byref(found), 12000, c_ulonglong(0), None))
print(seen, found.value == cast(cu.cuMemAlloc_v2, c_void_p).value)
""",
        env,
    )
    assert lines == ["[None] True"]


def test_copies_of_the_driver_leave_room_for_the_one_in_use(tmp_path: Path, env: dict[str, str]) -> None:
    names = (Path(__file__).parents[1] / "data/exports.txt").read_text().split()
    for number in range(60):
        folder = tmp_path / f"copy-{number}"
        folder.mkdir()
        copy(tmp_path / "driver/libcuda.so.1", folder / "libcuda.so.1")
    lines = python(
        PRELUDE
        + f"""
for number in range(60):
    other = CDLL("{tmp_path}/copy-%d/libcuda.so.1" % number)
    for name in {names}:
        getattr(other, name, None)
found = c_void_p()
ok(cu.cuGetProcAddress_v2(b"cuMemAlloc", byref(found), 12000, c_ulonglong(0), None))
print(found.value == cast(cu.cuMemAlloc_v2, c_void_p).value)
""",
        env,
    )
    assert lines == ["True"]


def test_the_pool_that_was_charged_is_the_one_that_is_asked(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
one, other = pool_of(DEVICE), pool_of(DEVICE)
cu.cuDeviceSetMemPool(0, one)
pointer = alloc_async(60 * MIB, 1)[1]
ok(free_async(pointer, 1))
meanwhile("cuMemAllocAsync", 0, lambda: cu.cuDeviceSetMemPool(0, other))
ok(alloc_async(60 * MIB, 1)[0])  # of what is reserved in one
print(*books())
""",
        env,
    )
    assert lines == ["60 60"]


def test_a_driver_that_cannot_be_asked_for_a_certain_pool_gives_nothing_uncharged(tmp_path: Path) -> None:
    library(tmp_path / "driver", "other_driver.c", "libcuda.so.1", "-DWITHOUT_POOL_OF_CHOICE")
    env = environment(tmp_path, LD_LIBRARY_PATH=str(tmp_path / "driver"), CUDA_DEVICE_MEMORY_LIMIT_0="100m")
    assert python(PRELUDE + "print(alloc_async(200 * MIB, 1)[0], *books(), alloc(MIB)[0])", env) == ["2 0 0 0"]


def test_a_stream_needs_no_current_context(env: dict[str, str]) -> None:
    """cuda.h: only the default stream does."""
    lines = python(
        PRELUDE
        + """
pool = pool_of(DEVICE)
ok(cu.cuCtxSetCurrent(None))
print(alloc_async(200 * MIB, 16)[0], alloc_async(32 * MIB, 16)[0], *(from_pool(pool, n * MIB, 16) for n in (200, 32)))
print(alloc_async(200 * MIB, 99)[0])
ok(cu.cuCtxSetCurrent(c_void_p(4096)))
print(*books())
""",
        env,
    )
    assert lines == ["2 0 2 0", "400", "64 64"]


@pytest.mark.parametrize(
    "end",
    ["cuStreamEndCapture(c_void_p(1), byref(c_void_p()))", "cuStreamDestroy_v2(1)", "cuCtxDestroy_v2(c_void_p(4096))"],
)
def test_no_capture_ends_while_an_allocation_is_recorded(env: dict[str, str], end: str) -> None:
    lines = python(
        PRELUDE
        + f"""
ended = threading.Event()
def end():
    ok(cu.{end})
    ended.set()
def try_to_end():
    threading.Thread(target=end).start()
    ended.wait(0.3)  # where nothing stops it, this is long enough
ok(cu.cuStreamBeginCapture_v2(c_void_p(1), 2))
meanwhile("cuMemAllocAsync", 0, try_to_end)
ok(alloc_async(200 * MIB, 1)[0])
print(ended.wait(50), *books())
print(alloc_async(200 * MIB, 1)[0], alloc_async(50 * MIB, 1)[0])
""",
        env,
    )
    assert lines == ["True 0 0", "2 0"]


DESTROYS = {"cuStreamDestroy": "cuStreamDestroy_v2(16)", "cuCtxDestroy": "cuCtxDestroy_v2(c_void_p(4096))"}


@pytest.mark.parametrize("entry", DESTROYS)
def test_nothing_is_recorded_where_a_stream_is_about_to_go(env: dict[str, str], entry: str) -> None:
    """Its handle may belong to another stream by the time the driver is asked."""
    lines = python(
        PRELUDE
        + f"""
ok(cu.cuStreamBeginCapture_v2(c_void_p(16), 2))
print(alloc_async(200 * MIB, 16)[0])
meanwhile("{entry}", 0, lambda: print(alloc_async(200 * MIB, 16)[0]))
print(cu.{DESTROYS[entry]}, *books())
""",
        env,
    )
    assert lines == ["0", "2", "0 0 0"]


@pytest.mark.parametrize("entry", [*DESTROYS, "cuDevicePrimaryCtxRelease"])
@pytest.mark.parametrize("captures", [False, True])
def test_who_is_called_back_while_something_is_destroyed_may_destroy(
    env: dict[str, str], entry: str, captures: bool
) -> None:
    """Tools do this in the thread itself, or a host function of that context may wait for it in another thread."""
    calls = DESTROYS | {"cuDevicePrimaryCtxRelease": "cuDevicePrimaryCtxRelease_v2(0)"}
    lines = python(
        PRELUDE
        + SPARSE
        + f"""
ok(cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0))
if {captures}:
    ok(cu.cuStreamBeginCapture_v2(c_void_p(1), 2))
_, block, _ = made(60 * MIB, DEVICE)
ok(tiles(sparse(), MAP, block))
def here():
    ok(cu.cuStreamDestroy_v2(16)), ok(release(block)), ok(cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0))
    there = threading.Thread(target=lambda: ok(cu.cuStreamDestroy_v2(16)), daemon=True)
    there.start()
    there.join(50)
    print(there.is_alive())
meanwhile("{entry}", 0, here)
print(cu.{calls[entry]})
""",
        env,
    )
    assert lines == ["False", "0"]


def test_measuring_goes_on_in_a_primary_context_that_others_retain(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
def retain():
    ok(cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0))
retain()
for i in range(1000):
    retain()
    for j in range(20):
        ok(launch(c_void_p(64)))
    ok(cu.cuDevicePrimaryCtxRelease_v2(0))
events = c_uint64.in_dll(cu, "other_events").value
print(events > 0, events <= 2 * 256 + 1)  # of one context
""",
        env | {"CUDA_DEVICE_SM_LIMIT": "90"},
    )
    assert lines == ["True True"]


def test_what_the_driver_says_that_a_context_may_take_is_charged(env: dict[str, str]) -> None:
    """The driver may have rounded the value, or another call may come between."""
    lines = python(
        PRELUDE
        + """
STACK, HEAP = 0, 2
def allow(limit, size):
    return cu.cuCtxSetLimit(limit, c_size_t(size))
print(allow(HEAP, 41 * MIB), charged(), allow(HEAP, 108 * MIB), charged(), allow(HEAP, 44 * MIB), charged())
print(alloc(62 * MIB)[0], allow(HEAP, 45 * MIB), charged(), allow(HEAP, 30 * MIB), charged())
meanwhile("cuCtxSetLimit", 0, lambda: print(allow(HEAP, 20 * MIB), charged()))
print(allow(HEAP, 40 * MIB), charged(), allow(HEAP, 8 * MIB), charged())
print(allow(STACK, 1024), allow(STACK, 2048))  # of how many threads is not known
""",
        env,
    )
    assert lines == ["0 36 0 100 0 36", "0 2 98 0 86", "0 74", "0 94 0 62", "0 2"]


def test_memory_of_a_part_of_a_device_is_the_devices(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
print(made(101 * MIB, DOMAIN)[0], made(40 * MIB, DOMAIN)[0], *books())
pool = pool_of(DOMAIN)
print(from_pool(pool, 61 * MIB), from_pool(pool, 32 * MIB), *books())
print(made(500 * MIB, HOST)[0], *books())
""",
        env,
    )
    assert lines == ["2 0 40 40", "2 0 72 72", "0 72 72"]


def test_default_pools_of_the_host_and_managed_pools_are_what_they_are(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
host = c_void_p()
ok(cu.cuMemGetDefaultMemPool(byref(host), byref(Location(HOST, 0)), 1))
print(from_pool(host, 500 * MIB), *books())
managed = pool_of(0, type=MANAGED)
print(from_pool(managed, 101 * MIB), from_pool(managed, 64 * MIB), *books())
""",
        env,
    )
    assert lines == ["0 0 0", "2 0 64 64"]


@pytest.mark.parametrize(("type", "number"), [(0, 0), (5, -2), (9, 0), (1, -1)])
def test_a_pool_whose_place_the_driver_does_not_name_is_paid_by_who_allocates(
    env: dict[str, str], type: int, number: int
) -> None:
    """cuda.h: no place (0), invisible (5); a place of an unknown kind; a device that does not exist."""
    lines = python(
        PRELUDE
        + f"""
(c_int * 2).in_dll(cu, "other_location")[:] = [{type}, {number}]
pool = c_void_p()
ok(cu.cuDeviceGetMemPool(byref(pool), 0))
print(from_pool(pool, 101 * MIB), from_pool(pool, 64 * MIB), *books())
""",
        env,
    )
    assert lines == ["2 0 64 64"]


def test_a_block_or_pool_of_a_kind_of_place_that_is_not_known_is_paid_by_who_makes_it(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
print(made(101 * MIB, 9)[0], made(40 * MIB, 9)[0], *books())
pool = pool_of(9)
print(from_pool(pool, 61 * MIB), from_pool(pool, 32 * MIB), *books())
""",
        env,
    )
    assert lines == ["2 0 40 40", "2 0 72 72"]


def with_contexts(folder: Path, bytes_of_one: int) -> dict[str, str]:
    library(folder / "driver", "other_driver.c", "libcuda.so.1")
    (folder / "region").mkdir()
    uuid = "GPU-07070707-0707-0707-0707-070707070707"
    Region.create(folder / "region", Limits((CardLimit(uuid, 100 * MIB, context_bytes=bytes_of_one),))).close()
    return environment(folder, LD_LIBRARY_PATH=str(folder / "driver"), VGPU_DIR=str(folder / "region"))


@pytest.mark.parametrize("cost", [30 * MIB, 0])
@pytest.mark.parametrize("end", ["cuDevicePrimaryCtxReset_v2(0)", "cuDevicePrimaryCtxRelease_v2(0)"])
def test_a_primary_context_that_no_call_has_retained_is_charged_and_cleared_away(
    tmp_path: Path, end: str, cost: int
) -> None:
    """The CUDA runtime can activate it through a private table of the driver."""
    script = f"""
retained = c_int.in_dll(cu, "other_retained")
for _ in range(3):
    retained.value = 1
    print(alloc(40 * MIB)[0], charged(), cu.cuDevicePrimaryCtxRetain(byref(c_void_p()), 0), charged())
    ok(cu.cuDevicePrimaryCtxRelease_v2(0))
    ok(cu.{end})
    print(charged())
"""
    first = (40 * MIB + cost) // MIB
    assert python(PRELUDE + script, with_contexts(tmp_path, cost)) == [f"0 {first} 0 {first}", "0"] * 3


def test_a_context_that_came_by_a_call_that_is_not_hooked_is_charged(tmp_path: Path) -> None:
    """Such as cuGLCtxCreate and cuD3D11CtxCreate, of which cuda.h knows nothing."""
    script = """
print(alloc(71 * MIB)[0], charged(), alloc(70 * MIB)[0], charged())
ok(cu.cuCtxDestroy_v2(c_void_p(4096)))
ok(cu.cuCtxSetCurrent(c_void_p(8192)))  # another one
print(charged())
"""
    assert python(PRELUDE + script, with_contexts(tmp_path, 30 * MIB)) == ["2 30 0 100", "30"]


def test_what_is_mapped_into_a_sparse_array_stays_charged(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + SPARSE
        + """
array = sparse()
_, block, _ = made(60 * MIB, DEVICE)
ok(tiles(array, MAP, block))
ok(release(block))
print(*books(), made(60 * MIB, DEVICE)[0])
ok(tiles(array, UNMAP, width=2048))
print(*books())
_, block, _ = made(60 * MIB, DEVICE)
ok(tiles(array, MAP, block)), ok(release(block))
ok(cu.cuArrayDestroy(array))
print(*books())
""",
        env,
    )
    assert lines == ["60 60 2", "0 0", "0 0"]


def test_what_is_mapped_into_a_sparse_array_goes_with_the_arrays_context(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + SPARSE
        + """
array = sparse()
ok(cu.cuCtxSetCurrent(c_void_p(8192)))
_, block, _ = made(60 * MIB, DEVICE)
ok(tiles(array, MAP, block)), ok(release(block))
print(cu.cuCtxDestroy_v2(c_void_p(8192)), charged(), cu.cuCtxDestroy_v2(c_void_p(4096)), charged())
""",
        env,
    )
    assert lines == ["0 60 0 0"]


def test_what_is_bound_to_a_logical_endpoint_stays_charged(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
def bound():
    _, block, _ = made(60 * MIB, DEVICE)
    size = c_uint64(60 * MIB)
    ok(cu.cuLogicalEndpointBindMem(7, 0, c_uint64(2 * MIB), c_ulonglong(block), c_uint64(0), size, c_ulonglong(0)))
    ok(release(block))
bound()
print(*books(), made(60 * MIB, DEVICE)[0])
ok(cu.cuLogicalEndpointUnbind(7, 0, c_uint64(0), c_uint64(100 * MIB)))
print(*books())
bound()
print(cu.cuLogicalEndpointDestroy(8), *books(), cu.cuLogicalEndpointDestroy(7), *books())
""",
        env,
    )
    assert lines == ["60 60 2", "0 0", "1 60 60 0 0 0"]


def test_video_with_16_bits_per_channel_is_charged_as_such(env: dict[str, str]) -> None:
    lines = python(
        PRELUDE
        + """
Y416, array = 0xb1, c_void_p()
print(cu.cuArray3DCreate_v2(byref(array), byref(Array3DDescriptor(4096, 3200, 0, Y416, 1, 0))), *books())
print(cu.cuArray3DCreate_v2(byref(array), byref(Array3DDescriptor(4096, 1, 0, Y416, 1, 0))))
""",
        env,
    )
    assert lines == ["0 100 100", "2"]


def test_protected_memory_is_the_slices(tmp_path: Path, env: dict[str, str]) -> None:
    library(tmp_path / "driver", "other_nvml.c", "libnvidia-ml.so.1")
    lines = python(
        PRELUDE
        + """
ml, card, memory = CDLL("libnvidia-ml.so.1"), c_void_p(), (c_uint64 * 3)()  # nvmlMemory_t: total, free, used
ok(alloc(30 * MIB)[0])
ok(ml.nvmlInit_v2()), ok(ml.nvmlDeviceGetHandleByIndex_v2(0, byref(card)))
ok(ml.nvmlDeviceGetConfComputeProtectedMemoryUsage(card, memory))
print(*(bytes // MIB for bytes in memory))
""",
        env,
    )
    assert lines == ["100 70 30"]


@pytest.mark.parametrize("variables", [{}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "100m"}, {"VGPU_DIR": "."}])
def test_a_program_that_has_no_descriptors_left_is_limited_as_it_should_be_when_it_has(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    library(tmp_path / "driver", "other_driver.c", "libcuda.so.1")
    if "VGPU_DIR" in variables:
        (tmp_path / "region").mkdir()
        variables = {"VGPU_DIR": str(tmp_path / "region"), "CUDA_DEVICE_MEMORY_LIMIT_0": "100m"}
    script = """
import os, resource
from driver_client import *
from ctypes import *
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
cu.cuInit(0)
print(alloc(60 * MIB)[0], alloc(MIB)[0])
for fd in taken:
    os.close(fd)
print(cu.cuInit(0), alloc(60 * MIB)[0], alloc(60 * MIB)[0])
"""
    env = environment(tmp_path, LD_LIBRARY_PATH=str(tmp_path / "driver"), **variables)
    done = run([sys.executable, "-c", script], env)
    assert "no GPU memory can be had: /run/vgpu/limits: Too many open files" in done.stderr
    assert done.stdout.splitlines() == ["2 2", "0 0 2" if variables else "0 0 0"]
