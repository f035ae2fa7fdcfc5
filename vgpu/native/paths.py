"""Paths of the shared libraries and headers: they are next to this module, in a checkout and in an installed wheel."""

from pathlib import Path
from typing import Final

_LIB: Final = Path(__file__).resolve().parent / "lib"


def _built(path: Path, what: str) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{what} is not built ({path} is missing): run `make build`")
    return path


def libvgpu() -> Path:
    """The intercept library, for LD_PRELOAD; raises FileNotFoundError when it is not built."""
    return _built(_LIB / "libvgpu.so", "libvgpu.so")


def simulator() -> Path:
    """The folder of the simulated libcuda.so.1 and libnvidia-ml.so.1, for LD_LIBRARY_PATH; raises FileNotFoundError."""
    _built(_LIB / "simulator" / "libcuda.so.1", "the simulator")
    return _LIB / "simulator"


def include() -> Path:
    """The folder that holds `vgpu/agent.h` and the other public headers; raises FileNotFoundError."""
    _built(_LIB / "include" / "vgpu" / "agent.h", "the folder of headers")
    return _LIB / "include"
