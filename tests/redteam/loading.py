"""Ways past the dynamic linker, including those that no code inside a process can close."""

from redteam.route import Route

LOADING = [
    Route("driver opened by its path", "one = driver(DRIVER)\nassert one.start() == (0, 0)\none.fill()"),
    Route(
        "program started through the dynamic linker",
        """
with open("/proc/self/maps") as maps:
    linker = next(line.split()[-1] for line in maps if "/ld-linux" in line)
for words in ((), ("--preload", ""), ("--inhibit-cache", "--library-path", "/run/lib")):
    assert other(through=(linker, *words)) > 0
""",
    ),
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

#: routes that a library inside a process cannot stop; docs/limits.md names each of them
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
    Route(
        "preloaded library of our library's name",
        "other()",
        variables={"LD_PRELOAD": "/run/bin/libnamesake.so"},
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
