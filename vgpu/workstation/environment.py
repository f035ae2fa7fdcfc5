"""The environment of a command of `vgpu run`. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vgpu import names
from vgpu.devices import GpuSlice, Inventory
from vgpu.errors import UserError

_SEPARATORS = frozenset(" :$")


def carried(path: Path) -> bool:
    """Whether the linker reads `path` as one file.

    LD_PRELOAD splits at spaces and colons, and expands `$` (ld.so(8)).
    """
    return not set(str(path)) & _SEPARATORS


def countable(found: Inventory) -> bool:
    """Whether CUDA_VISIBLE_DEVICES may name the cards by NVML's index.

    It may where CUDA has the same order, which is by bus addresses. Many programs read a number there. CUDA counts MIG
    instances in its own way, and it is unknown whether CUDA counts a card that does not answer.
    """
    ordered = sorted(found.devices, key=lambda card: card.pci)
    addresses = {card.pci for card in ordered} - {""}
    return (
        not (found.mig or found.silent)
        and len(addresses) == len(ordered)
        and [card.index for card in ordered] == list(range(len(ordered)))
    )


def environment(
    base: Mapping[str, str],
    slices: Sequence[GpuSlice],
    *,
    region: Path,
    library: Path | None,
    priority: int | None = None,
    simulator: tuple[Path, Path] | None = None,
    oversubscribe: bool = False,
    indices: Sequence[int] | None = None,
    record: str = "",
) -> dict[str, str]:
    """`base` with the library, its region and the cards.

    `simulator`: (folder of its libraries, its state directory). `oversubscribe`: not all of the memory must be on the
    cards. `indices`: NVML indices of the cards of `slices`, where CUDA has the same order (`countable`); None: UUIDs
    name the cards. `library`: None where /etc/ld.so.preload names it. `record`: what vgpu.workstation.strays reads if
    the state is lost.

    Limits that `base` contains are dropped, because they belong to an outer scope. Raises UserError for a library path
    that the dynamic linker would not read as one path: the linker would only warn, and the command would run without
    limits.
    """
    if library is not None and not carried(library):
        raise UserError(
            f"the library's path {str(library)!r} has a space, a colon or a dollar sign, "
            "which LD_PRELOAD cannot carry: choose a state directory without them ($VGPU_STATE_DIR)"
        )
    ours = (names.ENV_MEMORY_LIMIT, names.ENV_CORE_LIMIT, names.ENV_PRIORITY, names.ENV_OVERSUBSCRIBE)
    result = {name: value for name, value in base.items() if not name.startswith(ours)}
    if library is not None:
        result["LD_PRELOAD"] = _prepend(str(library), base.get("LD_PRELOAD"))
    result[names.ENV_REGION_DIR] = str(region)
    if indices is None:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(piece.uuid for piece in slices)
    else:
        result["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
        result["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    for index, piece in enumerate(slices):
        result[f"{names.ENV_MEMORY_LIMIT}_{index}"] = f"{piece.mem}m"
    cores = {piece.cores for piece in slices} - {0}
    if cores:
        result[names.ENV_CORE_LIMIT] = str(min(cores))
    if record:
        result[names.ENV_SLICES] = record
    if priority is not None:
        result[names.ENV_PRIORITY] = str(priority)
    if oversubscribe:
        result[names.ENV_OVERSUBSCRIBE] = "true"
    if simulator is not None:
        libraries, state = simulator
        result["LD_LIBRARY_PATH"] = _prepend(str(libraries), base.get("LD_LIBRARY_PATH"))
        result[names.ENV_SIMULATOR_DIR] = str(state)
        result.pop(names.ENV_SIMULATE, None)  # the state decides
    return result


def _prepend(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first
