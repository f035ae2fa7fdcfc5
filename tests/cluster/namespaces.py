"""Mount, network and process namespaces of a run: whatever ends it, even kill -9, ends all that it has made.

The kernel takes a namespace's mounts and interfaces down with its last process, and kills every process of a process
namespace with its first one. Only cgroups outlive a run.
"""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

from tests.cluster.commands import run
from tests.cluster.errors import ClusterError

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MOUNTS, _NETWORK, _PROCESSES = 0x00020000, 0x40000000, 0x20000000  # CLONE_NEWNS, _NEWNET, _NEWPID of <sched.h>
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>

ADDRESS: Final = "10.77.0.1"  #: of the node
POD_SUBNET: Final = "10.244.0.0/16"
SERVICE_SUBNET: Final = "10.96.0.0/16"
API_SERVICE: Final = "10.96.0.1"  #: the first of SERVICE_SUBNET
CGROUPS: Final = Path("/sys/fs/cgroup")
#: Folders of the machine that the node writes into: its own changes lie in memory, and what is there is seen below.
COVERED: Final = ("/etc", "/opt", "/usr/local", "/var", "/tmp")
#: Folders of the kubelet and the runtime; images and volumes cannot lie on an overlay.
FRESH: Final = (
    "/run",
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
)


def run_inside(main: Callable[[], int]) -> int:
    """Runs `main` in new namespaces and returns its status; whatever ends this process ends all of it."""
    if _LIBC.unshare(_MOUNTS | _NETWORK | _PROCESSES) != 0:
        raise ClusterError(f"the kernel gives no namespaces: {os.strerror(ctypes.get_errno())}")
    sys.stdout.flush()
    sys.stderr.flush()
    first = os.fork()
    if first == 0:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        _first_process(main)
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF


def _first_process(main: Callable[[], int]) -> NoReturn:
    """Runs `main` in a child and ends with its status; until then, buries the orphans that a first process inherits."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = main()
        except (Exception, KeyboardInterrupt):  # noqa: BLE001 a forked child must not go on in its parent's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def prepare(keep: Sequence[Path]) -> None:
    """Makes a node of the new namespaces: own folders, an address, routing. `keep`: folders that stay the machine's."""
    _mount("--make-rprivate", "/")  # from here on nothing reaches the machine
    _mount("-t", "proc", "proc", "/proc")
    _mount("--make-rshared", "/")
    held = [(folder, os.open(folder, os.O_PATH)) for folder in keep]
    scratch = Path("/mnt")
    _mount("-t", "tmpfs", "-o", "mode=755", "vgpu-cluster", str(scratch))
    for name in COVERED:
        upper, work = (scratch / f"{name.strip('/').replace('/', '-')}.{part}" for part in ("upper", "work"))
        upper.mkdir()
        work.mkdir()
        upper.chmod(Path(name).stat().st_mode & 0o7777)
        _mount("-t", "overlay", "-o", f"lowerdir={name},upperdir={upper},workdir={work}", "vgpu-cluster", name)
    for name in FRESH:
        Path(name).mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", "mode=755", "vgpu-cluster", name)
        _mount("--make-rshared", name)
    for folder, descriptor in held:
        if any(folder.is_relative_to(name) for name in (*COVERED, *FRESH)):
            folder.mkdir(parents=True, exist_ok=True)
            _mount("--no-canonicalize", "--bind", f"/proc/self/fd/{descriptor}", str(folder), pass_fds=(descriptor,))
        os.close(descriptor)
    for line in (
        "link set lo up",
        "link add node0 type bridge",  # the address of a node; many kernels lack the dummy device
        f"address add {ADDRESS}/24 dev node0",
        "link set node0 up",
        "route add default dev node0",
    ):
        run(["ip", *line.split()], what="the node's network", timeout=10)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def remove_old_cgroups() -> None:
    """Removes the empty cgroups of earlier runs, the only thing that outlives one."""
    for folder in [*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")]:
        for inner in _bottom_up(folder):
            with suppress(OSError):  # not empty: another kubelet's, which is not ours to end
                inner.rmdir()


def _bottom_up(folder: Path) -> Iterator[Path]:
    for inner in folder.iterdir():
        if inner.is_dir():
            yield from _bottom_up(inner)
    yield folder


def need_root() -> None:
    """Raises ClusterError for anybody else."""
    if os.geteuid() != 0:
        raise ClusterError("a Kubernetes node needs root: mounts, network namespaces and cgroups; run it by sudo")


def _mount(*arguments: str, pass_fds: Sequence[int] = ()) -> None:
    run(["mount", *arguments], what="the node's folders", timeout=10, pass_fds=pass_fds)
