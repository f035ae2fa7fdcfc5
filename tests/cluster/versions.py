"""The sets of versions for a cluster. The go.mod of each folder has the versions themselves."""

import re
from pathlib import Path
from typing import Final

import msgspec

BINARIES: Final = Path(__file__).parent / "binaries"


class Programs(msgspec.Struct, frozen=True):
    """Programs of one Go module."""

    folder: str  #: below binaries/
    module: str  #: module whose version counts
    commands: tuple[str, ...]  #: packages below the module
    tags: str = ""  #: build tags
    stamps: tuple[str, ...] = ()  #: packages that contain the version, set by the linker

    @property
    def source(self) -> Path:
        return BINARIES / self.folder

    @property
    def version(self) -> str:
        """The version without the v."""
        found = re.search(
            rf"^(?:require )?\s*{re.escape(self.module)} v(\S+)", (self.source / "go.mod").read_text(), re.M
        )
        if found is None:
            raise ValueError(f"{self.source / 'go.mod'}: no version of {self.module}")
        return found[1]

    @property
    def go(self) -> str:
        """The oldest version of Go that builds these programs, as in 1.26.8."""
        found = re.search(r"^go (\d+(?:\.\d+)*)$", (self.source / "go.mod").read_text(), re.M)
        if found is None:
            raise ValueError(f"{self.source / 'go.mod'}: no version of Go")
        return found[1]


def kubernetes(folder: str) -> Programs:
    names = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet")
    return Programs(
        folder,
        "k8s.io/kubernetes",
        tuple(f"cmd/{name}" for name in names),
        stamps=("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"),
    )


class VersionSet(msgspec.Struct, frozen=True):
    """One cluster."""

    name: str
    kubernetes: Programs
    containerd: Programs | None  #: none: Debian's package
    strategy: str  #: how cards reach a container: the chart's devicePlugin.deviceListStrategy
    helm: int  #: its major version

    @property
    def minor(self) -> int:
        """Kubernetes 1.<minor>."""
        return int(self.kubernetes.version.split(".")[1])


CONTAINERD: Final = Programs(
    "containerd-2.3",
    "github.com/containerd/containerd/v2",
    ("cmd/containerd", "cmd/containerd-shim-runc-v2", "cmd/ctr"),
    tags="no_btrfs,no_zfs,no_devmapper",
)
SETS: Final = {
    found.name: found
    for found in (
        VersionSet("1.36", kubernetes("kubernetes-1.36"), CONTAINERD, "cdi", helm=4),
        VersionSet("1.34", kubernetes("kubernetes-1.34"), None, "envvar", helm=3),
        VersionSet("1.30", kubernetes("kubernetes-1.30"), None, "envvar", helm=3),
        VersionSet("1.37", kubernetes("kubernetes-1.37"), CONTAINERD, "cdi", helm=4),
    )
}
