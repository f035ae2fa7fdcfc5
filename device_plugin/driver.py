"""What a container needs of the real driver: NVIDIA's own CDI edits for the cards, else device nodes and files."""

import ctypes
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from device_plugin import cdi, hostfiles
from device_plugin.container_edits import DeviceNode, Mount
from vgpu import names
from vgpu.devices import Gpu

log = logging.getLogger(__name__)

_KIND: Final = "nvidia.com/gpu"
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
#: In a container. NVIDIA's CUDA images and GKE have lib64 and bin of this folder in LD_LIBRARY_PATH and PATH
CONTAINER_DIR: Final = "/usr/local/nvidia"
NVML: Final = "libnvidia-ml.so.1"
CUDA: Final = "libcuda.so.1"
_OTHER_ROOTS: Final = ("/run/nvidia/driver",)  #: tried when no driver root is configured: NVIDIA's driver container
#: Libraries that CUDA programs load; their names end in .so.<driver version>, some also in .so.1
_LIBRARIES: Final = (
    "libcuda",
    "libcudadebugger",
    "libnvidia-cfg",
    "libnvidia-gpucomp",
    "libnvidia-ml",
    "libnvidia-nvvm",
    "libnvidia-opencl",
    "libnvidia-ptxjitcompiler",
)
_PROGRAM: Final = "nvidia-smi"


class DriverEdits(msgspec.Struct, frozen=True):
    edits: dict[str, Any]  #: CDI containerEdits
    version: str = cdi.VERSION  #: the CDI version that they need


class Place(msgspec.Struct, frozen=True):
    """Where the driver is."""

    host_root: Path = Path("/")  #: the host's files as seen from here
    driver_root: str = "/"  #: on the host
    specs: tuple[Path, ...] | None = None  #: folders of CDI specs as seen from here; None: those of the host

    def seen(self, path: str) -> Path:
        """A path of the host as seen from here."""
        return self.host_root / path.lstrip("/")

    @property
    def spec_folders(self) -> tuple[Path, ...]:
        """Folders of CDI specs; later folders win (CDI specification, "Spec directories")."""
        if self.specs is not None:
            return self.specs
        return self.seen("/etc/cdi"), Path(names.CDI_DIR)  # this folder has the same path in the agent's container


def edits_for(cards: Sequence[tuple[Gpu, int]], place: Place) -> DriverEdits:
    """Edits for `cards` (each with its device minor number).

    FileNotFoundError when a card has no device node, or when there is neither a CDI spec of NVIDIA's nor a driver.
    """
    for body in reversed(list(_specs(place.spec_folders))):
        by_name = {str(d.get("name")): d.get("containerEdits", {}) for d in body.get("devices", ())}
        chosen = [by_name.get(gpu.uuid, by_name.get(str(gpu.index))) for gpu, _ in cards]
        if all(part is not None for part in chosen):
            parts = [part for part in (*chosen, body.get("containerEdits")) if part]
            return DriverEdits(_merge(parts), str(body.get("cdiVersion", cdi.VERSION)))
    nodes = [{"path": node.host} for node in device_nodes([minor for _, minor in cards], place)]
    mounts = [cdi.mount(each) for each in files(place)]
    if not mounts:
        raise FileNotFoundError(_missing(place))
    return DriverEdits({"deviceNodes": nodes, "mounts": mounts})


def device_nodes(minors: Sequence[int], place: Place) -> list[DeviceNode]:
    """Device nodes of the cards with these minor numbers, and the nodes that all cards share.

    FileNotFoundError when a card has no device node.
    """
    paths = [f"/dev/nvidia{minor}" for minor in minors]
    missing = [path for path in paths if not place.seen(path).exists()]
    if missing:
        raise FileNotFoundError(f"device node {', '.join(missing)} is missing on the node")
    paths += [path for name in _CONTROL if place.seen(path := f"/dev/{name}").exists()]
    return [DeviceNode(path, path) for path in paths]


