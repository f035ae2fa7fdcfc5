"""Which cards there are: taken when the agent starts, and again as long as one does not answer. Knows NVML."""

import threading
from pathlib import Path

import msgspec

from device_plugin import driver
from vgpu import contexts, inventory
from vgpu.config import Config
from vgpu.devices import Inventory


class Census:
    """Who asks while another thread does waits for it: the driver is asked once at a time, also where it hangs."""

    def __init__(self, config: Config, run_dir: Path, place: driver.Place) -> None:
        """`place`: where the driver is; one that is installed later is found there, too."""
        self._simulated = bool(config.simulate)
        self._settings = config.device_plugin
        self._memory = run_dir / "contexts.json"
        self._place = place
        self._lock = threading.Lock()
        self._contexts: dict[str, int] = {}  # card → what one context takes there; 0: not to be found out

    def take(self) -> Inventory:
        """All cards that can be shared and that answer; raises InventoryError, also when none does."""
        with self._lock:
            return self._take()

    def _take(self) -> Inventory:
        if not self._simulated:
            driver.load_nvml(self._place)
        found = inventory.read(
            split=self._settings.deviceSplitCount,
            memory_scaling=self._settings.deviceMemoryScaling,
            core_scaling=self._settings.deviceCoreScaling,
        )
        if any(gpu.uuid not in self._contexts for gpu in found.devices):
            found = contexts.learn(found, self._memory)
            self._contexts = {gpu.uuid: gpu.context for gpu in found.devices}
        devices = (msgspec.structs.replace(gpu, context=self._contexts[gpu.uuid]) for gpu in found.devices)
        return msgspec.structs.replace(found, devices=tuple(devices))
