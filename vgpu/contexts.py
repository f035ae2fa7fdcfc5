"""The cost of one CUDA context on each card: memory that the driver takes before the program's first allocation.

A program cannot see this cost from inside. So vgpu learns the cost once: it makes a context in a separate process and
asks NVML what this process holds. Each context is charged to its container's slice, otherwise slices that sum up to a
card would not fit on it.
"""

import ctypes
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import pynvml

from vgpu import names
from vgpu.devices import Gpu, Inventory

log = logging.getLogger(__name__)

LEARN_SECONDS: Final = 60.0  #: the first context after boot may take seconds per card

_DEATH_SECONDS: Final = 1.0  #: for a killed process


def learn(inventory: Inventory, memory: Path) -> Inventory:
    """The inventory with the cost of a context on every card; 0 where it could not be measured.

    `memory` is a file that keeps the results by driver version and model; a stored result is used again.
    """
    known = _read(memory)
    missing = {gpu.model: gpu for gpu in inventory.devices if _key(inventory, gpu) not in known}
    if missing:
        costs = _ask([gpu.uuid for gpu in missing.values()])
        known |= {_key(inventory, gpu): costs[gpu.uuid] for gpu in missing.values() if costs.get(gpu.uuid)}
        _write(memory, known)
    devices = [msgspec.structs.replace(gpu, context=known.get(_key(inventory, gpu), 0)) for gpu in inventory.devices]
    for model in {gpu.model for gpu in devices if not gpu.context}:
        log.warning("cannot measure the memory cost of a CUDA context on %s; not charging it", model)
    return msgspec.structs.replace(inventory, devices=tuple(devices))


def _key(inventory: Inventory, gpu: Gpu) -> str:
    return f"{inventory.driver} {gpu.model}"


def _read(memory: Path) -> dict[str, int]:
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(memory: Path, known: dict[str, int]) -> None:
    temporary = memory.with_name(f".{memory.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(known))
        temporary.replace(memory)
    except OSError as error:
        log.warning("cannot write %s: %s", memory, error.strerror)


def _ask(uuids: list[str]) -> dict[str, int]:
    """Runs this module as a process; unknown costs are missing."""
    hidden = {"LD_PRELOAD", "CUDA_VISIBLE_DEVICES", names.ENV_REGION_DIR}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    if names.ENV_SIMULATOR_DIR in environment:
        from vgpu.native import paths  # compiled parts: needed only where cards are simulated

        environment["LD_LIBRARY_PATH"] = str(paths.simulator())
    command = [sys.executable, "-m", __name__, *uuids]
    try:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            output, complaint = child.communicate(timeout=LEARN_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the kernel: do not wait for its end
                child.wait(_DEATH_SECONDS)
            raise
        if child.returncode == 0:
            return msgspec.json.decode(output, type=dict[str, int])
        log.debug("cannot measure contexts: %s", complaint.decode(errors="replace").strip())
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        log.debug("cannot measure contexts: %s", error)
    return {}


class _Driver:
    """libcuda.so.1; RuntimeError names the call that failed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} returned {status}")


def measure(uuid: str) -> int:
    """Bytes that NVML counts for this process with one context on the card; raises RuntimeError, NVMLError, OSError."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    cuda = _Driver()
    cuda("cuInit", 0)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    cuda("cuDeviceGetByPCIBusId", ctypes.byref(device), pynvml.nvmlDeviceGetPciInfo(handle).busId.encode())
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    finally:
        cuda("cuDevicePrimaryCtxRelease_v2", device)
    raise RuntimeError(f"NVML does not list this process on {uuid} (another pid namespace?)")


def main(uuids: list[str]) -> int:
    """Prints {uuid: bytes} as JSON; a card that cannot be measured is left out, with the reason on stderr."""
    costs = {}
    pynvml.nvmlInit()
    for uuid in uuids:
        try:
            costs[uuid] = measure(uuid)
        except (RuntimeError, OSError, pynvml.NVMLError) as error:
            print(f"{uuid}: {error}", file=sys.stderr)
    sys.stdout.buffer.write(msgspec.json.encode(costs))
    return 0 if len(costs) == len(uuids) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
