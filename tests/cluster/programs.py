"""Kubernetes and containerd, built with Go from pinned sources; etcd, runc and the rest from Debian."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from tests.cluster import cache, debian
from tests.cluster.commands import run
from tests.cluster.errors import ClusterError, NotForHere
from tests.cluster.versions import Programs, VersionSet
from tests.tools import helm

BUILD_SECONDS = 3600
GO_SECONDS = 600  #: time for Go to fetch a newer Go


def need_go(versions: VersionSet) -> None:
    """Raises NotForHere where there is no Go, ClusterError where it can neither build these versions nor fetch a newer
    Go.

    Only Go itself knows: by go.mod, its own version and GOTOOLCHAIN (https://go.dev/doc/toolchain). Go before 1.21
    fetches nothing, and neither does any Go with GOTOOLCHAIN=local, which distributions set.
    """
    sources = [versions.kubernetes, *([versions.containerd] if versions.containerd else [])]
    newest = max((one.go for one in sources), key=lambda text: tuple(map(int, text.split("."))))
    if shutil.which("go") is None:
        raise NotForHere(f"go is not found: Kubernetes and containerd are built by Go {newest} or newer, from go.dev")
    for one in sources:
        try:
            run(["go", "list", "-m"], what=f"Go for {one.folder}", timeout=GO_SECONDS, cwd=one.source)
        except ClusterError as error:
            raise ClusterError(
                f"Go {newest} or newer, from go.dev, is needed to build Kubernetes and containerd; Go 1.21 or newer "
                f"with GOTOOLCHAIN=auto fetches it by itself: {str(error).splitlines()[-1]}"
            ) from None


def build(programs: Programs) -> Path:
    """The folder with these programs; a build takes ten minutes on two cores, otherwise this returns at once."""
    version = programs.version
    flags = [f"-X {package}.gitVersion=v{version}" for package in programs.stamps]
    major, minor = version.split(".")[:2]
    flags += [
        f"-X {p}.git{part}={number}" for p in programs.stamps for part, number in (("Major", major), ("Minor", minor))
    ]
    command = ["go", "build", "-mod=readonly", "-trimpath", "-ldflags", " ".join(["-s", "-w", *flags])]
    command += ["-tags", programs.tags] if programs.tags else []
    packages = [f"{programs.module}/{name}" for name in programs.commands]
    sources = [programs.source / name for name in ("go.mod", "go.sum")]

    def make(folder: Path) -> None:
        run(
            ["nice", "-n", "10", *command, "-o", f"{folder}/", *packages],
            what=f"building {programs.folder}",
            timeout=BUILD_SECONDS,
            cwd=programs.source,
            env=os.environ | {"CGO_ENABLED": "0"},
        )

    key = cache.digest([*command, *packages, platform.machine(), *sources])
    return cache.entry(f"{programs.module.split('/')[1]}-{version}", key, make)


def path_of(versions: VersionSet) -> str:
    """PATH of a cluster: first these builds, then Debian's programs, then the machine's own."""
    folders = [build(versions.kubernetes)]
    if versions.containerd:
        folders.append(build(versions.containerd))
    else:
        folders.append(debian.unpacked("containerd") / "usr/bin")
    folders += [debian.unpacked("etcd-server") / "usr/bin", debian.unpacked("runc") / "usr/sbin"]
    return ":".join([*map(str, folders), os.environ["PATH"], "/usr/sbin", "/sbin"])


def cni_plugins() -> Path:
    """The folder of the CNI plugins."""
    return debian.unpacked("containernetworking-plugins") / "usr/lib/cni"


def helm_of(versions: VersionSet) -> Path:
    """Helm; where there is no Helm 3, Go builds it in a minute or two."""
    if versions.helm != 3:
        return helm.path()
    try:
        return helm.third() or helm.build_third()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ClusterError(f"building Helm 3: {error}") from None


def version_of_helm(versions: VersionSet) -> str:
    """As in v4.3.1."""
    return run([helm_of(versions), "version", "--template={{.Version}}"], what="asking Helm", timeout=60).strip()


def containerd_version(versions: VersionSet) -> str:
    """As in 2.3.7; of Debian's package as in 1.6.20~ds1-1+b1."""
    return versions.containerd.version if versions.containerd else debian.version("containerd")
