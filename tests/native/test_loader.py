"""The library is invisible where there is no driver, and stands exactly in front of its functions otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from other_driver import library
from preloaded import MIB, compiled, environment, python, run

from vgpu.native import CardLimit, Limits, Region, paths, simulator

PRELUDE = "from driver_client import *\n"
PROGRAMS = [
    ["/bin/true"],
    ["/bin/false"],
    ["bash", "-c", "echo $((6 * 7)); exit 3"],
    [sys.executable, "-c", "import ctypes, threading; print(ctypes.CDLL(None).getpid() > 0)"],
]


@pytest.mark.parametrize("command", PROGRAMS, ids=lambda command: Path(command[0]).name)
def test_programs_without_a_driver_run_as_before(command: list[str], tmp_path: Path) -> None:
    """Case 51: a library that needs libcuda breaks every program of an image without one."""
    bare = environment(tmp_path, preload=False)
    bare.pop("LD_LIBRARY_PATH")
    plain = run(command, bare, code=None)
    preloaded = run(command, bare | {"LD_PRELOAD": str(paths.libvgpu())}, code=None)
    assert (preloaded.returncode, preloaded.stdout, preloaded.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_hook_without_a_driver_says_that_there_is_none(tmp_path: Path) -> None:
    env = environment(tmp_path)
    env.pop("LD_LIBRARY_PATH")
    script = (
        "import ctypes\nlib = ctypes.CDLL(None)\n"
        "print(lib.cuInit(0), lib.cuMemFree_v2(None), lib.nvmlDeviceGetMemoryInfo(None, None))"
    )
    assert python(script, env) == ["100 100 12"]


def answers(tmp_path: Path, *names: str, **options: bool) -> dict[str, list[str]]:
    """How each look-up of lookups.c was answered: name -> objects for handle, default, next, program, version."""
    done = run([compiled("lookups.c"), *names], environment(tmp_path, **options))
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        _, name, answer = line.split(" ", 2)
        found.setdefault(name, []).append(answer)
    return found


def test_only_exact_names_of_the_driver_are_answered_with_hooks(tmp_path: Path) -> None:
    """Case 48: the library takes every name that begins with cu for the driver's, and cudnnCreate calls itself."""
    names = (
        "cuMemAlloc_v2",
        "cuCtxGetCurrent",
        "cudnnCreate",
        "cuMemAlloc_v",
        "cuMemAlloc_v22",
        "cu",
        "malloc",
        "cublasCreate_v2",
    )
    found = answers(tmp_path, *names)
    bare = answers(tmp_path, *names, preload=False)
    assert found.pop("cuMemAlloc_v2")[0] == "libvgpu.so"
    assert bare.pop("cuMemAlloc_v2")[0] == "libcuda.so.1"
    assert found == bare


def test_a_look_up_through_nvml_is_answered_with_hooks(tmp_path: Path) -> None:
    found = answers(tmp_path, "--nvml", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetName")
    assert [found["nvmlDeviceGetMemoryInfo"][0], found["nvmlDeviceGetName"][0]] == ["libvgpu.so", "libnvidia-ml.so.1"]


def test_a_linked_program_is_limited(tmp_path: Path) -> None:
    program = compiled("linked.c", driver=True)
    done = run([program, str(500 * MIB)], environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="500m"))
    assert done.stdout == f"0 2 0 {500 * MIB}\n"
    assert not done.stderr


def test_a_wrapper_between_program_and_driver_keeps_its_place(tmp_path: Path) -> None:
    """Cases 47, 71: RTLD_NEXT returns another address at each call, or one that bypasses the hook."""
    wrapper = compiled("wrapper.c", "-shared", "-fPIC", "-Wl,-Bsymbolic", output="libwrapper.so")
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="500m")
    script = PRELUDE + (
        "import ctypes\nstart()\nmine = ctypes.CDLL(None)\np = c_uint64()\n"
        "print(mine.cuMemAlloc_v2(byref(p), c_size_t(500 * MIB)), mine.cuMemAlloc_v2(byref(p), c_size_t(1)))\n"
        "print(c_uint.in_dll(mine, 'wrapped_calls').value, mine.cudnnCreate(byref(c_void_p())))"
    )
    first = env | {"LD_PRELOAD": f"{wrapper}:{env['LD_PRELOAD']}"}
    behind = env | {"LD_PRELOAD": f"{env['LD_PRELOAD']}:{wrapper}"}
    assert python(script, first) == ["0 2", "2 77"]
    # Behind ours, the program never meets the wrapper; and the wrapper's own search goes on to the hook.
    assert python(script, behind) == ["0 2", "0 77"]
    direct = script.replace("ctypes.CDLL(None)", f"ctypes.CDLL({str(wrapper)!r})")
    assert python(direct, behind) == ["0 2", "2 77"]


