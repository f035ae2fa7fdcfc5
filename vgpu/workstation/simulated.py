"""Finds the state of simulated cards."""

import os
import re
from pathlib import Path

from vgpu import names
from vgpu.errors import UserError


def directory(root: Path, spec: str, source: str = "--simulate") -> Path:
    """State of the simulated cards `spec` below the state directory `root`; raises UserError for an invalid spec.

    Each spec has cards of its own, unless $VGPU_SIM_DIR names a state. `source`: where `spec` was written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.@-]*", spec):  # the spec becomes the name of a folder
        raise UserError(f"{source} is {spec!r}: must be PROFILE[xN][@CUDA], such as T4, T4x2 or T4@12.4", 2)
    chosen = os.environ.get(names.ENV_SIMULATOR_DIR)
    return Path(chosen).resolve() if chosen else root / "simulator" / spec
