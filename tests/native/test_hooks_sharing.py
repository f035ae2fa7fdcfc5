"""Memory that two processes of a container hold by shareable handles: who pays, and until when."""

from pathlib import Path

import pytest
from preloaded import environment, python

TEAM = """
class Team(Structure):  # CUmulticastObjectProp of cuda.h
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_ulonglong), ("flags", c_ulonglong)]
team, zero, flags, size = c_ulonglong(), c_size_t(0), c_ulonglong(0), c_size_t(600 * MIB)
"""
CREW = """
from crew import *
SHARE = '''
import os
from driver_client import *
def share(size, where=1):  # and how others find the descriptor
    handle, fd = c_ulonglong(), c_int()
    made = AllocationProperties(type=1, handles=1, location=Location(where, 0))
    ok(cu.cuMemCreate(byref(handle), c_size_t(size), byref(made), c_ulonglong(0)))
    ok(cu.cuMemExportToShareableHandle(byref(fd), handle, 1, c_ulonglong(0)))
    return handle.value, [os.getpid(), fd.value]
def take(owner, number):
    handle = c_ulonglong()
    fd = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR)
    status = cu.cuMemImportFromShareableHandle(byref(handle), c_void_p(fd), 1)
    os.close(fd)
    return status, handle.value
def used():  # by the container's account: contexts cost nothing here
    left, total = info()
    return (total - left) // MIB
start()
'''
maker, user = crew(2)
for one in maker, user:
    assert one.do(SHARE) is None
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "region").mkdir()
    return environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="1000m", VGPU_DIR=str(tmp_path / "region"))


def crew(script: str, env: dict[str, str]) -> list[str]:
    return python(CREW + script, env)


def test_memory_stays_charged_when_its_maker_lets_go_of_what_another_imported(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, where = maker.ask("share(300 * MIB)")
print(user.ask("used()"))
status, own = user.ask(f"take(*{where})")
print(status, user.ask("used()"))
maker.ask(f"os.close({where[1]})"), maker.ask(f"release({handle})")
print(user.ask("used()"), maker.ask("alloc(701 * MIB)[0]"), maker.ask("alloc(700 * MIB)[0]"))
user.do("at = reserve(300 * MIB)")
print(user.ask(f"map_block(at, 300 * MIB, {own})"), user.ask(f"release({own})"), user.ask("used()"))
print(user.ask("unmap(at, 300 * MIB)"), user.ask("used()"))
""",
        env,
    )
    assert lines == ["300", "0 600", "300 2 0", "0 0 1000", "0 700"]


def test_memory_stays_charged_while_its_exported_descriptor_is_open(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, (pid, descriptor) = maker.ask("share(600 * MIB)")
print(maker.ask(f"release({handle})"), maker.ask("used()"), *(one.ask("create(600 * MIB)[0]") for one in (maker, user)))
maker.ask(f"os.close({descriptor})")
print(maker.ask("create(600 * MIB)[0]"), maker.ask("used()"))
""",
        env,
    )
    assert lines == ["0 600 2 2", "0 600"]


def test_a_closed_descriptor_whose_number_came_back_holds_nothing(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, (pid, descriptor) = maker.ask("share(600 * MIB)")
maker.ask(f"release({handle})")
maker.ask(f"os.dup2(0, {descriptor})")
print(maker.ask("used()"), maker.ask("create(700 * MIB)[0]"))
""",
        env,
    )
    assert lines == ["0 0"]


def test_who_has_no_room_cannot_import(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, where = maker.ask("share(500 * MIB)")
print(user.ask("alloc(2 * MIB)[0]"), user.ask(f"take(*{where})[0]"), user.ask("used()"))
held = user.ask(f"os.open('/proc/{where[0]}/fd/{where[1]}', os.O_RDWR)")
maker.ask(f"os.close({where[1]})"), maker.ask(f"release({handle})")
print(user.ask(f"take(os.getpid(), {held})[0]"), user.ask("used()"))
""",
        env,
    )
    assert lines == ["0 2 502", "0 502"]


def test_a_driver_that_maps_whole_blocks_alone_tells_the_size_when_it_maps(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, where = maker.ask("share(300 * MIB)")
status, own = user.ask(f"take(*{where})")
print(status, user.ask("used()"))
maker.ask(f"os.close({where[1]})"), maker.ask(f"release({handle})")
user.do("at, other = reserve(300 * MIB), reserve(300 * MIB)")
print(user.ask(f"map_block(at, 100 * MIB, {own})"), user.ask(f"map_block(at, 300 * MIB, {own})"), user.ask("used()"))
print(user.ask(f"map_block(other, 800 * MIB, {own})"), user.ask("used()"))  # 500 more, for the driver to refuse
print(user.ask(f"map_block(other, 300 * MIB, {own})"), user.ask("unmap(at, 300 * MIB)"), user.ask(f"release({own})"))
print(user.ask("used()"), user.ask("unmap(other, 300 * MIB)"), user.ask("used()"))
""",
        env | {"VGPU_SIM_STRICT": "whole-blocks"},
    )
    assert lines == ["0 300", "1 0 300", "1 300", "0 0 0", "300 0 0"]


def test_a_first_mapping_that_fails_for_another_reason_tells_nothing(env: dict[str, str]) -> None:
    """Out of memory, for a moment: charged nothing, the block could be mapped in parts."""
    lines = crew(
        """
from pathlib import Path
from vgpu.native import simulator
handle, where = maker.ask("share(300 * MIB)")
simulator.inject_error(Path(os.environ["VGPU_SIM_DIR"]), "cuMemMap", 2)
print(user.ask(f"take(*{where})[0]"), user.ask(f"take(*{where})[0]"), user.ask("used()"))
""",
        env,
    )
    assert lines == ["2 0 600"]


