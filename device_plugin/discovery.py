"""Finds the cards of the node: when the agent starts, and again as long as a card does not answer. Knows NVML."""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from device_plugin import driver
from vgpu import contexts, inventory
from vgpu.config import Config
from vgpu.devices import Inventory

log = logging.getLogger(__name__)

#: Looks in a row that find a driver of another version than the loaded library. Then a new process has to load the
#: library again
STALE_LOOKS: Final = 2
#: The same where the driver has never answered this process: the versions may differ until the machine is rebooted
STALE_LOOKS_AT_START: Final = 10


def _end() -> None:
    os._exit(1)  # threads that wait for the driver hold nothing that needs an orderly end


class Census:
    """Asks the driver once at a time, even while the driver hangs.

    A thread that asks during another thread's question waits for that thread.
    """

    def __init__(self, config: Config, run_dir: Path, place: driver.Place, end: Callable[[], None] = _end) -> None:
        """`place`: where the driver is; a driver that is installed later is found there, too.

        `end` ends this process, because a process cannot load the library of another driver version any more.
        """
        self._end = end
        self._answered = False
        self._stale = 0  # looks in a row that met another driver version
        self._simulated = bool(config.simulate)
        self._settings = config.device_plugin
        self._memory = run_dir / "contexts.json"
        self._place = place
        self._lock = threading.Lock()
        self._contexts: dict[str, int] = {}  # card → bytes that one context takes there; 0: cannot be measured

    def take(self) -> Inventory:
        """All cards that can be shared and that answer; raises InventoryError, also when no card answers."""
        with self._lock:
            try:
                found = self._take()
            except inventory.StaleLibrary as error:
                self._stale += 1
                if self._stale >= (STALE_LOOKS if self._answered else STALE_LOOKS_AT_START):
                    log.error("%s; this agent ends, so that the next one loads the library of this driver", error)
                    self._end()
                raise
            except inventory.InventoryError:
                self._stale = 0
                raise
            self._stale, self._answered = 0, True
            return found

    def _take(self) -> Inventory:
        if not self._simulated:
            driver.load_nvml(self._place)
        found = inventory.read(
            split=self._settings.deviceSplitCount,
            core_scaling=self._settings.deviceCoreScaling,
        )
        if any(gpu.uuid not in self._contexts for gpu in found.devices):
            found = contexts.learn(found, self._memory)
            self._contexts = {gpu.uuid: gpu.context for gpu in found.devices}
        devices = (msgspec.structs.replace(gpu, context=self._contexts[gpu.uuid]) for gpu in found.devices)
        return msgspec.structs.replace(found, devices=tuple(devices))
