"""Mount, network and process namespaces of a run: any end of the run, even kill -9, ends everything that it has made.

The kernel removes a namespace's mounts and interfaces with its last process. It kills every process of a process
namespace with the first one. Only cgroups outlive a run (cgroups.py).
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from tests.cluster.commands import run
from tests.cluster.errors import ClusterError, NotForHere

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MOUNTS, _NETWORK, _PROCESSES = 0x00020000, 0x40000000, 0x20000000  # CLONE_NEWNS, _NEWNET, _NEWPID of <sched.h>
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>

ADDRESS: Final = "10.77.0.1"  #: of the node
POD_SUBNET: Final = "10.244.0.0/16"
SERVICE_SUBNET: Final = "10.96.0.0/16"
API_SERVICE: Final = "10.96.0.1"  #: the first of SERVICE_SUBNET
#: Folders of the machine that the node writes into: its changes are in memory, and the machine's files are visible
#: below.
COVERED: Final = ("/etc", "/opt", "/usr/local", "/var", "/tmp")
#: Folders of the kubelet and the runtime; images and volumes cannot be on an overlay.
FRESH: Final = (
    "/run",
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/var/lib/cni",
    "/var/log/pods",
    "/var/log/containers",
)

#: Settings that a kubelet sets for the whole machine (its --protect-kernel-defaults): it gets copies.
KERNEL_SETTINGS: Final = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


def run_inside(main: Callable[[], int], seconds: float) -> int:
    """Runs `main` in new namespaces of mounts and processes, with the machine's network, and returns its status.

    When this process ends, all processes of the run end. ClusterError where the kernel refuses the namespaces, or after
    `seconds`.
    """
    _unshare(_MOUNTS | _PROCESSES)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    first = os.fork()
    if first == 0:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if Path("/proc/self/status").read_text().find(f"\nPPid:\t{parent}\n") < 0:
            os._exit(1)  # the parent died before it was asked for
        _first_process(main)
    end = time.monotonic() + seconds
    while (done := os.waitpid(first, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(first, signal.SIGKILL)
            os.waitpid(first, 0)
            raise ClusterError(f"not done after {seconds:.0f} s: killed")
        time.sleep(0.1)
    return os.waitstatus_to_exitcode(done[1]) & 0xFF


def _first_process(main: Callable[[], int]) -> NoReturn:
    """Runs `main` in a child and ends with its status; until then, reaps the orphans that a first process inherits."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _mount("--make-rprivate", "/")  # from here on, no mount reaches the machine
            _mount("-t", "proc", "proc", "/proc")
            status = main()
        except ClusterError as error:
            print(f"e2e: {error}", file=sys.stderr)
            status = error.status
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
    """Prepares the new namespaces for a node: own folders, a network with an address, routing, and separate kernel
    settings.

    `keep`: folders that stay the machine's.
    """
    _unshare(_NETWORK)
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
    settings = scratch / "sysctl"
    settings.mkdir()
    for name in KERNEL_SETTINGS:
        own, kernels = settings / name.replace("/", "."), Path("/proc/sys") / name
        own.write_text(kernels.read_text())
        _mount("--bind", str(own), str(kernels))
    for line in (
        "link set lo up",
        "link add node0 type bridge",  # the address of a node; many kernels lack the dummy device
        f"address add {ADDRESS}/24 dev node0",
        "link set node0 up",
        "route add default dev node0",
    ):
        run(["ip", *line.split()], what="the node's network", timeout=10)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def need_root() -> None:
    """Raises NotForHere when the user is not root."""
    if os.geteuid() != 0:
        raise NotForHere("a Kubernetes node needs root: mounts, network namespaces and cgroups; run it by sudo")


def _unshare(flags: int) -> None:
    if _LIBC.unshare(flags) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ClusterError(f"the kernel gives no namespaces: {reason}; a container needs CAP_SYS_ADMIN for it")


def _mount(*arguments: str, pass_fds: Sequence[int] = ()) -> None:
    run(["mount", *arguments], what="the node's folders", timeout=10, pass_fds=pass_fds)
