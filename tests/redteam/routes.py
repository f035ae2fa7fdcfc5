"""Ways out of a managed container that must not give one byte more.

Each route is a script that an intruder runs as the container's root. Then the card's own count is read: it must never
have been above the limit.
"""

from redteam.loading import LOADING
from redteam.route import AT_MOST, NOTHING, Route


def environment_route(name: str, **variables: str) -> Route:
    return Route(f"environment: {name}", "assert other() > 0\nstarted().fill()", variables=variables)


ENVIRONMENT = [
    environment_route("empty"),
    environment_route("another region", VGPU_DIR="/run/scratch"),
    environment_route("larger limit", CUDA_DEVICE_MEMORY_LIMIT="9g", CUDA_DEVICE_MEMORY_LIMIT_0="9g"),
    environment_route("no limit", CUDA_DEVICE_MEMORY_LIMIT="0", CUDA_DEVICE_MEMORY_LIMIT_0=""),
    environment_route("nonsense", CUDA_DEVICE_MEMORY_LIMIT="all", CUDA_DEVICE_SM_LIMIT="-1"),
    environment_route("core policy", CUDA_DEVICE_SM_LIMIT="100", GPU_CORE_UTILIZATION_POLICY="disable"),
    environment_route("control disabled", CUDA_DISABLE_CONTROL="true", CUDA_OVERSUBSCRIBE="true"),
    environment_route("logging", LIBCUDA_LOG_LEVEL="4"),
    environment_route("preload emptied", LD_PRELOAD=""),
    environment_route("library paths", LD_LIBRARY_PATH="/run/lib:/usr/local/vgpu", LD_BIND_NOW="1"),
    Route(
        "environment: another region that was made outside",
        """
os.mkdir("/run/scratch/own")
os.environ.update(VGPU_DIR="/run/scratch/own", CUDA_DEVICE_MEMORY_LIMIT="9g")
other()
assert os.listdir("/run/scratch/own") == []
""",
    ),
]

#: one process holds all the memory: the file is damaged, then that process and new processes try to get more
DAMAGED = [
    Route(
        f"usage {how} under a process that runs",
        f"""
first = started()
first.fill()
spoil({how!r})
assert first.fill() == 0
late = Other()
assert late.got == 0, late.said
assert late.answers == (2, 2), late.said
assert late.end() == 0
""",
    )
    for how in ("zeros", "noise", "another version", "cut and stretched")
] + [
    Route(
        f"usage {how} under a process that runs",
        f"""
holder = Other()
spoil({how!r})
late = Other()
assert late.got == 0, late.said
assert late.answers == (2, 2), late.said
assert late.end() == 0
holder.end()
""",
    )
    for how in ("cut", "half", "grown")
]

