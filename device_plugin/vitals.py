"""The state of a card: the facts from NVML that decide whether the card can be used. Knows NVML.

Sources: nvml.h; NVIDIA's "GPU Memory Error Management" for what a failed row remapping means (replace the card).
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pynvml

#: The card is gone or needs a reset: asking again at once does not help
LOST: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_NOT_FOUND})
#: a card that is hotter than its slowdown temperature for this long delivers much less than its GPU time promises
HOT_SECONDS: Final = 30.0


class Vitals(msgspec.Struct, frozen=True):
    """None: this card or driver does not report the value."""

    temperature: int | None = None  #: °C
    slowdown: int | None = None  #: °C above which the hardware slows itself down
    uncorrected: int | None = None  #: memory errors that ECC could not correct, since the driver was loaded
    remapping_failed: bool = False  #: a bad row of memory could not be replaced by a spare one
    partitioned: bool = False  #: MIG mode has been switched on


def read(uuid: str) -> Vitals:
    """Asks a card, in an NVML session; raises NVMLError when it does not answer."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    pynvml.nvmlDeviceGetMemoryInfo(handle)
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
    return Vitals(
        temperature=_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        slowdown=_ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        uncorrected=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            handle,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        remapping_failed=bool(rows and rows[3]),
        partitioned=bool((_ask(pynvml.nvmlDeviceGetMigMode, handle) or (0,))[0]),
    )


class Judge:
    """Judges a card by its vitals; remembers the earlier vitals. Pure."""

    def __init__(self) -> None:
        self._uncorrected: dict[str, int] = {}
        self._hot_since: dict[str, float] = {}

    def trouble(self, uuid: str, seen: Vitals, now: float) -> str:
        """Why the card should accept no pods; empty: there is no reason. `now`: seconds, monotonic."""
        before = self._uncorrected.get(uuid, seen.uncorrected)
        if seen.uncorrected is not None:
            self._uncorrected[uuid] = seen.uncorrected
        if seen.temperature is None or seen.slowdown is None or seen.temperature < seen.slowdown:
            self._hot_since.pop(uuid, None)
        if seen.remapping_failed:
            return "it could not remap a bad row of its memory to a spare row: replace the card"
        if seen.partitioned:
            return "it is in MIG mode, which vgpu does not share"
        if seen.uncorrected is not None and before is not None and seen.uncorrected > before:
            return "its memory had an error that ECC could not correct"
        if seen.temperature is not None and seen.slowdown is not None and seen.temperature >= seen.slowdown:
            since = self._hot_since.setdefault(uuid, now)
            if now - since >= HOT_SECONDS:
                return f"it is so hot (at least {seen.slowdown} °C) that it slows itself down"
        return ""


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of an optional query; None where NVML has no answer. Raises NVMLError when the card is lost."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in LOST:
            raise
        return None