def test_a_library_opened_locally_is_limited_by_every_route(tmp_path: Path) -> None:
    opener = compiled("opener.c", "-shared", "-fPIC", output="libopener.so", driver=True)
    script = PRELUDE + (
        f"import ctypes\nstart()\nlib = ctypes.CDLL({str(opener)!r}, mode=ctypes.RTLD_LOCAL)\np = c_uint64()\n"
        "for route in (lib.through_handle, lib.through_next, lib.through_link):\n"
        "    print(route(byref(p), c_size_t(501 * MIB)), route(byref(p), c_size_t(500 * MIB)), free(p.value))"
    )
    assert python(script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="500m")) == ["2 0 0"] * 3


def test_manners_of_a_guest(tmp_path: Path) -> None:
    """Case 49: the library overwrites the program's signal handlers and sets its umask to 0."""
    program = compiled("manners.c", driver=True)
    limits = {"CUDA_DEVICE_MEMORY_LIMIT_0": "500m", "CUDA_DEVICE_SM_LIMIT": "50", "VGPU_DIR": str(tmp_path)}
    bare = run([program], environment(tmp_path, preload=False))
    assert run([program], environment(tmp_path, **limits)).stdout == bare.stdout


def test_the_program_may_log_when_asked(tmp_path: Path) -> None:
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT_0="500m", LIBCUDA_LOG_LEVEL="1")
    done = run([compiled("linked.c", driver=True), str(500 * MIB)], env)
    assert "refused 1 bytes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_forked_and_executed_children_are_limited_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "region").mkdir()
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m", VGPU_DIR=str(tmp_path / "region"))
    script = (
        PRELUDE
        + """
import os, subprocess, sys
children = []
for _ in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        start()
        os.write(write, b"%d %d" % (alloc(300 * MIB)[0], used() // MIB))
        os.read(0, 1)
        os._exit(0)
    children.append(os.read(read, 100).decode())
print(*children)
again = "from driver_client import *; start(); print(used() // MIB, alloc(201 * MIB)[0], alloc(200 * MIB)[0])"
other = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True)
print(other.stdout.strip(), other.stderr)
"""
    )
    done = subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    lines = [done.stdout.readline().strip() for _ in range(2)] if done.stdout else []
    done.communicate("xx", timeout=30)
    assert lines == ["0 300 2 300", "300 2 0"]


