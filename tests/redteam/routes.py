"""Ways out of a managed container that must not give one byte more.

Each is what an intruder runs as the container's root. After it the card's own books are read: they never showed more
than the limit.
"""

from dataclasses import dataclass, field

#: what the card must have held at its fullest
EXACT, AT_MOST, NOTHING = "the limit, to the byte", "no more than the limit", "nothing"


@dataclass(frozen=True)
class Route:
    """`script`: Python with the names of inside.py; `before`: shell commands of the container's maker."""

    name: str
    script: str
    holds: str = EXACT
    before: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    #: needs more than one user id in the container
    root: bool = False


def shortfall(route: Route, peak: int, limit: int) -> str:
    """What the card's books say against this route; "" when it held."""
    if peak > limit:
        return f"{peak - limit} bytes more than the limit"
    if route.holds == EXACT and peak != limit:
        return f"only {peak} of {limit} bytes"
    if route.holds == NOTHING and peak != 0:
        return f"{peak} bytes, where there should be none"
    return ""


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

#: while one process holds all there is: the file is damaged, then that process and new ones try for more
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
with open(USAGE, "r+b") as usage:
    fcntl.lockf(usage, fcntl.LOCK_EX)
    one = driver()
    assert one.start() == (0, 2)
    assert one.fill() == other() == 0
""",
        holds=AT_MOST,
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
    Route("all slots taken", "for _ in range(12):\n    assert other() > 0"),
]

LOADING = [
    Route("driver opened by its path", "one = driver(DRIVER)\nassert one.start() == (0, 0)\none.fill()"),
    Route(
        "driver opened by RTLD_DEEPBIND", "one = driver(mode=os.RTLD_NOW | os.RTLD_DEEPBIND)\none.start()\none.fill()"
    ),
    Route(
        "library linked with the driver and opened by RTLD_DEEPBIND",
        "ctypes.CDLL('/run/bin/libbound.so', mode=os.RTLD_NOW | os.RTLD_DEEPBIND).grab()",
    ),
    Route(
        "library that looks the driver up, opened by RTLD_DEEPBIND",
        "ctypes.CDLL('/run/bin/libbound.so', mode=os.RTLD_LAZY | os.RTLD_DEEPBIND).look_up_and_grab()",
    ),
    Route(
        "library opened by its name and RTLD_DEEPBIND",
        "for name in ('grab', 'look_up_and_grab'):\n"
        "    getattr(ctypes.CDLL('libbound.so', mode=os.RTLD_NOW | os.RTLD_DEEPBIND), name)()",
        variables={"LD_LIBRARY_PATH": "/run/lib:/run/bin"},
    ),
    Route(
        "a copy of the driver under another name",
        """
import shutil
shutil.copy(DRIVER, "/run/scratch/other.so")
one = driver("/run/scratch/other.so")
one.start()
one.fill()
""",
    ),
    Route(
        "own preload that looks for the real dlsym",
        "one = Other()\nassert one.got > 0, one.said",
        variables={"LD_PRELOAD": "/run/bin/libinterposer.so"},
    ),
    Route(
        "dlsym found by dlsym",
        """
handle = started().library._handle
libc = ctypes.CDLL("libc.so.6")
libdl = ctypes.CDLL("libdl.so.2")
for owner in (libc, libdl):
    for name in ("dlsym", "dlvsym"):
        find = getattr(owner, name)
        find.restype = ctypes.c_void_p
        find.argtypes = [ctypes.c_void_p] + [ctypes.c_char_p] * (1 if name == "dlsym" else 2)
        version = [] if name == "dlsym" else [b"GLIBC_2.2.5"]
        address = find(handle, b"cuMemAlloc_v2", *version)
        if not address:
            continue
        real = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(address)
        pointer = ctypes.c_uint64()
        for size in (1 << 30, 1 << 20):
            while real(ctypes.addressof(pointer), size) == 0:
                pass
other()
""",
    ),
    Route(
        "export tables",
        """
one = started()
table = ctypes.c_void_p()
one.library.cuGetExportTable(ctypes.byref(table), bytes(16))
assert not table
one.fill()
""",
    ),
    Route(
        "cuGetProcAddress",
        """
one = started()
found, status = ctypes.c_void_p(), ctypes.c_int()
for name in ("cuGetProcAddress", "cuMemAlloc", "cuMemAllocManaged"):
    for version in (2000, 3020, 6000, 11030, 12000, 13000):
        for flags in (0, 1, 2):
            found.value = None
            ask = (name.encode(), ctypes.byref(found), version, ctypes.c_uint64(flags), ctypes.byref(status))
            one.library.cuGetProcAddress_v2(*ask)
            if not found.value or name == "cuGetProcAddress" or version < 3020:
                continue
            real = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)(found.value)
            size = 1 << 34
            while size:
                if real(ctypes.addressof(ctypes.c_uint64()), size, 1) != 0:
                    size //= 2
one.fill()
""",
    ),
]

ROUTES = [*ENVIRONMENT, *FILES, *DAMAGED, *PROCESSES, *LOADING]

#: what a library inside a process cannot hold; docs/limits.md names each
ESCAPES = [
    Route(
        "namespace of the dynamic linker (dlmopen)",
        """
libc = ctypes.CDLL(None)
libc.dlmopen.restype = ctypes.c_void_p
handle = libc.dlmopen(ctypes.c_long(-1), b"libcuda.so.1", os.RTLD_NOW)
one = Driver(ctypes.CDLL("libcuda.so.1", handle=handle))
one.start()
one.fill()
""",
    ),
    Route("addresses read from the driver's file", "one = Driver(ByAddress(DRIVER))\none.start()\none.fill()"),
    Route(
        "constructor of a library opened by RTLD_DEEPBIND",
        "os.environ['GRAB_AT_LOAD'] = 'yes'\nctypes.CDLL('/run/bin/libbound.so', mode=os.RTLD_NOW | os.RTLD_DEEPBIND)",
    ),
    Route("static program", "subprocess.run(['/run/bin/static'], stdin=subprocess.DEVNULL)"),
    Route(
        "accounts rewritten, header kept",
        """
holder = Other()
overwrite(bytes(4096), 64)
other()
""",
    ),
    Route(
        "folder /etc replaced by root",
        """
import shutil
shutil.copytree("/etc", "/run/scratch/etc", symlinks=True, ignore_dangling_symlinks=True)
os.remove("/run/scratch/etc/ld.so.preload")
command = "mount --bind /run/scratch/etc /etc && exec /run/bin/grab"
subprocess.run(["unshare", "-rm", "sh", "-c", command], stdin=subprocess.DEVNULL)
""",
    ),
    Route(
        "another root directory (chroot)",
        """
import shutil
new = "/run/scratch/root"
os.mkdir(new)
for library in subprocess.run(["ldd", GRAB], capture_output=True, text=True).stdout.split():
    if library.startswith("/") and library != "/run/lib/libvgpu.so":
        os.makedirs(new + os.path.dirname(library), exist_ok=True)
        shutil.copy(library, new + library)
shutil.copy(DRIVER, new + "/driver.so")
shutil.copy(GRAB, new + "/grab")
os.environ["VGPU_SIM_DIR"] = "cards"
os.chdir("/run")
if os.fork() == 0:
    os.chroot(new)
    os.execv("/grab", ["/grab", "/driver.so"])
os.wait()
""",
    ),
]
