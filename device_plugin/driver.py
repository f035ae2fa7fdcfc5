"""What a container needs of the real driver: NVIDIA's own CDI edits for the cards, else device nodes and files."""

import ctypes
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from device_plugin import cdi
from device_plugin.edits import DeviceNode, Mount
from vgpu import names
from vgpu.devices import Gpu

log = logging.getLogger(__name__)

_KIND: Final = "nvidia.com/gpu"
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
#: In a container; NVIDIA's CUDA images, like GKE, have its lib64 and bin in LD_LIBRARY_PATH and PATH
CONTAINER_DIR: Final = "/usr/local/nvidia"
NVML: Final = "libnvidia-ml.so.1"
_FOLDERS: Final = (  # below the driver's root: Debian and Ubuntu, Red Hat, Debian's alternatives, GKE
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
)
#: What CUDA programs load; their names end in .so.<driver version>, some in .so.1 too
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
_PROGRAMS: Final = ("usr/bin/nvidia-smi", "bin/nvidia-smi")


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
        """Later ones win (CDI specification, "Spec directories")."""
        if self.specs is not None:
            return self.specs
        return self.seen("/etc/cdi"), Path(names.CDI_DIR)  # that has the same place in the agent's container


def edits_for(cards: Sequence[tuple[Gpu, int]], place: Place) -> DriverEdits:
    """Edits for `cards` (each with its device minor number); FileNotFoundError when one has no device node."""
    for body in reversed(list(_specs(place.spec_folders))):
        by_name = {str(d.get("name")): d.get("containerEdits", {}) for d in body.get("devices", ())}
        chosen = [by_name.get(gpu.uuid, by_name.get(str(gpu.index))) for gpu, _ in cards]
        if all(part is not None for part in chosen):
            parts = [part for part in (*chosen, body.get("containerEdits")) if part]
            return DriverEdits(_merge(parts), str(body.get("cdiVersion", cdi.VERSION)))
    nodes = [{"path": node.host} for node in device_nodes([minor for _, minor in cards], place)]
    return DriverEdits({"deviceNodes": nodes, "mounts": [cdi.mount(each) for each in files(place)]})


def device_nodes(minors: Sequence[int], place: Place) -> list[DeviceNode]:
    """Nodes of the cards with these minor numbers and those that all share; FileNotFoundError when a card has none."""
    paths = [f"/dev/nvidia{minor}" for minor in minors]
    missing = [path for path in paths if not place.seen(path).exists()]
    if missing:
        raise FileNotFoundError(f"device node {', '.join(missing)} is missing on the node")
    paths += [path for name in _CONTROL if place.seen(path := f"/dev/{name}").exists()]
    return [DeviceNode(path, path) for path in paths]


def files(place: Place) -> list[Mount]:
    """The driver's libraries and nvidia-smi, to be mounted below CONTAINER_DIR; none where they are not found."""
    root = place.seen(place.driver_root)
    found = []
    folder = _folder(root, "libcuda.so.1")
    for library in _LIBRARIES if folder else ():
        for file in sorted((root / str(folder)).glob(f"{library}.so.[0-9]*")):
            found.append(Mount(Path(place.driver_root) / str(folder) / file.name, f"{CONTAINER_DIR}/lib64/{file.name}"))
    program = next((path for path in _PROGRAMS if (root / path).exists()), None)
    if program:
        found.append(Mount(Path(place.driver_root) / program, f"{CONTAINER_DIR}/bin/nvidia-smi"))
    return found


def load_nvml(place: Place) -> None:
    """Where no runtime has given this process NVML: takes it from the driver's place on the host, if it is there.

    The loader takes it for every later NVML, since that is its soname.
    """
    root = place.seen(place.driver_root)
    folder = _folder(root, NVML)
    try:
        ctypes.CDLL(NVML)
    except OSError:
        if folder:
            try:
                ctypes.CDLL(str(root / folder / NVML), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                log.warning("NVML of the driver at %s is not usable: %s", place.driver_root, error)


def _folder(root: Path, library: str) -> str | None:
    return next((folder for folder in _FOLDERS if (root / folder / library).exists()), None)


def _specs(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for file in sorted(folder.glob("*")):
            if file.suffix not in {".json", ".yaml", ".yml"}:
                continue
            try:
                text = file.read_text()
                body = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
            except (OSError, ValueError, yaml.YAMLError) as error:
                log.warning("CDI spec %s is not readable: %s", file, error)
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