FILES = [
    Route(
        f"usage {how} before the first start",
        f"""
spoil({how!r})
late = Other()
assert (late.answers, late.got) == ((2, 2), 0), late.said
assert late.end() == 0
""",
        holds=NOTHING,
    )
    for how in ("zeros", "noise", "another version", "cut", "half", "grown", "cut and stretched")
] + [
    Route(
        "files deleted, replaced, unmounted",
        """
for file in (USAGE, LIMITS, "/etc/ld.so.preload"):
    assert attempt(os.unlink, file) == "EBUSY"
    open("/run/scratch/own", "w").close()
    assert attempt(os.rename, "/run/scratch/own", file) in ("EBUSY", "EXDEV")
    assert attempt(os.rename, file, "/run/scratch/away") in ("EBUSY", "EXDEV")
    assert subprocess.run(["umount", file], stderr=subprocess.DEVNULL).returncode != 0
    assert subprocess.run(["umount", "-l", file], stderr=subprocess.DEVNULL).returncode != 0
assert subprocess.run(["mount", "-t", "tmpfs", "none", "/run/vgpu"], stderr=subprocess.DEVNULL).returncode != 0
other()
""",
    ),
    Route(
        "limits written",
        """
assert attempt(open, LIMITS, "r+b") == "EROFS"
assert attempt(os.truncate, LIMITS, 0) == "EROFS"
assert attempt(os.chmod, LIMITS, 0) == "EROFS"
other()
""",
    ),
    Route(
        "usage without rights",
        """
os.chmod(USAGE, 0)
late = Other(through=NOBODY)
assert (late.answers, late.got) == ((2, 2), 0), late.said
os.chmod(USAGE, 0o444)
late = Other(through=NOBODY)
assert (late.answers, late.got) == ((2, 2), 0), late.said
os.chmod(USAGE, 0o666)
assert other(through=NOBODY) > 0
""",
        root=True,
    ),
    Route(
        "folder of the region renamed",
        """
os.rename("/run/vgpu", "/run/away")
other()
os.mkdir("/run/vgpu")
other()
""",
        holds=AT_MOST,
    ),
    Route(
        "folder of the region hidden in a user namespace",
        """
command = "mount -t tmpfs none /run/vgpu && exec /run/bin/grab"
subprocess.run(["unshare", "-rm", "sh", "-c", command], stdin=subprocess.DEVNULL)
other()
""",
    ),
    Route(
        "region and /proc hidden in a user namespace",
        """
hide = "mount -t tmpfs none /run/vgpu && mount -t tmpfs none /proc"
for more in ("true", "mkdir /proc/self && touch /proc/self/mountinfo"):
    one = Other(through=("unshare", "-rm", "sh", "-c", f'{hide} && {more} && exec "$0"'))
    one.end()
    assert one.got == 0, one.said  # the card's books cannot tell of what has no /proc
other()
""",
    ),
    Route(
        "root directory changed after the start",
        """
one = driver()
os.mkdir("/run/scratch/root")
os.chdir("/run")
os.chroot("/run/scratch/root")
assert one.library.cuInit(0) == 2
assert one.fill() == 0
""",
        holds=AT_MOST,
        variables={"VGPU_SIM_DIR": "cards"},
    ),
    Route(
        "file system of usage full before the first start",
        "late = Other()\nassert late.got == 0, late.said\nassert late.end() == 0, late.process.returncode",
        before="""
mkdir $stage/small && mount -t tmpfs -o size=256k none $stage/small
$python -m redteam.move $region $stage/small && region=$stage/small
dd if=/dev/zero of=$stage/small/filler bs=4k 2>/dev/null || true
""",
        holds=NOTHING,
    ),
    Route(
        "file system of usage filled under a process that runs",
        """
holder = Other()
assert attempt(open("/run/small/filler", "wb", 0).write, bytes(1 << 20)) in ("", "ENOSPC")
late = Other()
assert late.got == 0, late.said
assert late.end() == 0, late.process.returncode
assert holder.end() == 0
""",
        before="""
mkdir $stage/small && mount -t tmpfs -o size=256k none $stage/small
$python -m redteam.move $region $stage/small && region=$stage/small
""",
    ),
    Route(
        "every lock on usage held",
        """
import fcntl
held, over = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(over[1])
    usage = open(USAGE, "r+b")
    fcntl.lockf(usage, fcntl.LOCK_EX)
    os.write(held[1], b"!")
    os.read(over[0], 1)
    os._exit(0)
os.read(held[0], 1)
one = driver()
assert one.start() == (0, 2)
assert one.fill() == other() == 0
os.close(over[1])
os.wait()
""",
        holds=AT_MOST,
    ),
    Route(
        "no address space left",
        """
import resource
one = driver()
assert one.start() == (0, 0)
for room in range(0, 4 * MIB, MIB // 2):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, -1))
    one.fill()
    one.library.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
one.fill()
""",
    ),
    Route(
        "no descriptors left",
        """
import resource
one = driver()
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
one.start()
one.fill()
""",
        holds=AT_MOST,
    ),
]

