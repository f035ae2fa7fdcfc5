"""`python -m tests.cluster`: makes a Kubernetes node of real programs on this machine and runs the checks on it.

As root. `run` (default) makes the cluster, runs the checks and ends it; `up` leaves it running until interrupted;
`enter` is a shell in it; `probe` only tells whether one can be made here; `prepare` only fills the cache. Exit status:
0 all checks passed, 1 one failed, 2 the cluster cannot be made here, 3 nor was it meant to: there is no root or no Go.
"""

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.cluster import cache, cgroups, debian, images, namespaces, programs
from tests.cluster.checks import CHECKS
from tests.cluster.collect import collect
from tests.cluster.errors import ClusterError
from tests.cluster.node import FOLDER, Node
from tests.cluster.report import Report
from tests.cluster.versions import SETS, VersionSet

RUNNING = ".running"  #: in the cache: the lock of the running cluster, with its outer process and version set
ROOT = Path(__file__).resolve().parents[2]

#: Program → Debian's package of it, installed where the program is missing.
NEEDED = {
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
}
PROBE_SECONDS = 60
PREPARE_SECONDS = 3600  #: with an empty cache
RUN_SECONDS = 1740  #: for the node and its checks; the total, with images of a changed product, is printed
GRACE_SECONDS = 180  #: for logs and the report after that
HOLD_SECONDS = 90  #: time for an earlier cluster to end


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "up", "enter", "probe", "prepare"), default="run")
    parser.add_argument("--set", choices=sorted(SETS), default="1.36", help="versions (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="checks whose names begin like this")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "build/cluster", help="folder of logs (default: %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    options = arguments(argv)
    try:
        namespaces.need_root()
        if options.action == "enter":
            enter()
        programs.need_go(SETS[options.set])
        debian.install(NEEDED)
        cgroups.need()
        if options.action == "probe":
            return namespaces.run_inside(probe, PROBE_SECONDS)
        if options.action != "prepare":
            begin = [sys.executable, "-m", "tests.cluster", "probe", "--set", options.set]
            if status := subprocess.run(begin, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
                return status  # before any build; `probe` has reported the reason
            cgroups.watch(partial(_locked, _lock()))
        seconds = float("inf") if options.action == "up" else PREPARE_SECONDS + RUN_SECONDS + GRACE_SECONDS
        return namespaces.run_inside(partial(inside, options, os.getpid(), started), seconds)
    except ClusterError as error:
        print(f"e2e: {error}", file=sys.stderr)
        return error.status


def probe() -> int:
    """Makes the namespaces, mounts and interfaces of a node for a moment."""
    namespaces.prepare([])
    print("a cluster can be made here")
    return 0


def prepare(versions: VersionSet) -> list[Path]:
    """Programs, packages and images, from the cache or new; the archives of the images, made while Go builds."""
    begin = time.monotonic()
    pool = ThreadPoolExecutor(2)
    built = pool.submit(programs.path_of, versions)
    archives = pool.submit(images.archives, versions)
    try:
        programs.cni_plugins()
        programs.helm_of(versions)
        done, _ = wait((built, archives), PREPARE_SECONDS, FIRST_EXCEPTION)
        for one in done:
            one.result()
        found = archives.result(0)
        built.result(0)
    except TimeoutError:
        raise ClusterError(f"programs and images are not made after {PREPARE_SECONDS} s") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    print(f"programs and images: {time.monotonic() - begin:.1f} s", flush=True)
    return found


def hold_machine(outer: int, name: str) -> None:
    """Allows one cluster at a time: kubelets of one machine share their cgroups.

    The lock lives as long as this process.
    """
    lock = _lock()
    end = time.monotonic() + HOLD_SECONDS
    while not _locked(lock):
        if time.monotonic() > end:
            raise ClusterError("another cluster runs on this machine: wait for its end")
        time.sleep(0.2)
    os.truncate(lock, 0)
    os.write(lock, f"{outer} {name}\n".encode())


def _lock() -> int:
    """A descriptor of the machine's lock, not locked yet; a second descriptor would be refused a lock that this one
    has.
    """
    return os.open(cache.root() / RUNNING, os.O_CREAT | os.O_RDWR, 0o600)


def _locked(lock: int) -> bool:
    """Whether the machine's lock was free, or this descriptor had it already; then this descriptor has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def inside(options: argparse.Namespace, outer: int, begin: float) -> int:
    """Runs inside the namespaces: requirements, the node, the checks, the report.

    `outer`: the process that ends all of it; `begin`: its start, monotonic seconds.
    """
    versions = SETS[options.set]
    archives = prepare(versions)
    if options.action == "prepare":
        return 0
    hold_machine(outer, versions.name)
    options.logs = options.logs.resolve() / versions.name
    shutil.rmtree(options.logs, ignore_errors=True)
    options.logs.mkdir(parents=True, exist_ok=True)
    cgroups.remove()
    namespaces.prepare([options.logs])
    report = Report(options.logs, RUN_SECONDS, time.monotonic() - begin)
    node = Node(versions, options.logs)
    try:
        started = report.check("basis/node-ready", lambda: f"{node.start(archives):.1f} s")
        if options.action == "up" and started:
            print("the cluster is up; `python -m tests.cluster enter` is a shell in it", flush=True)
            signal.pause()  # the end of the outer process ends this one
        chosen = [one for one in CHECKS if one.gate or not options.only or one.name.startswith(tuple(options.only))]
        for check in chosen:
            if not started:
                report.skip(check.name, "an earlier check failed")
            elif not report.check(check.name, partial(check.body, node)) and check.gate:
                started = False
    finally:
        if any(one.outcome == "failed" for one in report.results):
            collect(node.kubectl, options.logs / "collected")
    about = f"Kubernetes {versions.kubernetes.version}, containerd {programs.containerd_version(versions)}"
    return report.close(f"{about}, Helm {programs.version_of_helm(versions)}")


def enter() -> NoReturn:
    """Becomes a shell in the cluster of this machine, with kubectl, helm and ctr on its PATH."""
    try:
        outer, name = (cache.root() / RUNNING).read_text().split()
        (first,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    except (OSError, ValueError):
        raise ClusterError("no cluster runs on this machine: start one by `python -m tests.cluster up`") from None
    os.environ["KUBECONFIG"] = str(FOLDER / "keys/admin.conf")
    os.environ["PATH"] = f"{programs.path_of(SETS[name])}:{programs.helm_of(SETS[name]).parent}"
    shell = os.environ.get("SHELL", "/bin/sh")
    os.execvp("nsenter", ["nsenter", "-t", first, "-m", "-n", "-p", shell])


if __name__ == "__main__":
    sys.exit(main())
