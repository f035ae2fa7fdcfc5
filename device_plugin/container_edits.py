"""What a container of ours gets in addition to its image: environment, mounts, device nodes. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from device_plugin.library import Rollout
from device_plugin.modes import Mode
from vgpu import names
from vgpu.devices import Gpu, GpuSlice
from vgpu.tier import on_tier

SIMULATOR_LIBRARIES: Final = "/usr/local/vgpu/simulator"  #: in a container
SIMULATOR_STATE: Final = f"{names.REGION_DIR}/simulator"  #: in a container
_CDI: Final = Mode("cdi")
_VOLUME_MOUNTS: Final = "/var/run/nvidia-container-devices"  #: NVIDIA container toolkit, "volume mounts" device list


class Mount(msgspec.Struct, frozen=True):
    host: Path
    container: str
    read_only: bool = True


class DeviceNode(msgspec.Struct, frozen=True):
    host: str
    container: str


class Answer(msgspec.Struct, frozen=True):
    """The answer of Allocate to one container: edits, or the names of CDI specs that will contain them."""

    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    cdi_names: tuple[str, ...] = ()
    devices: tuple[DeviceNode, ...] = ()


class Edits(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()


def limits_environment(
    slices: Sequence[GpuSlice], priority: int | None = None, *, enforce_cores: bool = True
) -> dict[str, str]:
    """The limits as the variables of 4paradigm and HAMi; index `<i>` is the place of the card in `slices`."""
    env = {f"{names.ENV_MEMORY_LIMIT}_{index}": f"{piece.mem}m" for index, piece in enumerate(slices)}
    cores = max((piece.cores for piece in slices), default=0)
    if cores:
        env[names.ENV_CORE_LIMIT] = str(cores)
    if not enforce_cores:
        env[names.ENV_CORE_POLICY] = "disable"
    if priority is not None:
        env[names.ENV_PRIORITY] = str(priority)
    if on_tier(slices):
        env[names.ENV_OVERSUBSCRIBE] = "true"
    return env


def container_edits(
    region: Path,
    rollout: Rollout,
    uuids: Sequence[str],
    *,
    limits: Mapping[str, str] | None = None,
    simulator_state: Path | None = None,
    mode: Mode = _CDI,
) -> Edits:
    """What one container gets; `region` is the host folder with `limits` and `usage`.

    The cards themselves come from the edits of the driver (cdi, device-specs) or from NVIDIA's runtime (envvar). Mounts
    name the cards to that runtime, because an image's environment cannot fake mounts; where the runtime accepts no
    mounts, the variable names them. Where the answer has device nodes, NVIDIA's runtime must add nothing, should the
    container run under it.
    """
    env = {names.ENV_VISIBLE_DEVICES: ",".join(uuids), **(limits or {})}
    mounts = [
        Mount(rollout.library, names.LIBRARY_PATH),
        Mount(rollout.preload, names.PRELOAD_PATH),
        Mount(region / "limits", f"{names.REGION_DIR}/limits"),
        Mount(region / "usage", f"{names.REGION_DIR}/usage", read_only=False),
    ]
    if rollout.simulator and simulator_state:
        env |= {"LD_LIBRARY_PATH": SIMULATOR_LIBRARIES, names.ENV_SIMULATOR_DIR: SIMULATOR_STATE}
        mounts.append(Mount(rollout.simulator, SIMULATOR_LIBRARIES))
        mounts.append(Mount(simulator_state, SIMULATOR_STATE, read_only=False))
    elif mode.strategy == "device-specs":
        env[names.ENV_VISIBLE_DEVICES] = "void"
    elif mode.strategy == "envvar" and mode.volume_mounts:
        env[names.ENV_VISIBLE_DEVICES] = _VOLUME_MOUNTS
        mounts += [Mount(Path("/dev/null"), f"{_VOLUME_MOUNTS}/{uuid}") for uuid in uuids]
    return Edits(env, tuple(mounts))


def in_order(slices: Sequence[GpuSlice], cards: Mapping[str, Gpu]) -> tuple[GpuSlice, ...]:
    """The slices by NVML index, which is the order in which the driver numbers their cards in the container."""
    return tuple(sorted(slices, key=lambda piece: cards[piece.uuid].index))