PROCESSES = [
    Route("two processes", "first, second = Other(), Other()\nassert second.got == 0"),
    Route(
        "exec",
        """
one = started()
if "AGAIN" not in os.environ:
    assert one.fill() > 0
    os.environ["AGAIN"] = "yes"
    os.execv("/proc/self/exe", ["python", "-c", "from inside import *; assert started().fill() > 0"])
""",
    ),
    Route(
        "fork",
        """
def child(work):
    if os.fork() == 0:
        work()
        os._exit(0)
    assert os.wait()[1] == 0
one = driver()
child(lambda: started().fill())
assert one.start() == (0, 0)
assert one.fill() > 0
child(lambda: one.fill())
child(lambda: os.execv(GRAB, [GRAB]))
assert one.fill() == 0
""",
    ),
    Route(
        "raw clone",
        """
one, libc = driver(), ctypes.CDLL(None)
SYS_clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_FILES, SIGCHLD = 0x400, 17
def child(flags, work):
    if libc.syscall(SYS_clone, flags, 0, 0, 0, 0) == 0:
        work()
        os._exit(0)
    status = os.wait()[1]
    assert status == 0, (status, flags)
child(SIGCHLD, lambda: started().fill())
assert one.start() == (0, 0)
assert one.fill() > 0
for flags in (SIGCHLD, SIGCHLD | CLONE_FILES):
    child(flags, lambda: one.fill())
    child(flags, lambda: os.execv(GRAB, [GRAB]))
assert one.fill() == 0
""",
    ),
    Route(
        "vfork",
        """
one = started()
assert one.fill() > 0
for _ in range(3):
    assert subprocess.run([GRAB], stdin=subprocess.DEVNULL).returncode == 0  # by vfork
assert one.fill() == 0
""",
    ),
    Route(
        "daemon that closed everything",
        """
daemon = Other("-d")
assert daemon.got > 0
for _ in range(2):
    assert other() == 0
assert other("-d") == other("-n") == 0
open("/run/scratch/end", "w").close()
""",
    ),
    Route(
        "daemon of another user that closed everything",
        """
daemon = Other("-n")
assert daemon.got > 0
assert other(through=NOBODY) == 0
open("/run/scratch/end", "w").close()
""",
        root=True,
    ),
    Route(
        "daemon of another user behind hidepid",
        """
daemon = Other("-n")
assert daemon.got > 0
assert other(through=NOBODY) == 0
open("/run/scratch/end", "w").close()
""",
        before="mount -o remount,hidepid=2 /proc",
        root=True,
    ),
    Route(
        "killed process whose child lives",
        """
parent = Other("-c")
assert parent.got > 0
parent.process.kill()
parent.process.wait()
assert other() == 0
open("/run/scratch/end", "w").close()
while other() == 0:
    pass
""",
    ),
    Route(
        "main thread left by pthread_exit",
        "first = Other('-t')\nassert first.got > 0\nassert other() == 0\nassert other('-t') == 0",
    ),
    Route(
        "killed process",
        """
for _ in range(5):
    first = Other()
    assert first.got > 0
    first.process.kill()
    first.process.wait()
""",
    ),
    Route(
        "setuid program",
        """
import shutil
shutil.copy(GRAB, "/run/scratch/setuid")
os.chmod("/run/scratch/setuid", 0o4755)
os.mkdir("/run/vgpu/local")
os.symlink("/run/cards", "/run/vgpu/local/simulator")  # such a program hears of no other place
settings = ("LD_PRELOAD=", "VGPU_DIR=/tmp", "CUDA_DEVICE_MEMORY_LIMIT=9g")
one = Other(DRIVER, through=(*NOBODY, "env", "-i", *settings, "/run/scratch/setuid"), program=())
assert one.got > 0, one.said
""",
        root=True,
    ),
    Route(
        "threads",
        """
import threading
one = started()
context = ctypes.c_void_p()
one.library.cuCtxGetCurrent(ctypes.byref(context))
def work():
    one.library.cuCtxSetCurrent(context)
    one.fill()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""",
    ),
    Route(
        "memory that its maker releases after another process has imported it",
        """
maker, told, heard = os.getpid(), os.pipe(), os.pipe()
if os.fork() == 0:
    two = started()
    os.write(heard[1], b"!")
    file = int(os.read(told[0], 20))
    os.write(heard[1], bytes([two.take(f"/proc/{maker}/fd/{file}")]))
    os.read(told[0], 1)
    os._exit(0)
os.read(heard[0], 1)
one = started()
handle, file = one.export(64 * MIB)
os.write(told[1], str(file).encode())
assert os.read(heard[0], 1) == bytes(1)
os.close(file)
assert one.release(handle) == 0
assert one.fill() > 0
os.write(told[1], b"!")
assert os.wait()[1] == 0
""",
    ),
    Route("all slots taken", "for _ in range(12):\n    assert other() > 0"),
]

ROUTES = [*ENVIRONMENT, *FILES, *DAMAGED, *PROCESSES, *LOADING]
