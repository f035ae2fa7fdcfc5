"""The machine of the check: a card, its free memory, and how programs get a slice of it."""

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec
import pynvml

from vgpu import contexts, inventory, names
from vgpu.devices import Gpu, Inventory
from vgpu.native import CardLimit, Limits, Region, paths
from vgpu.workstation.place import visible

from .children import Budget, Child
from .rows import MIB

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[2]
PROGRAMS: Final = HERE.parent / "programs"
SPARE: Final = 1024 * MIB  #: what stays free next to the largest slice: contexts of programs without limits
#: variables of the caller that would limit or preload; with the simulator also those that choose cards and libraries
OURS: Final = (
    "CUDA_DEVICE_",
    "CUDA_OVERSUB",
    "CUDA_TASK",
    "CUDA_DISABLE",
    "VGPU_",
    "LD_PRELOAD",
    "GPU_CORE",
    "ACTIVE_OOM",
)
SIMULATED: Final = ("CUDA_", "LD_", "LIBCUDA", "NVIDIA_")


Command: TypeAlias = Sequence[str | Path]


class NoDriver(Exception):
    """There is no card to check; `str()` is one sentence."""


class Tier(msgspec.Struct, frozen=True):
    """A slice that may hold memory beyond its guarantee in host memory; MiB, contexts included."""

    memory: int
    guarantee: int
    host: int  #: largest amount in host memory
    movable: bool


