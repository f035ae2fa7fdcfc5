"""Cards and slices, and the codec of a node's inventory annotation (`vgpu.io/devices`)."""

from typing import Annotated

import msgspec

from vgpu.names import DEVICES

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Gpu(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One card as its node publishes it."""

    uuid: str  #: as NVML prints it, "GPU-…"
    index: Natural  #: NVML index on the node
    model: str  #: NVML name, e.g. "NVIDIA H100 80GB HBM3"
    memory: Natural  #: MiB that all limits on this card may sum up to; above `physical` if memory is scaled (vgpu.tier)
    physical: Natural = 0  #: MiB of the card itself; 0: the same as `memory`
    cores: Natural = 100  #: percent that all slices of this card may share: 100 × deviceCoreScaling
    context: Natural = 0  #: bytes that one CUDA context takes, charged to the container; 0: not known
    slots: Natural = 10  #: number of slices that fit on this card (deviceSplitCount)
    numa: int = -1  #: NUMA node, -1: unknown
    pci: str = ""  #: bus id, "00000000:3B:00.0"
    healthy: bool = True
    trouble: str = ""  #: why the card is not healthy
    foreign: bool = False  #: processes outside vgpu's containers use the card
    others: Natural = 0  #: MiB that vgpu cannot give: other processes or another plugin's pods have this memory
    mig: bool = False  #: the card can be partitioned (MIG); a partitioned card is not shared
    links: dict[str, str] = {}  #: uuid of another card → NVLINK, PIX, PXB, PHB, NODE or SYS

    @property
    def physical_memory(self) -> int:
        """MiB of the card itself: what percentages and "whole card" refer to."""
        return self.physical or self.memory

    @property
    def taken(self) -> int:
        """MiB of the card that others than vgpu have; 1 where the card is used and the amount is unknown."""
        return max(self.others, int(self.foreign))


class GpuSlice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one container holds on one card."""

    uuid: str
    mem: Natural  #: MiB that the container may allocate
    cores: Natural = 0  #: percent of the card's time that the container is guaranteed; 0: none
    phys: Natural | None = None  #: MiB that the container is guaranteed on the card itself; None: the same as `mem`

    @property
    def guarantee(self) -> int:
        return self.mem if self.phys is None else self.phys


class Inventory(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """All cards of a node: value of the annotation `vgpu.io/devices`."""

    devices: tuple[Gpu, ...] = ()
    mig: tuple[str, ...] = ()  #: UUIDs of cards in MIG mode, which are not shared
    silent: tuple[Natural, ...] = ()  #: NVML indexes of cards that the driver counts and that do not answer
    driver: str = ""
    cuda: str = ""
    v: int = 1


def encode_inventory(inventory: Inventory) -> str:
    return msgspec.json.encode(inventory).decode()


def decode_inventory(text: str) -> Inventory:
    """Reads the annotation; raises ValueError naming it when this version does not understand the text."""
    try:
        inventory = msgspec.json.decode(text, type=Inventory)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"annotation {DEVICES}: {error}") from None
    if inventory.v != 1:
        raise ValueError(f"annotation {DEVICES}: version {inventory.v} is unknown; this release supports version 1")
    return inventory
