"""The cards of this machine by NVML: what they are, and what they do now.

Knows NVML, neither gRPC nor Kubernetes. The driver may be real, or the simulator's library (`use_simulator`).
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml

from vgpu import names
from vgpu.devices import Gpu, Inventory

log = logging.getLogger(__name__)
T = TypeVar("T")

MIB: Final = 1 << 20
_LEVELS: Final = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}


class InventoryError(RuntimeError):
    """The cards of this machine cannot be read; `str()` is a sentence that says why."""


class StaleLibrary(InventoryError):
    """NVML has another version than the kernel's driver: a process cannot replace the library that it has loaded."""


class _Unified(Exception):
    """A board without its own memory; `str()` names the board and the effect."""


class Reading(msgspec.Struct, frozen=True):
    """What a card does at this moment, for all users of the card together."""

    used: int  #: bytes
    utilization: float  #: share of the last sampling period in which a kernel ran, 0 to 1
    minor: int  #: the number in /dev/nvidia<N>; -1: unknown


@contextmanager
def session() -> Iterator[None]:
    """Initialises NVML (reference-counted, so that sessions nest and overlap); raises InventoryError."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            reason = "no NVIDIA driver on this machine (libnvidia-ml.so.1 is not found)"
        else:
            reason = f"the NVIDIA driver does not answer: {error}"
        stale = error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        raise (StaleLibrary if stale else InventoryError)(reason) from None
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def read(*, split: int = 10, core_scaling: float = 1.0) -> Inventory:
    """All cards that can be shared and that answer, by NVML index; raises InventoryError, also when no card answers.

    `split`: slices per card; `core_scaling` multiplies the time that slices may share. Memory is that of the card.
    Cards in MIG mode run nothing by themselves: only their UUIDs are listed. Boards that use the machine's memory are
    left out, because the driver reports no size for it.
    """
    with session():
        try:
            cards = []
            handles = {}
            partitioned = []
            silent: dict[int, pynvml.NVMLError] = {}
            unified: list[str] = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                try:
                    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
                    if _ask(pynvml.nvmlDeviceGetMigMode, handle, otherwise=(0, 0))[0]:
                        log.warning("card %d is in MIG mode and is not shared", index)
                        partitioned.append(uuid)
                        continue
                    cards.append(_card(index, handle, split, core_scaling))
                    handles[uuid] = handle
                except _Unified as error:
                    unified.append(str(error))
                except pynvml.NVMLError as error:
                    log.warning("card %d does not answer the driver and is left out: %s", index, error)
                    silent[index] = error
            if silent and not cards:
                raise next(iter(silent.values()))
            if unified and not cards:
                raise InventoryError("; ".join(unified))
            for why in unified:
                log.warning("%s", why)
            return Inventory(
                devices=tuple(msgspec.structs.replace(gpu, links=_links(gpu.uuid, handles)) for gpu in cards),
                mig=tuple(partitioned),
                silent=tuple(silent),
                driver=str(_ask(pynvml.nvmlSystemGetDriverVersion, otherwise="")),
                cuda=_cuda(),
            )
        except pynvml.NVMLError as error:
            raise InventoryError(f"the NVIDIA driver failed to list its cards: {error}") from None


def readings() -> dict[str, Reading]:
    """What every card does now, by UUID; a card that does not answer is missing. Raises InventoryError."""
    found = {}
    with session():
        for index in range(_ask(pynvml.nvmlDeviceGetCount, otherwise=0)):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle, otherwise=None)
                found[str(pynvml.nvmlDeviceGetUUID(handle))] = Reading(
                    used=int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
                    utilization=rates.gpu / 100 if rates else 0.0,
                    minor=_ask(pynvml.nvmlDeviceGetMinorNumber, handle, otherwise=-1),
                )
            except pynvml.NVMLError as error:
                log.debug("card %d does not answer: %s", index, error)
    return found


def users() -> dict[str, dict[int, int]]:
    """UUID → pid → bytes, for every process on every card that answers; the driver's pids. Raises InventoryError."""
    found: dict[str, dict[int, int]] = {}
    with session():
        for index in range(_ask(pynvml.nvmlDeviceGetCount, otherwise=0)):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            except pynvml.NVMLError as error:
                log.debug("card %d does not answer: %s", index, error)
                continue
            of_card = found.setdefault(uuid, {})
            listed: list[Any] = []
            for question in (
                pynvml.nvmlDeviceGetComputeRunningProcesses,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses,
            ):
                listed += _ask(question, handle, otherwise=[])
            for process in listed:
                of_card[process.pid] = max(of_card.get(process.pid, 0), process.usedGpuMemory or 0)
    return found


