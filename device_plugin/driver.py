"""What a container needs of the real driver: NVIDIA's own CDI edits for the cards, else their device nodes."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from device_plugin import cdi
from vgpu.devices import Gpu

log = logging.getLogger(__name__)

SPEC_DIRS: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))  #: later ones win (CDI specification, "Spec directories")
_KIND: Final = "nvidia.com/gpu"
_CONTROL: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


class DriverEdits(msgspec.Struct, frozen=True):
    edits: dict[str, Any]  #: CDI containerEdits
    version: str = cdi.VERSION  #: the CDI version that they need


def edits_for(
    cards: Sequence[tuple[Gpu, int]], folders: Sequence[Path] = SPEC_DIRS, devices: Path = Path("/dev")
) -> DriverEdits:
    """Edits for `cards` (each with its device minor number); FileNotFoundError when one has no device node."""
    for body in reversed(list(_specs(folders))):
        by_name = {str(d.get("name")): d.get("containerEdits", {}) for d in body.get("devices", ())}
        chosen = [by_name.get(gpu.uuid, by_name.get(str(gpu.index))) for gpu, _ in cards]
        if all(part is not None for part in chosen):
            parts = [part for part in (*chosen, body.get("containerEdits")) if part]
            return DriverEdits(_merge(parts), str(body.get("cdiVersion", cdi.VERSION)))
    nodes = [devices / f"nvidia{minor}" for _, minor in cards]
    missing = [str(node) for node in nodes if not node.exists()]
    if missing:
        raise FileNotFoundError(f"device node {', '.join(missing)} is missing on the node")
    nodes += [node for name in _CONTROL if (node := devices / name).exists()]
    return DriverEdits({"deviceNodes": [{"path": str(node)} for node in nodes]})


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
