"""CDI specs: one file and one device name for every Allocate, so that two pods never have the same name.

Source: the Container Device Interface specification (github.com/cncf-tags/container-device-interface, SPEC.md).
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from device_plugin import files
from device_plugin.container_edits import Edits, Mount
from vgpu import names

VERSION: Final = "0.5.0"  #: the lowest that allows device names starting with a digit and `hostPath` of device nodes
_FILE: Final = re.compile(r"vgpu\.io-gpu_([0-9a-f]{16}-[0-9a-f]+)\.json")


def new_name(key: str) -> str:
    """A qualified device name that was never used before; `key` names the ids."""
    return f"{names.CDI_KIND}={key}-{secrets.token_hex(6)}"


def is_ours(name: str) -> bool:
    return name.startswith(f"{names.CDI_KIND}=")


def path(folder: Path, name: str) -> Path:
    """Where the spec of a qualified name lives."""
    return folder / f"{names.CDI_KIND.replace('/', '-')}_{name.partition('=')[2]}.json"


def spec(name: str, edits: Edits, driver: Mapping[str, Any] | None = None, version: str = VERSION) -> dict[str, Any]:
    """The spec of one name.

    `driver`: container edits of the cards themselves; `version`: the lowest version that allows them.
    """
    ours: dict[str, Any] = {
        "env": [f"{key}={value}" for key, value in sorted(edits.env.items())],
        "mounts": [mount(each) for each in edits.mounts],
    }
    merged = dict(driver or {})
    for key, values in ours.items():
        merged[key] = [*merged.get(key, ()), *values]  # the last value of a variable wins
    return {
        "cdiVersion": max(version, VERSION, key=_number),
        "kind": names.CDI_KIND,
        "devices": [{"name": name.partition("=")[2], "containerEdits": merged}],
    }


def write(folder: Path, name: str, body: Mapping[str, Any]) -> None:
    """Writes a spec in its folder. A file moved in from another folder would not refresh the runtime's cache."""
    folder.mkdir(parents=True, exist_ok=True)
    target = path(folder, name)
    content = json.dumps(body, indent=1).encode()
    if not (target.is_file() and target.read_bytes() == content):
        files.replace(target, content, 0o644)


def sweep(folder: Path) -> None:
    """Removes the remains of an agent that was killed during a write; only one agent works on a folder."""
    for file in folder.glob(f".{names.CDI_KIND.replace('/', '-')}_*.json.*"):
        file.unlink(missing_ok=True)


def sources(folder: Path) -> Iterator[tuple[Path, Sequence[Path]]]:
    """(spec file, host paths that it mounts) of all our specs; an unreadable spec has no paths."""
    for file in sorted(folder.glob("*.json")):
        if not _FILE.fullmatch(file.name):
            continue
        try:
            body = json.loads(file.read_bytes())
            mounts = [m for device in body["devices"] for m in device["containerEdits"].get("mounts", ())]
            yield file, tuple(Path(m["hostPath"]) for m in mounts)
        except FileNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            yield file, ()


def mount(given: Mount) -> dict[str, Any]:
    """One mount in the format of CDI."""
    options = ["ro" if given.read_only else "rw", "nosuid", "nodev", "bind"]
    return {"hostPath": str(given.host), "containerPath": given.container, "options": options}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
