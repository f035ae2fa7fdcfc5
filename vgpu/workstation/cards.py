"""Readings of this machine's cards: the driver's cards, and the simulated cards that commands use."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from vgpu.devices import Gpu

MIB: Final = 1 << 20


class CardReading(msgspec.Struct, frozen=True):
    """The state of one card at one moment."""

    uuid: str
    index: int
    model: str
    memory: int  #: bytes
    used: int  #: bytes, of all processes
    simulated: bool
    utilization: float | None = None  #: 0 to 1, of the last sampling period
    busy_ns: int | None = None  #: a counter, where the card has one: its growth gives the utilisation
    users: dict[int, int] = {}  #: pid → bytes


def read_cards(simulators: Iterable[str]) -> list[CardReading]:
    """The driver's cards (none where there is no driver), and the simulated cards in the given state directories."""
    readings = _driver()
    for directory in sorted(set(simulators)):
        with suppress(OSError, ValueError):  # removed, or of another version's simulator
            readings += _simulated(Path(directory))
    return readings


def _driver() -> list[CardReading]:
    from vgpu import inventory

    try:
        cards: tuple[Gpu, ...] = inventory.read().devices
        now = inventory.readings()
        users = inventory.users()
    except inventory.InventoryError:
        return []
    return [
        CardReading(
            uuid=card.uuid,
            index=card.index,
            model=card.model,
            memory=card.memory * MIB,
            used=now[card.uuid].used,
            simulated=False,
            utilization=now[card.uuid].utilization,
            users=users.get(card.uuid, {}),
        )
        for card in cards
        if card.uuid in now
    ]


def _simulated(directory: Path) -> list[CardReading]:
    from vgpu.native import simulator

    processes = [process for process in simulator.processes(directory) if process.alive]
    return [
        CardReading(
            uuid=card.uuid,
            index=index,
            model=card.model,
            memory=card.memory + card.reserved,  # both values as NVML counts them
            used=card.used + card.reserved,
            simulated=True,
            users={process.pid: process.used[index] for process in processes if process.used[index]},
            busy_ns=card.busy_ns,
        )
        for index, card in enumerate(simulator.cards(directory))
    ]