class Files(msgspec.Struct, frozen=True):
    """Where the driver's files are."""

    root: Path  #: as seen from here: absolute links in this folder start at this folder
    host: str  #: the same folder on the host, without a slash at its end
    folders: tuple[str, ...]  #: folders below the root, best first

    def on_host(self, path: str) -> str | None:
        """The host's path of a file below the root, without links; None: there is no such file."""
        found = hostfiles.inside(self.root, path)
        return None if found is None else self.host + found


def find(place: Place, library: str = CUDA) -> Files | None:
    """Finds the driver's files by one of the driver's libraries; None: not found."""
    said = "/" + place.driver_root.strip("/")
    for driver_root in (said, *(_OTHER_ROOTS if said == "/" else ())):
        root, host = place.seen(driver_root), driver_root.rstrip("/")
        if folders := tuple(hostfiles.folders(root, library)):
            return Files(root, host, folders)
        # This may be a folder of links into the rest of the host, such as /run/opengl-driver of NixOS.
        if host and (folders := tuple(hostfiles.folders(place.host_root, library, below=host))):
            return Files(place.host_root, "", folders)
    return None


def files(place: Place) -> list[Mount]:
    """The driver's libraries and nvidia-smi, as mounts below CONTAINER_DIR; empty where there is no libcuda."""
    there = find(place)
    if there is None:
        return []
    found: dict[str, str] = {}
    for folder in there.folders:
        real = there.root / folder.lstrip("/")
        for library in _LIBRARIES:
            for file in sorted(real.glob(f"{library}.so.[0-9]*")):
                source = there.on_host(f"{folder}/{file.name}")
                if source is not None and hostfiles.fits(there.root / source.removeprefix(there.host).lstrip("/")):
                    found.setdefault(f"{CONTAINER_DIR}/lib64/{file.name}", source)
    # The programs are next to the libraries where the driver's root has only one folder below it.
    for folder in (*hostfiles.PROGRAM_FOLDERS, *(f"{folder}/../bin" for folder in there.folders)):
        program = there.on_host(f"{folder}/{_PROGRAM}")
        if program is not None:
            found[f"{CONTAINER_DIR}/bin/{_PROGRAM}"] = program
            break
    return [Mount(Path(source), target) for target, source in found.items()]


def shortage(place: Place, strategy: str) -> str:
    """Why containers would have no driver in this mode, as a sentence.

    Empty: there is a driver on the host, or the runtime brings it.
    """
    if strategy == "envvar" or (strategy == "cdi" and any(_specs(place.spec_folders))) or find(place) is not None:
        return ""
    return _missing(place)


def _missing(place: Place) -> str:
    where = "on the node" if place.driver_root == "/" else f"below {place.driver_root} on the node"
    return (
        f"the agent cannot find the driver's {CUDA} {where}, neither in the loader's cache nor in the usual folders: "
        "set devicePlugin.driverRoot to the driver's folder"
    )


def load_nvml(place: Place) -> None:
    """Loads NVML from the driver's place on the host, if it is there, when no runtime has given NVML to this process.

    The loader uses this library for every later request for NVML, because the soname is the same.
    """
    try:
        ctypes.CDLL(NVML)
    except OSError:
        there = find(place, NVML)
        file = there and hostfiles.inside(there.root, f"{there.folders[0]}/{NVML}")
        if there and file:
            try:
                ctypes.CDLL(str(there.root / file.lstrip("/")), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                log.warning("cannot load NVML of the driver at %s: %s", place.driver_root, error)


def _specs(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for file in sorted(folder.glob("*")):
            if file.suffix not in {".json", ".yaml", ".yml"}:
                continue
            try:
                text = file.read_text()
                body = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
            except (OSError, ValueError, yaml.YAMLError) as error:
                log.warning("cannot read CDI spec %s: %s", file, error)
                continue
            if isinstance(body, dict) and body.get("kind") == _KIND:
                yield body


def _merge(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the lists of several containerEdits, each entry once."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, values in part.items():
            if isinstance(values, list):
                known = merged.setdefault(key, [])
                known += [value for value in values if value not in known]
            else:
                merged[key] = values
    return merged
