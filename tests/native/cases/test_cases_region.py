"""Reported bugs of intercept libraries about the shared region: processes that start, die, and are counted together."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ledger_programs import Client
from preloaded import MIB, environment, python, run

from vgpu.native import CardLimit, Limits, Region, simulator

CREW = "from crew import *\n"
PRELUDE = "from driver_client import *\n"


def test_the_second_process_sees_what_it_uses(env: dict[str, str]) -> None:
    """Case 1: once the first process has ended, the next one sees free == total, whatever it allocates."""
    script = """
for size in (900, 640, 1000):
    member = Member()
    print(member.do("start()"), member.ask(f"(alloc({size} * MIB)[0], used() // MIB)"), member.leave())
"""
    assert python(CREW + script, env) == [f"None [0, {size}] 0" for size in (900, 640, 1000)]


def test_a_process_that_starts_among_others_sees_all_of_it(env: dict[str, str]) -> None:
    """Case 1, another of its kind: the first process leaves while others hold memory, the next takes its place."""
    script = """
first, second = crew(2)
for member, size in ((first, 100), (second, 300)):
    member.do("start()")
    member.ask(f"alloc({size} * MIB)[0]")
first.leave()
third = Member()
third.do("start()")
print(third.ask("(alloc(200 * MIB)[0], used() // MIB)"), second.ask("used() // MIB"), third.ask("alloc(501 * MIB)[0]"))
"""
    assert python(CREW + script, env) == ["[0, 500] 500 2"]


def test_survivors_keep_their_usage_when_the_dead_are_cleared(env: dict[str, str]) -> None:
    """Case 2: clearing the slot of a killed process moves the other slots, and their next allocations are lost."""
    script = """
first, second, third = crew(3)
for member in (first, second, third):
    member.do("start()")
first.ask("alloc(400 * MIB)[0]")
first.kill()
print(second.ask("alloc(1001 * MIB)[0]"), third.ask("alloc(300 * MIB)[0]"), second.ask("used() // MIB"))
print(second.ask("alloc(701 * MIB)[0]"), second.ask("alloc(700 * MIB)[0]"), third.ask("alloc(1)[0]"))
"""
    assert python(CREW + script, env) == ["2 0 300", "2 0 2"]


def test_every_order_of_deaths_leaves_exactly_the_living(env: dict[str, str]) -> None:
    """Case 2, another of its kind: processes die first, last and between, and a new one comes after each death."""
    script = """
living, size = [], 0
for _ in range(4):
    living.append(Member())
    living[-1].do("start()")
    living[-1].ask("alloc(100 * MIB)[0]")
for victim in (0, 2, 1):
    living.pop(victim).kill()
    living.append(Member())
    living[-1].do("start()")
    print(living[-1].ask("alloc(801 * MIB)[0]"), living[-1].ask("alloc(100 * MIB)[0]"), living[0].ask("used() // MIB"))
"""
    assert python(CREW + script, env) == ["2 0 400"] * 3


def deaths_at_start(tmp_path: Path, command: str) -> int:
    """Kills starters at each store of `command` in turn until one survives; after each, a new one gets all memory."""
    variables = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    for point in range(1, 200):
        with Client(variables, "-DVGPU_DEATH_POINTS") as starter:
            starter.ask(f"arm {point}")
            survived = starter.try_ask(command) is not None
            if survived:
                return point
        with Client(variables) as fresh:
            ticket = fresh.charge("1g")
            assert ticket is not None, f"after a death at store {point} of {command!r}"
            assert fresh.charge(1) is None
    raise AssertionError("the command never survives")


def test_a_starter_may_die_at_any_store(tmp_path: Path) -> None:
    """Cases 3, 4: a process is killed while it holds the region's lock; later starts wait, even for ever."""
    assert deaths_at_start(tmp_path, "mode") > 1


def test_a_first_allocation_may_die_at_any_store(tmp_path: Path) -> None:
    """Cases 3, 4, another of their kind: killed in the first allocation, which also takes its slot."""
    assert deaths_at_start(tmp_path, "charge 0 600m") > 3


def test_locks_and_owners_of_the_dead_are_void(env: dict[str, str]) -> None:
    """Case 4, another of its kind: a process that held file locks on the whole region, and was killed with them."""
    script = """
import fcntl, os, signal
first = Member()
first.do("start()")
first.do(f'''import fcntl, os
fd = os.open(os.environ["VGPU_DIR"] + "/usage", os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX, 0, 512)''')
first.ask("alloc(500 * MIB)[0]")
first.kill()
second = Member()
print(second.do("start()"), second.ask("(alloc(1000 * MIB)[0], alloc(1)[0])"))
"""
    assert python(CREW + script, env) == ["None [0, 2]"]


