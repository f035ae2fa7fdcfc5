"""Resolves CDI device names to their edits, as a container runtime does when it creates a container.

Source: Container Device Interface specification 0.7.0. Device nodes and hooks have no meaning for a local process.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec

log = logging.getLogger(__name__)


class UnresolvedError(Exception):
    """No spec, or more than one, defines a device."""


class _Mount(msgspec.Struct):
    hostPath: str
    containerPath: str


class _Edits(msgspec.Struct):
    env: list[str] = []
    mounts: list[_Mount] = []


class _Device(msgspec.Struct):
    name: str
    containerEdits: _Edits = msgspec.field(default_factory=_Edits)


class _Spec(msgspec.Struct):
    cdiVersion: str
    kind: str
    devices: list[_Device]
    containerEdits: _Edits = msgspec.field(default_factory=_Edits)


class Edits(NamedTuple):
    env: list[str]  #: NAME=VALUE
    mounts: list[tuple[str, str]]  #: (container path, host path)


def _specs(directory: Path) -> list[_Spec]:
    """All readable specs. A broken file makes only its own devices unresolvable."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=_Spec))
        except FileNotFoundError:
            continue  # removed after it was listed
        except msgspec.MsgspecError as error:
            log.warning("CDI spec %s: %s", path, error)
    return found


def resolve(names: list[str], directory: Path) -> Edits:
    """The edits of devices named VENDOR/CLASS=NAME, each spec's common edits once. Raises UnresolvedError."""
    specs = _specs(directory)
    result = Edits([], [])
    applied: list[int] = []
    unresolved = []
    for name in names:
        kind, _, device = name.partition("=")
        found = [(spec, one) for spec in specs if spec.kind == kind for one in spec.devices if one.name == device]
        if len(found) != 1:
            unresolved.append(name)
            continue
        spec, one = found[0]
        parts = [one.containerEdits]
        if id(spec) not in applied:
            applied.append(id(spec))
            parts.insert(0, spec.containerEdits)
        for edits in parts:
            result.env.extend(edits.env)
            result.mounts.extend((mount.containerPath, mount.hostPath) for mount in edits.mounts)
    if unresolved:
        raise UnresolvedError(f"CDI device injection failed: unresolvable CDI devices {', '.join(unresolved)}")
    return result