def use_simulator(spec: str, state_dir: Path) -> None:
    """Makes (or joins) the simulated cards `spec` (PROFILE or PROFILExN) in `state_dir`; NVML is then the simulator's.

    This holds for the running process: the simulator's library is loaded by its path, and the loader uses it for every
    later `libnvidia-ml.so.1`, because the soname is the same. Raises ValueError for an unknown profile,
    FileNotFoundError when the native parts are not built, RuntimeError when a real driver is in use already.
    """
    from vgpu.native import paths, simulator  # compiled parts: needed only for a simulator

    if pynvml.nvmlLib is not None and names.ENV_SIMULATOR_DIR not in os.environ:
        raise RuntimeError("this process already uses the NVML of the real driver: choose the simulator first")
    library = paths.simulator() / "libnvidia-ml.so.1"
    simulator.create(state_dir, spec)
    os.environ[names.ENV_SIMULATOR_DIR] = str(state_dir)
    os.environ.pop(names.ENV_SIMULATE, None)  # the state exists, and it decides
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _ask(question: Callable[..., T], *arguments: Any, otherwise: T) -> T:
    """The answer of an optional NVML query; `otherwise` where this card or driver has no answer."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return otherwise


def _card(index: int, handle: Any, split: int, core_scaling: float) -> Gpu:
    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    try:
        physical = _usable(handle) // MIB
    except pynvml.NVMLError_NotSupported:
        model = _text(pynvml.nvmlDeviceGetName(handle))
        raise _Unified(
            f"card {index} ({model}) has no memory of its own and uses the machine's; vgpu cannot share the card"
        ) from None
    info = _ask(pynvml.nvmlDeviceGetPciInfo, handle, otherwise=None)
    pci = _text(info.busId) if info else ""
    return Gpu(
        uuid=uuid,
        index=index,
        model=_text(pynvml.nvmlDeviceGetName(handle)),
        memory=physical,
        physical=physical,
        cores=int(100 * core_scaling),
        slots=split,
        numa=_numa(handle, pci),
        pci=pci,
        mig=_ask(pynvml.nvmlDeviceGetMigMode, handle, otherwise=None) is not None,
    )


def _usable(handle: Any) -> int:
    """Bytes of a card that programs can have: all memory less the driver's own part (NVML memory info v2)."""
    split = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2, otherwise=None)
    if split is not None:
        return int(split.total) - int(split.reserved)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _cuda() -> str:
    version = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2, otherwise=0)
    return f"{version // 1000}.{version % 1000 // 10}" if version else ""


def _numa(handle: Any, pci: str) -> int:
    """The NUMA node next to a card, -1: unknown. First from the kernel (PCI), else from NVML's memory affinity."""
    try:
        # NVML prints an eight-digit domain, sysfs has four (nvml.h, nvmlPciInfo_t)
        node = int(Path(f"/sys/bus/pci/devices/{pci[-12:].lower()}/numa_node").read_text()) if pci else -1
    except (OSError, ValueError):
        node = -1
    if node >= 0:
        return node
    affinity = _ask(pynvml.nvmlDeviceGetMemoryAffinity, handle, 1, pynvml.NVML_AFFINITY_SCOPE_NODE, otherwise=(0,))
    mask = int(affinity[0])
    return (mask & -mask).bit_length() - 1


def _links(uuid: str, handles: Mapping[str, Any]) -> dict[str, str]:
    levels = {other: _link(handles[uuid], handle) for other, handle in handles.items() if other != uuid}
    return {other: level for other, level in levels.items() if level}


def _link(left: Any, right: Any) -> str:
    """How two cards are connected, in the words of `nvidia-smi topo -m`; empty: unknown."""
    nvlink = _ask(pynvml.nvmlDeviceGetP2PStatus, left, right, pynvml.NVML_P2P_CAPS_INDEX_NVLINK, otherwise=None)
    if nvlink == pynvml.NVML_P2P_STATUS_OK:
        return "NVLINK"
    return _LEVELS.get(_ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, left, right, otherwise=-1), "")