def test_waiters_go_on_when_a_starter_is_killed(env: dict[str, str]) -> None:
    """Case 5: sixteen processes wait for one that was killed during its start, and then run without limits."""
    script = """
for round in range(4):
    victims, waiters = crew(4), crew(16)
    for member in victims + waiters:
        member.send("do", "start()")
    for victim in victims:
        victim.kill()
    print({w.answer() for w in waiters}, {w.ask("(alloc(1001 * MIB)[0], alloc(60 * MIB)[0])[0]") for w in waiters},
          waiters[0].ask("used() // MIB"), waiters[1].ask("alloc(41 * MIB)[0]"))
    for w in waiters:
        w.leave()
"""
    assert python(CREW + script, env) == ["{None} {2} 960 2"] * 4


def test_a_killed_starter_is_paid_by_nobody(tmp_path: Path) -> None:
    """Case 5, another of its kind: processes killed while they make contexts that cost memory leave nothing behind."""
    folder = tmp_path / "region"
    folder.mkdir()
    simulator.create(tmp_path / "cards", "T4")
    uuid = simulator.cards(tmp_path / "cards")[0].uuid
    script = """
for round in range(6):
    victims = crew(3)
    for member in victims:
        member.send("do", "start()")
    for victim in victims:
        victim.kill()
last = Member()
print(last.do("start()"), last.ask("(used() // MIB, alloc(900 * MIB)[0], alloc(1)[0])"))
"""
    with Region.create(folder, Limits((CardLimit(uuid, 1000 * MIB, context_bytes=100 * MIB),))):
        assert python(CREW + script, environment(tmp_path, VGPU_DIR=str(folder))) == ["None [100, 0, 2]"]


def test_many_processes_start_at_once(env: dict[str, str]) -> None:
    """Case 6: more than eight starts at the same moment hang for minutes."""
    script = """
members = crew(16)
for member in members:
    member.send("do", "start()")
print({m.answer() for m in members}, {m.ask("alloc(60 * MIB)[0]") for m in members})
print({m.ask("used() // MIB") for m in members}, members[0].ask("alloc(41 * MIB)[0]"))
"""
    assert python(CREW + script, env) == ["{None} {0}", "{960} 2"]


def test_many_processes_start_and_leave_at_once(env: dict[str, str]) -> None:
    """Case 6, another of its kind: starts meet exits and kills of processes that hold memory."""
    script = """
old = crew(8)
for member in old:
    member.do("start()")
    member.ask("alloc(100 * MIB)[0]")
young = crew(12)
for i, member in enumerate(young):
    member.send("do", "start()")
    if i < 8:
        old[i].kill() if i % 2 else old[i].leave()
print({m.answer() for m in young}, {m.ask("alloc(80 * MIB)[0]") for m in young}, young[0].ask("used() // MIB"))
"""
    assert python(CREW + script, env) == ["{None} {0} 960"]