def test_without_room_such_a_driver_maps_nothing(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, where = maker.ask("share(300 * MIB)")
status, own = user.ask(f"take(*{where})")
user.do("at, kept = reserve(300 * MIB), alloc(401 * MIB)[1]")
print(status, user.ask(f"map_block(at, 300 * MIB, {own})"), user.ask("used()"))
print(user.ask("free(kept)"), user.ask(f"map_block(at, 300 * MIB, {own})"), user.ask("used()"))
""",
        env | {"VGPU_SIM_STRICT": "whole-blocks"},
    )
    assert lines == ["0 2 701", "0 0 600"]


def test_such_a_driver_tells_the_size_to_a_multicast_object_too(env: dict[str, str]) -> None:
    lines = crew(
        f"""
handle, where = maker.ask("share(600 * MIB)")
status, own = user.ask(f"take(*{{where}})")
user.do({TEAM!r} + "ok(cu.cuMulticastCreate(byref(team), byref(Team(1, 600 * MIB, 0, 0))))")
user.do("ok(cu.cuMulticastAddDevice(team, 0))")
bind = f"cu.cuMulticastBindMem(team, zero, c_ulonglong({{own}}), zero, size, flags)"
print(status, user.ask(bind), user.ask("used()"))
print(maker.ask(f"os.close({{where[1]}})"), maker.ask(f"release({{handle}})"))
print(user.ask(bind), user.ask("used()"), user.ask(f"release({{own}})"), user.ask("used()"))
print(user.ask("cu.cuMulticastUnbind(team, 0, zero, size)"), user.ask("used()"))
""",
        env | {"VGPU_SIM_STRICT": "whole-blocks", "VGPU_SIMULATE": "H100x2"},
    )
    assert lines == ["0 2 600", "None 0", "0 600 0 600", "0 0"]


def test_an_import_leaves_captures_alone(env: dict[str, str]) -> None:
    lines = crew(
        """
_, where = maker.ask("share(300 * MIB)")
user.do("stream, graph = c_void_p(), c_void_p()")
print(user.ask("cu.cuStreamCreate(byref(stream), 1), cu.cuStreamBeginCapture_v2(stream, 0)"))
print(user.ask(f"take(*{where})[0]"), user.ask("cu.cuStreamEndCapture(stream, byref(graph))"), user.ask("used()"))
""",
        env | {"VGPU_SIM_STRICT": "captures"},
    )
    assert lines == ["[0, 0]", "0 0 600"]


@pytest.mark.parametrize("granules", [1, 3, 4, 149])
def test_an_import_is_charged_to_the_granule(env: dict[str, str], granules: int) -> None:
    lines = crew(
        f"""
handle, where = maker.ask("share({2 * granules} * MIB)")
print(user.ask(f"take(*{{where}})[0]"), user.ask("used()"))
print(maker.ask(f"os.close({{where[1]}})"), maker.ask(f"release({{handle}})"), user.ask("used()"))
""",
        env,
    )
    assert lines == [f"0 {4 * granules}", f"None 0 {2 * granules}"]


def test_memory_of_the_host_is_not_charged_to_who_imports_it(env: dict[str, str]) -> None:
    lines = crew(
        """
_, where = maker.ask("share(500 * MIB, where=3)")
print(user.ask(f"take(*{where})[0]"), user.ask("used()"))
""",
        env,
    )
    assert lines == ["0 0"]


def test_an_import_of_what_this_process_holds_is_the_same_memory(env: dict[str, str]) -> None:
    lines = crew(
        """
handle, where = maker.ask("share(600 * MIB)")
status, again = maker.ask(f"take(*{where})")
print(status, again == handle, maker.ask("used()"), maker.ask(f"os.close({where[1]})"))
print(maker.ask(f"release({handle})"), maker.ask("used()"), maker.ask(f"release({handle})"), maker.ask("used()"))
""",
        env,
    )
    assert lines == ["0 True 600 None", "0 600 0 0"]


def test_without_limits_an_import_is_the_drivers_alone(tmp_path: Path) -> None:
    script = """
_, where = maker.ask("share(600 * MIB)")
before = user.ask("used()")
print(user.ask(f"take(*{where})[0]"), user.ask("used()") - before)
"""
    assert crew(script, environment(tmp_path)) == ["0 0"]


@pytest.mark.parametrize(
    "call",
    [
        "cu.cuMulticastBindMem(team, zero, block, zero, size, flags)",
        "cu.cuMulticastBindMem_v2(team, 0, zero, block, zero, size, flags)",
        "cu.cuMulticastBindAddr(team, zero, c_uint64(at), size, flags)",
        "cu.cuMulticastBindAddr_v2(team, 0, zero, c_uint64(at), size, flags)",
    ],
)
def test_memory_stays_charged_while_a_multicast_object_has_it(env: dict[str, str], call: str) -> None:
    lines = python(
        f"""
from driver_client import *
{TEAM}
start()
ok(cu.cuMulticastCreate(byref(team), byref(Team(1, 600 * MIB, 0, 0))))
ok(cu.cuMulticastAddDevice(team, 0))
block = c_ulonglong(create(600 * MIB)[1])
at = reserve(600 * MIB)
ok(map_block(at, 600 * MIB, block.value))
ok({call})
ok(unmap(at, 600 * MIB))
ok(release(block.value))
print(used() // MIB, create(600 * MIB)[0])
ok(cu.cuMulticastUnbind(team, 0, zero, size))
print(used() // MIB, create(600 * MIB)[0])
""",
        env | {"VGPU_SIMULATE": "H100x2"},
    )
    assert lines == ["600 2", "0 0"]