@pytest.mark.parametrize("how", [[], ["raw"]], ids=["fork", "raw clone"])
def test_a_child_may_free_what_only_its_parent_had(tmp_path: Path, how: list[str]) -> None:
    done = run([compiled("fork_storm.c", driver=True), *how], environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m"))
    assert done.stdout == "done\n"


def test_threads_never_pass_the_limit_together(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
import threading
mine = start()
results = []
def work():
    ok(cu.cuCtxSetCurrent(mine))
    held = []
    for _ in range(200):
        status, pointer = alloc(10 * MIB)
        if status == 0:
            held.append(pointer)
        elif held:
            assert free(held.pop()) == 0
    for pointer in held:
        assert free(pointer) == 0
    results.append(True)
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(len(results), used())
"""
    )
    assert python(script, environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m")) == ["8 0"]


@pytest.mark.parametrize("begins", ["first", "later"])
def test_a_thread_with_a_small_stack_may_ask_for_processes(begins: str, tmp_path: Path) -> None:
    """The build bounds what each function takes (FRAME in build.py). The simulated NVML itself needs some 20 KiB."""
    program = compiled("small_stack.c", driver=True)
    (tmp_path / "region").mkdir()
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m", VGPU_DIR=str(tmp_path / "region"))
    assert run([program, "32", begins], env).stdout == "0 0 2 0 1 \n"


@pytest.mark.parametrize("call", ["context", "pool"])
def test_who_waits_for_a_call_of_the_driver_sleeps(call: str, tmp_path: Path) -> None:
    """A real-time thread that yields instead keeps the processor from the thread for which it waits."""
    library(tmp_path / "driver", "other_driver.c", "libcuda.so.1")
    program = compiled("waits.c", f"-L{tmp_path / 'driver'}", "-l:libcuda.so.1", output="waits")
    folder = str(tmp_path / "driver")
    done = run([program, call], environment(tmp_path, LD_LIBRARY_PATH=folder, CUDA_DEVICE_MEMORY_LIMIT="100m"))
    if done.stdout == "not allowed\n":
        pytest.skip("this user may have no real-time threads (RLIMIT_RTPRIO)")
    assert done.stdout == "asleep\n"


def can_mount() -> bool:
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


FIRST_OVER_ITS_LIMIT = "start()\nprint(alloc(501 * MIB)[0], info()[1] // MIB)"


@pytest.mark.parametrize("text", ["true", "1"])
@pytest.mark.parametrize(("allowed", "seen"), [(False, "2 500"), (True, "0 14912")])
def test_switching_limits_off_is_heard_only_where_the_region_allows_it(
    tmp_path: Path, text: str, allowed: bool, seen: str
) -> None:
    """Also a region that no agent has mounted."""
    region = tmp_path / "region"
    region.mkdir()
    simulator.create(tmp_path / "cards", "T4")
    uuid = simulator.cards(tmp_path / "cards")[0].uuid
    Region.create(region, Limits((CardLimit(uuid, 500 * MIB),), allow_disable_control=allowed)).close()
    env = environment(tmp_path, VGPU_DIR=str(region), CUDA_DISABLE_CONTROL=text)
    assert python(PRELUDE + FIRST_OVER_ITS_LIMIT, env) == [seen]


def test_limits_that_the_user_has_set_can_be_switched_off_by_the_user(tmp_path: Path) -> None:
    limited = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m")
    assert python(PRELUDE + FIRST_OVER_ITS_LIMIT, limited) == ["2 500"]
    off = limited | {"CUDA_DISABLE_CONTROL": "true"}
    assert python(PRELUDE + FIRST_OVER_ITS_LIMIT, off) == ["0 14912"]
    (tmp_path / "shared").mkdir()
    assert python(PRELUDE + FIRST_OVER_ITS_LIMIT, off | {"VGPU_DIR": str(tmp_path / "shared")}) == ["0 14912"]


def test_limits_that_cannot_be_read_cannot_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "limits").write_bytes(b"")
    env = environment(tmp_path, VGPU_DIR=str(tmp_path), CUDA_DISABLE_CONTROL="true")
    assert run([sys.executable, "-c", PRELUDE + "print(cu.cuInit(0))"], env).stdout == "2\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [("CUDA_DEVICE_MEMORY_LIMIT_0", "abc"), ("CUDA_DEVICE_MEMORY_LIMIT_0", "-1"), ("CUDA_DEVICE_SM_LIMIT", "400")],
)
def test_limits_that_cannot_be_read_are_said_once_when_cuda_is_used(tmp_path: Path, name: str, text: str) -> None:
    """Otherwise a mistyped limit would look like a full card."""
    env = environment(tmp_path, **{name: text})
    script = PRELUDE + "print(cu.cuInit(0), cu.cuInit(0))"
    done = run([sys.executable, "-c", script], env)
    assert done.stdout == "2 2\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("[vgpu E ")
    assert f"no GPU memory can be had: {name}={text}: not a limit; allowed: " in line
    assert not run([sys.executable, "-c", script], env | {"LIBCUDA_LOG_LEVEL": "0"}).stderr
    assert not run([sys.executable, "-c", "import driver_client"], env).stderr


WORKER = "from driver_client import *; start(); ok(alloc(300 * MIB)[0]); print(1, flush=True)"


@pytest.mark.parametrize("how", [[], ["sh", "-c", '"$@" & wait', "sh"]], ids=["child", "grandchild"])
def test_what_a_worker_had_is_free_as_soon_as_its_end_was_waited_for(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "region").mkdir()
    script = (
        PRELUDE
        + f"""
import subprocess, sys
start()
for _ in range(5):
    child = subprocess.Popen({how!r} + [sys.executable, "-c", {WORKER!r}], stdout=subprocess.PIPE)
    child.stdout.read(1)
    while child.poll() is None:
        used()  # so that the last look at who has ended is never long ago
    print(used())
"""
    )
    env = environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="500m", VGPU_DIR=str(tmp_path / "region"))
    assert python(script, env) == ["0"] * 5


LOST = """
import os, shutil, subprocess, sys
start()
ok(alloc(300 * MIB)[0])
shutil.rmtree(os.environ["VGPU_DIR"])
again = "from driver_client import *; print(cu.cuInit(0), alloc(1)[0] != 0)"
other = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True)
print(other.stdout.strip(), other.stderr.count("the folder is gone"), other.stderr.count(chr(10)))
print(alloc(201 * MIB)[0], alloc(200 * MIB)[0])
"""


@pytest.mark.parametrize("kind", ["environment", "made before"])
def test_a_worker_that_finds_its_region_gone_gets_nothing_and_says_so(tmp_path: Path, kind: str) -> None:
    """As when the end of a session removes a user's run folder. A process with the region goes on within the limit."""
    region = tmp_path / "region"
    region.mkdir()
    variables = {"VGPU_DIR": str(region)}
    if kind == "environment":
        variables["CUDA_DEVICE_MEMORY_LIMIT"] = "500m"
    else:
        simulator.create(tmp_path / "cards", "T4")
        uuid = simulator.cards(tmp_path / "cards")[0].uuid
        Region.create(region, Limits((CardLimit(uuid, 500 * MIB),))).close()
    assert python(PRELUDE + LOST, environment(tmp_path, **variables)) == ["2 True 1 1", "2 0"]


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"CUDA_DEVICE_MEMORY_LIMIT": "0", "VGPU_DIR": ""}, "no GPU memory can be had on card 0: its limit is 0 bytes"),
        ({"CUDA_DEVICE_MEMORY_LIMIT_0": "0m", "VGPU_DIR": ""}, "no GPU memory can be had on card 0: its limit is 0 b"),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "1g"}, "VGPU_DIR is not set: every process has the whole limit for itself"),
        ({"CUDA_DEVICE_SM_LIMIT": "30"}, "VGPU_DIR is not set: every process has the whole limit for itself"),
    ],
)
def test_limits_that_hardly_are_meant_are_said_once(tmp_path: Path, variables: dict[str, str], line: str) -> None:
    env = environment(tmp_path, **variables)
    if "VGPU_DIR" not in variables:
        del env["VGPU_DIR"]
    done = run([sys.executable, "-c", PRELUDE + "print(cu.cuInit(0), cu.cuInit(0))"], env)
    assert done.stdout == "0 0\n"
    (said,) = done.stderr.splitlines()
    assert line in said


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace of its own (unshare -rm) for /run/vgpu")
class TestManaged:
    """A region at /run/vgpu, as the agent mounts it: found without any environment."""

    def inside(self, tmp_path: Path, script: str, prepare: str = "", **variables: str) -> list[str]:
        region = tmp_path / "region"
        if not region.exists():
            region.mkdir()
            simulator.create(tmp_path / "cards", "T4")
            uuid = simulator.cards(tmp_path / "cards")[0].uuid
            Region.create(region, Limits((CardLimit(uuid, 500 * MIB),))).close()
        (tmp_path / "client.py").write_text(PRELUDE + script)
        env = {k: v for k, v in environment(tmp_path).items() if k.startswith(("LD_", "VGPU_SIM", "PYTHONPATH"))}
        mounts = (
            "mount -t tmpfs none /run && mkdir /run/vgpu && touch /run/vgpu/limits /run/vgpu/usage && "
            f"mount --bind {region}/limits /run/vgpu/limits && mount -o remount,bind,ro /run/vgpu/limits && "
            f"mount --bind {region}/usage /run/vgpu/usage && {prepare or 'true'}"
        )
        settings = " ".join(f"{k}={v}" for k, v in (env | variables).items())
        shell = f"{mounts} && exec env -i {settings} {sys.executable} {tmp_path / 'client.py'}"
        return run(["unshare", "-rm", "sh", "-c", shell], os.environ).stdout.splitlines()

    def test_an_empty_environment_is_limited(self, tmp_path: Path) -> None:
        """Case 52: a login that loses the environment runs without limits."""
        assert self.inside(tmp_path, "start()\nprint(alloc(501 * MIB)[0], alloc(500 * MIB)[0], info()[1] // MIB)") == [
            "2 0 500"
        ]

    def test_environment_decides_nothing(self, tmp_path: Path) -> None:
        variables = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT": "9g", "CUDA_DISABLE_CONTROL": "true"}
        script = "start()\nprint(alloc(501 * MIB)[0], info()[1] // MIB)"
        assert self.inside(tmp_path, script, **variables) == ["2 500"]

    def test_a_missing_usage_file_never_means_unlimited(self, tmp_path: Path) -> None:
        script = "print(cu.cuInit(0), cu.cuMemAlloc_v2(byref(c_uint64()), c_size_t(1)) != 0)"
        assert self.inside(tmp_path, script, "umount /run/vgpu/usage") == ["2 True"]

    def test_a_card_that_the_limits_do_not_list_has_nothing(self, tmp_path: Path) -> None:
        script = "ok(cu.cuInit(0))\nprint(cu.cuCtxCreate_v2(byref(c_void_p()), 0, device(1)), total_mem(1))"
        assert self.inside(tmp_path, script, VGPU_SIMULATE="T4x2", VGPU_SIM_DIR=str(tmp_path / "two")) == ["2 0"]