def test_containers_start_without_waiting_for_each_other(tmp_path: Path) -> None:
    """Case 7: one lock serves a whole node; here one container stops during its start, and others still start."""
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    folders = [tmp_path / str(i) for i in range(8)]
    for folder in folders:
        folder.mkdir()
    script = f"""
members = [Member(VGPU_DIR=folder) for folder in {[str(f) for f in folders]!r} for _ in range(5)]
for member in members:
    member.send("do", "start()")
print(len(members), {{m.answer() for m in members}}, {{m.ask("alloc(200 * MIB)[0]") for m in members}})
print({{m.ask("used() // MIB") for m in members}})
"""
    variables = {"VGPU_DIR": str(stopped), "CUDA_DEVICE_MEMORY_LIMIT": "1000m"}
    with Client(variables, "-DVGPU_DEATH_POINTS") as halted:
        halted.ask("halt 1")
        halted.send("mode")
        os.waitid(os.P_PID, halted.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        lines = python(CREW + script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m"))
        os.kill(halted.pid, signal.SIGCONT)
        assert halted.line() == "region"
    assert lines == ["40 {None} {0}", "{1000}"]


def test_a_container_that_holds_its_locks_stops_no_other(tmp_path: Path) -> None:
    """Case 7, another of its kind: one container keeps every lock of its own region while others start."""
    for name in ("held", "free"):
        (tmp_path / name).mkdir()
    script = f"""
holder = Member(VGPU_DIR={str(tmp_path / "held")!r})
holder.do("start()")
holder.do('''import fcntl, os
fd = os.open(os.environ["VGPU_DIR"] + "/usage", os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX)''')
holder.kill(signal.SIGSTOP)
others = [Member(VGPU_DIR={str(tmp_path / "free")!r}) for _ in range(8)]
print({{m.do("start()") for m in others}}, {{m.ask("alloc(125 * MIB)[0]") for m in others}})
print(others[0].ask("used() // MIB"))
holder.kill()
"""
    assert python(CREW + script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m")) == ["{None} {0}", "1000"]


def test_children_forked_after_the_driver_was_loaded_start(env: dict[str, str]) -> None:
    """Case 8: workers forked after the import, each with its own start, hang when they load their model."""
    script = """
import ctypes, pynvml
pynvml.nvmlInit()
found = c_void_p()
cu.cuGetProcAddress(b"cuMemAlloc", byref(found), 12000, c_uint64(0))
members = crew(4)
for member in members:
    member.send("do", "start()")
print([m.answer() for m in members], [m.ask("(alloc(240 * MIB)[0], used() > 0)[0]") for m in members])
print(members[0].ask("used() // MIB"), members[3].ask("alloc(41 * MIB)[0]"))
"""
    assert python(CREW + script, env) == ["[None, None, None, None] [0, 0, 0, 0]", "960 2"]


NOWHERE = {"a folder that is not there": "missing/folder", "a file": "file", "below a file": "file/folder"}


@pytest.mark.parametrize("what", NOWHERE)
def test_a_region_that_cannot_be_made(tmp_path: Path, what: str) -> None:
    """Case 50, another of its kind: without a place for the region nothing can be had, and a line says why."""
    (tmp_path / "file").write_text("no folder")
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="1000m", VGPU_DIR=str(tmp_path / NOWHERE[what]))
    done = run([sys.executable, "-c", PRELUDE + "print(cu.cuInit(0), cu.cuInit(0))"], env)
    assert done.stdout == "2 2\n"
    (line,) = done.stderr.splitlines()
    assert "no GPU memory can be had: " in line
    assert str(tmp_path / NOWHERE[what]) in line


def can_mount() -> bool:
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own (unshare -rm) for /run/vgpu")
class TestManaged:
    """In a container that an agent manages."""

    def inside(self, tmp_path: Path, script: str, prepare: str = "true", shell: str = "exec env -i") -> list[str]:
        region = tmp_path / "managed"
        region.mkdir()
        simulator.create(tmp_path / "cards", "T4")
        uuid = simulator.cards(tmp_path / "cards")[0].uuid
        Region.create(region, Limits((CardLimit(uuid, 1000 * MIB),))).close()
        (tmp_path / "client.py").write_text(PRELUDE + script)
        given = {k: v for k, v in environment(tmp_path).items() if k.startswith(("LD_", "VGPU_SIM", "PYTHONPATH"))}
        settings = " ".join(f"{k}={v}" for k, v in given.items())
        mounts = (
            "mount -t tmpfs none /run && mkdir /run/vgpu && touch /run/vgpu/limits /run/vgpu/usage && "
            f"mount --bind {region}/limits /run/vgpu/limits && mount -o remount,bind,ro /run/vgpu/limits && "
            f"mount --bind {region}/usage /run/vgpu/usage && {prepare} && "
        )
        command = f"{mounts} {shell} {settings} {sys.executable} {tmp_path / 'client.py'}"
        return run(["unshare", "-rm", "sh", "-c", command], os.environ).stdout.splitlines()

    REFUSED = (
        "print(cu.cuInit(0), cu.cuInit(0), cu.cuMemAlloc_v2(byref(c_uint64()), c_size_t(1)) != 0)\nprint('goes on')"
    )

    def test_an_unwritable_file_means_errors_and_no_exit(self, tmp_path: Path) -> None:
        """Case 50: a region that cannot be written ends the program; here CUDA returns 2 and it continues."""
        prepare = "mount -o remount,bind,ro /run/vgpu/usage"
        assert self.inside(tmp_path, self.REFUSED, prepare) == ["2 2 True", "goes on"]

    def test_a_login_without_environment_is_limited(self, tmp_path: Path) -> None:
        """Case 52, another of its kind: a shell in a shell, each with its environment emptied, in another session."""
        script = "start()\nprint(alloc(1001 * MIB)[0], alloc(1000 * MIB)[0])"
        lines = self.inside(tmp_path, script, shell="env -i setsid -w env -i sh -c 'exec \"$@\"' sh env -i")
        assert lines == ["2 0"]

    @pytest.mark.parametrize("cgroup", ["/dev/null", "/etc/passwd"])
    def test_the_cgroup_of_a_process_says_nothing(self, tmp_path: Path, cgroup: str) -> None:
        """Case 66, and another file as another of its kind: without the expected cgroups, no process is found."""
        script = (
            "import os, pynvml as n\nn.nvmlInit()\ncard = n.nvmlDeviceGetHandleByIndex(0)\nstart()\n"
            "print(alloc(1001 * MIB)[0], alloc(300 * MIB)[0], "
            "[(p.pid == os.getpid(), p.usedGpuMemory // MIB) for p in n.nvmlDeviceGetComputeRunningProcesses(card)])"
        )
        prepare = f"mount --bind {cgroup} /proc/self/cgroup && mount -t tmpfs none /sys/fs/cgroup"
        lines = self.inside(tmp_path, script, prepare.replace("/proc/self/", "/proc/$$/"))
        assert lines == ["2 0 [(True, 300)]"]
