"""`python -m tests.cluster`: makes a Kubernetes node of real programs on this machine and runs the checks on it.

As root. `run` (default) makes the cluster, runs the checks and ends it; `up` leaves it running until it is interrupted;
`enter` is a shell in it; `prepare` only fills the cache. Exit status: 0 all checks passed, 1 one failed, 2 the cluster
cannot be made here.
"""

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from tests.cluster import cache, debian, images, namespaces, programs
from tests.cluster.checks import CHECKS
from tests.cluster.collect import collect
from tests.cluster.errors import ClusterError
from tests.cluster.node import FOLDER, Node
from tests.cluster.report import Report
from tests.cluster.versions import SETS, VersionSet
from tests.tools import helm

RUNNING = ".running"  #: in the cache: the lock of the cluster that runs, with its outer process and version set
ROOT = Path(__file__).resolve().parents[2]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "up", "enter", "prepare"), default="run")
    parser.add_argument("--set", choices=sorted(SETS), default="1.36", help="versions (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help="checks whose names begin like this")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "build/cluster", help="folder of logs (default: %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    versions = SETS[options.set]
    try:
        namespaces.need_root()
        if options.action == "enter":
            enter()
        archives = prepare(versions)
        if options.action == "prepare":
            return 0
        hold_machine(versions.name)
        options.logs = options.logs.resolve() / versions.name
        shutil.rmtree(options.logs, ignore_errors=True)
        options.logs.mkdir(parents=True, exist_ok=True)
        namespaces.remove_old_cgroups()
        return namespaces.run_inside(lambda: inside(options, versions, archives))
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2


def prepare(versions: VersionSet) -> list[Path]:
    """Programs, packages and images, from the cache or new; the archives of the images."""
    begin = time.monotonic()
    debian.install({"nft": "nftables", "ip": "iproute2", "unshare": "util-linux"})
    programs.path_of(versions)
    programs.cni_plugins()
    helm.path()
    archives = images.archives(versions)
    print(f"programs and images: {time.monotonic() - begin:.1f} s", flush=True)
    return archives


def hold_machine(name: str) -> None:
    """One cluster at a time: kubelets of one machine share their cgroups. The lock lives as long as the processes."""
    lock = os.open(cache.root() / RUNNING, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ClusterError("another cluster runs on this machine: wait for its end") from None
    os.truncate(lock, 0)
    os.write(lock, f"{os.getpid()} {name}\n".encode())


def inside(options: argparse.Namespace, versions: VersionSet, archives: list[Path]) -> int:
    """In the namespaces: the node, the checks, the report."""
    begin = time.monotonic()
    namespaces.prepare([options.logs])
    report = Report(options.logs)
    node = Node(versions, options.logs)
    try:
        started = report.check("basis/node-ready", lambda: f"{node.start(archives):.1f} s")
        if options.action == "up" and started:
            print("the cluster is up; `python -m tests.cluster enter` is a shell in it", flush=True)
            signal.pause()  # what ends the outer process ends this one
        chosen = [one for one in CHECKS if one.gate or not options.only or one.name.startswith(tuple(options.only))]
        for check in chosen:
            if not started:
                report.skip(check.name, "an earlier check failed")
            elif not report.check(check.name, partial(check.body, node)) and check.gate:
                started = False
    finally:
        if any(one.outcome == "failed" for one in report.results):
            collect(node.kubectl, options.logs / "collected")
    about = f"Kubernetes {versions.kubernetes.version}, {time.monotonic() - begin:.0f} s"
    return report.close(about)


def enter() -> NoReturn:
    """Becomes a shell in the cluster that runs on this machine, with kubectl, helm and ctr on its PATH."""
    try:
        outer, name = (cache.root() / RUNNING).read_text().split()
        (first,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    except (OSError, ValueError):
        raise ClusterError("no cluster runs on this machine: start one by `python -m tests.cluster up`") from None
    os.environ["KUBECONFIG"] = str(FOLDER / "keys/admin.conf")
    os.environ["PATH"] = f"{programs.path_of(SETS[name])}:{helm.path().parent}"
    shell = os.environ.get("SHELL", "/bin/sh")
    os.execvp("nsenter", ["nsenter", "-t", first, "-m", "-n", "-p", shell])


if __name__ == "__main__":
    sys.exit(main())
