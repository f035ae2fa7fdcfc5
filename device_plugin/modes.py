"""How cards reach a container on this node, and how the node's runtime lets containers bypass that. Pure.

cdi: the answer names a CDI spec. envvar: NVIDIA's runtime provides the cards; the answer lists them in volume mounts,
or in NVIDIA_VISIBLE_DEVICES where the runtime accepts no mounts. device-specs: the answer contains the device nodes and
the driver's files.

Sources: Kubernetes feature gate DevicePluginCDIDevices (on by default from 1.29); containerd, docs/cri/config.md
(`enable_cdi`: from 1.7, on by default from 2.0); CRI-O accepts CDI names of the CRI from 1.28; NVIDIA container
toolkit, /etc/nvidia-container-runtime/config.toml (an unprivileged container's variable is accepted unless it says
false).
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import msgspec

from device_plugin.cri import Facts
from vgpu import names

Strategy = Literal["cdi", "envvar", "device-specs"]
#: Settings of NVIDIA's container toolkit on the host: the package's file, then the GPU operator's
TOOLKIT_FILES: Final = (
    "/etc/nvidia-container-runtime/config.toml",
    "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml",
)
UNPRIVILEGED: Final = "accept-nvidia-visible-devices-envvar-when-unprivileged"
VOLUME_MOUNTS: Final = "accept-nvidia-visible-devices-as-volume-mounts"
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)")
_NVIDIA: Final = "nvidia"


class Toolkit(msgspec.Struct, frozen=True):
    """Settings of NVIDIA's container runtime; the defaults are those of a toolkit without settings."""

    file: str  #: path on the host
    unprivileged: bool = True  #: the runtime obeys NVIDIA_VISIBLE_DEVICES of an unprivileged container
    volume_mounts: bool = False  #: the runtime obeys mounts below /var/run/nvidia-container-devices


class Node(msgspec.Struct, frozen=True):
    """The known facts about a node; empty: not known."""

    kubelet: str = ""  #: version
    runtime: Facts = Facts()
    toolkit: Toolkit | None = None  #: None: no settings found


class Mode(msgspec.Struct, frozen=True):
    strategy: Strategy = "cdi"
    volume_mounts: bool = True  #: envvar: mounts name the cards, which an image's environment cannot fake
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.strategy}: {self.reason}"


def read_toolkit(text: str, file: str) -> Toolkit:
    """Settings from config.toml; raises ValueError when it is not TOML."""
    found = tomllib.loads(text)
    return Toolkit(file, found.get(UNPRIVILEGED, True) is not False, found.get(VOLUME_MOUNTS, False) is True)


def toolkit_files(runtime: Facts) -> Iterator[str]:
    """Where NVIDIA's settings may be, the files next to a registered runtime first."""
    for _, binary in _nvidia_runtimes(runtime):
        if binary:
            yield str(PurePosixPath(binary).parent / ".config/nvidia-container-runtime/config.toml")
    yield from TOOLKIT_FILES


def choose(configured: str, node: Node, cdi_dir: Path = Path(names.CDI_DIR)) -> Mode:
    """The mode of this node; `configured`: a strategy, or auto."""
    accepts_mounts = node.toolkit is not None and node.toolkit.volume_mounts
    if configured != "auto":
        strategy = msgspec.convert(configured, Strategy)
        return Mode(strategy, accepts_mounts, "configured")
    missing = _why_no_cdi(node, cdi_dir)
    if not missing:
        return Mode("cdi", accepts_mounts, "kubelet and container runtime support CDI")
    if not _nvidia_by_default(node):
        return Mode("device-specs", accepts_mounts, f"{missing}, and containers do not run under NVIDIA's runtime")
    if node.toolkit is not None and not (node.toolkit.unprivileged or node.toolkit.volume_mounts):
        return Mode("device-specs", False, f"{missing}, and {node.toolkit.file} allows neither variable nor mounts")
    return Mode("envvar", accepts_mounts, f"{missing}, and containers run under NVIDIA's runtime")


def unsafe(node: Node) -> str:
    """A sentence about settings that let containers see cards without a grant; empty: there are no such settings."""
    if not _has_nvidia(node) or (node.toolkit is not None and not node.toolkit.unprivileged):
        return ""
    file = node.toolkit.file if node.toolkit else TOOLKIT_FILES[0]
    said = "" if node.toolkit else " (not found, so its default applies)"
    return (
        f"NVIDIA's container runtime shows every card to any container whose image sets {names.ENV_VISIBLE_DEVICES}, "
        f"without limits: set {UNPRIVILEGED} = false and {VOLUME_MOUNTS} = true in {file} of the node{said}"
    )


def _why_no_cdi(node: Node, cdi_dir: Path) -> str:
    kubelet = _number(node.kubelet)
    if kubelet is not None and kubelet < (1, 29):
        return f"kubelet {node.kubelet} does not pass CDI names on"
    runtime, version = node.runtime, _number(node.runtime.version)
    known = f"{runtime.name} {runtime.version}"
    if runtime.name == "containerd" and version is not None:
        told = (runtime.config or {}).get("enableCDI")
        if version < (1, 7):
            return f"{known} does not support CDI"
        if not (told if isinstance(told, bool) else version >= (2, 0)):
            return f"{known} has CDI switched off"
        folders = (runtime.config or {}).get("cdiSpecDirs")
        if folders and _plain(cdi_dir) not in [_plain(Path(folder)) for folder in folders]:
            return f"{known} reads no CDI specs in {cdi_dir}"
    elif runtime.name == "cri-o" and version is not None:
        if version < (1, 28):
            return f"{known} does not accept CDI names"
    elif runtime.name:
        return f"{known} may not accept CDI names"
    return ""


def _nvidia_runtimes(runtime: Facts) -> list[tuple[str, str]]:
    """(name, binary) of those containerd runtimes that are NVIDIA's."""
    return [(name, binary) for name, binary in _runtimes(runtime) if _NVIDIA in name or _NVIDIA in Path(binary).name]


def _runtimes(runtime: Facts) -> Iterator[tuple[str, str]]:
    found: Any = _section(runtime).get("runtimes")
    for name, one in (found if isinstance(found, dict) else {}).items():
        options = one.get("options") if isinstance(one, dict) else None
        yield name, str((options or {}).get("BinaryName") or "")


def _section(runtime: Facts) -> dict[str, Any]:
    found = (runtime.config or {}).get("containerd")
    return found if isinstance(found, dict) else {}


def _has_nvidia(node: Node) -> bool:
    """Whether containers on this node can use NVIDIA's runtime, by default or by a RuntimeClass."""
    if node.runtime.config is not None or node.runtime.handlers:
        return bool(_nvidia_runtimes(node.runtime)) or any(_NVIDIA in name for name in node.runtime.handlers)
    return node.toolkit is not None


def _nvidia_by_default(node: Node) -> bool:
    default = _section(node.runtime).get("defaultRuntimeName")
    if default:
        return default in [name for name, _ in _nvidia_runtimes(node.runtime)]
    return _has_nvidia(node)


def _number(version: str) -> tuple[int, int] | None:
    found = _VERSION.match(version)
    return (int(found[1]), int(found[2])) if found else None


def _plain(path: Path) -> str:
    """The path with /var/run as /run, to which it is a link."""
    text = str(path)
    return text.removeprefix("/var") if text.startswith("/var/run/") else text