class Machine:
    """One card, chosen once: the visible card (CUDA_VISIBLE_DEVICES) with the most free memory."""

    def __init__(self, folder: Path, simulate: str, budget: Budget) -> None:
        self.folder, self.simulate, self.budget = folder, simulate, budget
        hidden = OURS + (SIMULATED if simulate else ())
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        path = [str(ROOT / "tests/native"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment |= {names.ENV_STATE_DIR: str(folder), "PYTHONPATH": os.pathsep.join(path)}
        if simulate:
            inventory.use_simulator(simulate, folder / "simulator")
            self._environment |= {
                names.ENV_SIMULATOR_DIR: str(folder / "simulator"),
                "LD_LIBRARY_PATH": str(paths.simulator()),
            }
        try:
            found = inventory.read()
            pynvml.nvmlInit()
            self._choose(found)
        except pynvml.NVMLError as error:
            raise NoDriver(f"the NVIDIA driver does not tell what the check needs: {error}") from None
        except inventory.InventoryError as error:
            raise NoDriver(str(error)) from None
        self.others = self._neighbours()  #: number of other processes that use the card
        self.interrupted = False
        self._slices = 0

    def _choose(self, found: Inventory) -> None:
        self.driver, self.cuda = found.driver, found.cuda
        learned = contexts.learn(found, self.folder / "contexts.json")
        setting = None if self.simulate else os.environ.get("CUDA_VISIBLE_DEVICES")
        cards: Sequence[Gpu] = learned.devices if setting is None else visible(learned.devices, setting)
        if learned.devices and not cards:
            raise NoDriver(f"CUDA_VISIBLE_DEVICES is {setting!r}: it names no card of this machine that can be shared")
        self.mig = not cards
        if cards:
            gpu = max(cards, key=lambda card: pynvml.nvmlDeviceGetMemoryInfo(_handle(card.uuid)).free)
            self.uuid, self.model, self.physical = gpu.uuid, gpu.model, gpu.physical * MIB
            self.context = gpu.context  #: bytes of one context; 0: NVML does not report it
        else:
            self.uuid = _first_instance(found.mig)
            self.model = str(pynvml.nvmlDeviceGetName(self.handle))
            self.physical = int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).total)
            self.context = 0

    @property
    def handle(self) -> Any:
        """NVML's handle of the card, without the library in between."""
        return _handle(self.uuid)

    def free(self) -> int:
        """Free bytes of the card now."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).free)

    def _neighbours(self) -> int:
        try:
            return len(pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle))
        except pynvml.NVMLError:  # a MIG instance may have no list
            return 0

    def alone(self) -> str:
        """Why two processes cannot use the card at once; empty: they can."""
        try:
            mode = pynvml.nvmlDeviceGetComputeMode(self.handle)
        except pynvml.NVMLError:  # a MIG instance has none
            return ""
        return "compute mode EXCLUSIVE_PROCESS" if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS else ""

    @property
    def context_mib(self) -> int:
        return -(-self.context // MIB)

    def slice_mib(self) -> int:
        """The largest slice of the check: a quarter of the card, and at most what is free less SPARE; whole MiB.

        Raises NoDriver where that leaves less than 2 GiB and two contexts.
        """
        least = 2048 + 2 * self.context_mib
        free = max(0, self.free() - SPARE) // MIB
        if free < least:
            raise NoDriver(
                f"{self.model}: {free} MiB are free beside what the check needs itself, and {least} are needed"
            )
        return min(max(self.physical // MIB // 4, least), free)

    def command(self, command: Command, memory: int, cores: int) -> Command:
        """`vgpu run` with a slice of `memory` MiB and `cores` % of this card (0: no core limit)."""
        limits = ["--gpumem", str(memory), "--gpucores", str(cores), "--use-gpuuuid", self.uuid]
        simulate = ["--simulate", self.simulate] if self.simulate else []
        return [Path(sys.executable).with_name("vgpu"), "run", *simulate, *limits, "--", *command]

    def limited(
        self,
        command: Command,
        *,
        memory: int,
        cores: int = 0,
        seconds: float = 60,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Starts a program in a slice of its own: by `vgpu run`.

        A region is used on a MIG instance, because `vgpu run` does not use these.
        """
        if self.mig:
            limits = Limits((CardLimit("", memory * MIB, cores=cores),))
            return self._by_region(command, limits, seconds, variables)
        environment = self._environment | dict(variables)
        return Child(self.command(command, memory, cores), environment, self._within(seconds))

    def tiered(
        self,
        command: Command,
        tier: Tier,
        *,
        seconds: float = 60,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Starts a program in a slice with the tier.

        The slice is a region, because `vgpu run` guarantees everything that fits on the card.
        """
        uuid = "" if self.mig else self.uuid
        card = CardLimit(uuid, tier.memory * MIB, tier.guarantee * MIB, context_bytes=self.context)
        limits = Limits((card,), host_memory=tier.host * MIB, oversubscribe=True, movable=tier.movable)
        return self._by_region(command, limits, seconds, variables)

    def _by_region(self, command: Command, limits: Limits, seconds: float, variables: Mapping[str, str]) -> Child:
        self._slices += 1
        folder = self.folder / f"region{self._slices}"
        folder.mkdir()
        Region.create(folder, limits).close()
        ours = {
            "LD_PRELOAD": str(paths.libvgpu()),
            names.ENV_REGION_DIR: str(folder),
            "CUDA_VISIBLE_DEVICES": self.uuid,
        }
        return Child(command, self._environment | ours | dict(variables), self._within(seconds))

    def native(
        self, command: Command, *, seconds: float = 60, variables: Mapping[str, str] = MappingProxyType({})
    ) -> Child:
        """Starts a program on the same card without the library."""
        environment = self._environment | {"CUDA_VISIBLE_DEVICES": self.uuid} | dict(variables)
        return Child(command, environment, self._within(seconds))

    def _within(self, seconds: float) -> float:
        return max(0.0, min(seconds, self.budget.left))

    def facts(self) -> list[tuple[str, str]]:
        """The head of the table: names and values."""
        one, five, fifteen = os.getloadavg()
        context = f"{self.context / MIB:.0f} MiB" if self.context else "not known, and not charged"
        return [
            ("card", f"{self.model}, {self.physical // MIB} MiB" + (", an instance of MIG" if self.mig else "")),
            ("driver", "the simulator's, " * bool(self.simulate) + f"{self.driver}, CUDA {self.cuda}"),
            ("free at the start", f"{self.free() // MIB} MiB"),
            ("other processes on the card", f"{self.others}" + (" (they disturb the figures)" if self.others else "")),
            ("one context costs", context),
            ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
            ("machine", f"{os.cpu_count()} processors, load {one:.2f} {five:.2f} {fifteen:.2f} at the start"),
        ]


def _handle(uuid: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


def _first_instance(boards: Sequence[str]) -> str:
    """The UUID of the first instance on boards in MIG mode; raises NoDriver when there is none."""
    for board in boards:
        parent = _handle(board)
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
            try:
                return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)))
            except pynvml.NVMLError_NotFound:
                continue
    raise NoDriver("the driver shows no card that CUDA programs could use")
