"""Debian's packages: unpacked into the cache where a service would start, installed where other packages are needed,
too.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import cache
from tests.cluster.commands import run
from tests.cluster.errors import ClusterError

SECONDS = 600
_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


def version(package: str) -> str:
    """The version that apt would install; ClusterError when apt knows none."""
    _need_apt(package)
    found = _candidate(package)
    if not found:
        _update()
        found = _candidate(package)
    if not found:
        raise ClusterError(f"apt-get has no package {package}: its sources lack Debian's main archive")
    return found


def unpacked(package: str) -> Path:
    """The files of a package in a folder of the cache: nothing on the machine changes, no service starts."""
    wanted = version(package)

    def make(folder: Path) -> None:
        command = ["apt-get", "download", "-q", f"{package}={wanted}"]
        try:
            run(command, what=f"downloading {package}", timeout=SECONDS, cwd=folder)
        except ClusterError:  # an old list names a version that is no longer in the archive
            _update()
            run([*command[:-1], package], what=f"downloading {package}", timeout=SECONDS, cwd=folder)
        (archive,) = folder.glob("*.deb")
        run(["dpkg-deb", "-x", archive, folder], what=f"unpacking {package}", timeout=SECONDS)
        archive.unlink()

    return cache.entry(f"debian-{package}", cache.digest([wanted]), make)


def install(programs: Mapping[str, str]) -> None:
    """Installs the packages (program → package) whose programs are missing; raises ClusterError with apt's reason."""
    missing = sorted({package for program, package in programs.items() if not _found(program)})
    if not missing:
        return
    _need_apt(" ".join(missing))
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    try:
        run(command, what=f"installing {' '.join(missing)}", timeout=SECONDS, env=os.environ | _QUIET)
    except ClusterError:  # lists that are old or absent, or an installation that was killed
        run(["dpkg", "--configure", "-a"], what="dpkg --configure -a", timeout=SECONDS, env=os.environ | _QUIET)
        _update()
        run(command, what=f"installing {' '.join(missing)}", timeout=SECONDS, env=os.environ | _QUIET)
    still = [program for program in programs if not _found(program)]
    if still:
        raise ClusterError(f"not found after apt-get install: {', '.join(still)}")


def _found(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None


def _need_apt(packages: str) -> None:
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{packages} are taken from Debian by apt-get, which is not here: use a Debian machine")


def _update() -> None:
    run(["apt-get", "update", "-q"], what="apt-get update", timeout=SECONDS, env=os.environ | _QUIET)


def _candidate(package: str) -> str:
    """The version that apt would install; empty when apt knows none."""
    text = run(["apt-cache", "policy", package], what=f"looking up {package}", timeout=60)
    found = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith("Candidate:")]
    return found[0] if found and found[0] != "(none)" else ""
