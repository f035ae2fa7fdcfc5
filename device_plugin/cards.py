"""What the parts of the agent know about this node's cards: inventory, health, cordon. Thread-safe, no I/O.

A card is *absent* when an earlier agent published the card, the driver still counts it, and it has not answered since
this agent started. The agent shows an absent card as unhealthy until the card answers.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from vgpu import tier
from vgpu.allocation import Held
from vgpu.devices import Gpu, Inventory
from vgpu.tier import Scaling

log = logging.getLogger(__name__)

#: The reason shown for a card that did not answer and had no other trouble. A later agent recognizes such a card by
#: this text.
ABSENT: Final = "it did not answer the driver when the agent started"
#: the agent publishes memory of others in these steps, because that memory changes all the time
OTHERS_MIB: Final = 256
OTHERS_BYTES: Final = OTHERS_MIB * tier.MIB


class Cards:
    """The cards of this node; listeners are called (from any thread) after every change."""

    def __init__(self, inventory: Inventory, scaling: Scaling = tier.UNSCALED) -> None:
        """`scaling`: how many times the cards' memory the limits may sum up to.

        A factor above 1 counts only when the node is known to keep host memory for the scaled memory (`back`).
        """
        self._lock = threading.Lock()
        self.scaling = scaling
        self._backed: bool | None = None
        self._behind: Mapping[str, int] = {}  # MiB of host memory that pods hold behind each card
        self._inventory = inventory
        self._absent: dict[str, Gpu] = {}  # the cards as an earlier agent published them
        self._sick: dict[str, str] = {}
        self._reasons: dict[str, set[str]] = {}  # UUID of an unhealthy card → the reasons that the agent has logged
        self._cordoned: frozenset[str] = frozenset()
        self._foreign: dict[str, int] = {}  # MiB, in steps
        self._rival = ""
        self._listeners: list[Callable[[], None]] = []

    @property
    def inventory(self) -> Inventory:
        """The cards with their health as of now, by NVML index."""
        return self._now(self._behind)

    def _now(self, behind: Mapping[str, int]) -> Inventory:
        with self._lock:
            devices = [
                msgspec.structs.replace(
                    gpu,
                    healthy=gpu.uuid not in self._sick,
                    trouble=self._sick.get(gpu.uuid, ""),
                    foreign=gpu.uuid in self._foreign,
                    others=self._foreign.get(gpu.uuid, 0),
                )
                for gpu in self._inventory.devices
            ]
            for gpu in self._absent.values():
                trouble = gpu.trouble or ABSENT
                devices.append(msgspec.structs.replace(gpu, healthy=False, trouble=trouble, foreign=False, others=0))
            devices.sort(key=lambda gpu: gpu.index)
            found = tier.scaled(devices, self.scaling, backed=bool(self._backed), behind=behind)
            return msgspec.structs.replace(self._inventory, devices=found)

    @property
    def by_uuid(self) -> Mapping[str, Gpu]:
        return {gpu.uuid: gpu for gpu in self.inventory.devices}

    def beside(self, held: Mapping[str, Held]) -> Mapping[str, Gpu]:
        """The cards by UUID, with the host memory behind each card when pods hold `held`."""
        return {gpu.uuid: gpu for gpu in self._now(_behind(held)).devices}

    def hold(self, held: Mapping[str, Held]) -> None:
        """Sets what pods hold. From now on, no more host memory is shown behind cards than these holdings leave."""
        self._behind = _behind(held)

    @property
    def absent(self) -> Mapping[str, str]:
        """UUID → trouble that an earlier agent found; empty: the card was well."""
        with self._lock:
            return {gpu.uuid: gpu.trouble for gpu in self._absent.values()}

    @property
    def complete(self) -> bool:
        """Whether every card that the driver counts has answered, and there is at least one card."""
        with self._lock:
            return bool(self._inventory.devices) and not self._inventory.silent

    def recall(self, before: Inventory) -> list[Gpu]:
        """Marks the cards of `before` (which an earlier agent published) that do not answer as absent from now on.

        Returns the cards that are gone: the driver counts no silent card at their index.
        """
        with self._lock:
            known = {gpu.uuid for gpu in self._inventory.devices} | set(self._inventory.mig)
            missing = [gpu for gpu in before.devices if gpu.uuid not in known]
            silent = {gpu.uuid: gpu for gpu in missing if gpu.index in self._inventory.silent}
            for uuid, gpu in silent.items():
                trouble = "" if gpu.trouble == ABSENT else gpu.trouble
                self._absent[uuid] = msgspec.structs.replace(gpu, trouble=trouble)
        for gpu in silent.values():
            log.warning(
                "card %d (%s, %s) does not answer the driver; it takes no pods until it answers",
                gpu.index,
                gpu.model,
                gpu.uuid,
            )
        if silent:
            self._tell()
        return [gpu for gpu in missing if gpu.uuid not in silent]

    def found(self, now: Inventory) -> list[Gpu]:
        """Takes over what the driver shows at another look; returns the cards that are new or were absent.

        A card that has answered this agent before and is missing now stays: the health thread judges that card.
        """
        with self._lock:
            known = {gpu.uuid for gpu in self._inventory.devices}
            here = {gpu.uuid for gpu in now.devices} | set(now.mig)
            kept = [gpu for gpu in self._inventory.devices if gpu.uuid not in here]
            before = self._inventory, self._absent
            self._inventory = msgspec.structs.replace(now, devices=(*kept, *now.devices))
            self._absent = {
                uuid: gpu for uuid, gpu in self._absent.items() if uuid not in here and gpu.index in now.silent
            }
            changed = (self._inventory, self._absent) != before
        new = [gpu for gpu in now.devices if gpu.uuid not in known]
        for gpu in new:
            log.info("card %d: %s, %d MiB, %s", gpu.index, gpu.model, gpu.physical_memory, gpu.uuid)
        if changed:
            self._tell()
        return new

    @property
    def cordoned(self) -> frozenset[str]:
        return self._cordoned

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls `listener` after every change until the returned function is called."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                self._listeners.remove(listener)

        return stop

    def sicken(self, uuid: str, reason: str) -> bool:
        """Marks a card unhealthy; returns whether the card was healthy before.

        A further reason is stored, but listeners are not called: a card may have a hundred errors a second, and the
        publisher looks again by itself.
        """
        with self._lock:
            news = uuid not in self._sick
            self._sick[uuid] = reason
            reasons = self._reasons.setdefault(uuid, set())
            log.log(logging.DEBUG if reason in reasons else logging.WARNING, "card %s is unhealthy: %s", uuid, reason)
            reasons.add(reason)
        if news:
            self._tell()
        return news

    def heal(self, uuid: str) -> bool:
        """Marks a card healthy; returns whether the card was unhealthy before."""
        with self._lock:
            news = self._sick.pop(uuid, None) is not None
            if uuid in self._absent:
                self._absent[uuid] = msgspec.structs.replace(self._absent[uuid], trouble="")
            self._reasons.pop(uuid, None)
        if news:
            log.info("card %s is healthy again", uuid)
            self._tell()
        return news

    def sick(self) -> dict[str, str]:
        """UUID → reason of every unhealthy card."""
        with self._lock:
            return dict(self._sick)

    def cordon(self, uuids: frozenset[str]) -> None:
        """These cards accept no new pods (node annotation `vgpu.io/cordon`)."""
        with self._lock:
            news = uuids != self._cordoned
            self._cordoned = uuids
        if news:
            log.info("cordoned cards: %s", ", ".join(sorted(uuids)) or "none")
            self._tell()

    def used_by_others(self, used: Mapping[str, int]) -> None:
        """Records which cards processes outside our containers use: UUID → bytes.

        A change of the amount alone does not call the listeners: the publisher looks again by itself.
        """
        with self._lock:
            news = used.keys() != self._foreign.keys()
            self._foreign = {uuid: -(-size // OTHERS_BYTES) * OTHERS_MIB for uuid, size in used.items()}
        if news:
            self._tell()

    @property
    def backed(self) -> bool | None:
        """Whether host memory stands behind the cards; None: not known yet.

        The configuration must want host memory, and the node must keep it free.
        """
        wanted = self.scaling.host_memory and self.scaling.above(self.inventory.devices)
        return self._backed if wanted else False

    @property
    def host_memory(self) -> int:
        """MiB of the node that stand behind its cards."""
        return self.scaling.host_memory if self.backed else 0

    @property
    def unbacked(self) -> bool:
        """Whether memory of cards should be scaled, but the node does not keep host memory for it."""
        return self._backed is False and bool(self.scaling.above(self.inventory.devices))

    def back(self, backed: bool) -> None:
        """Records whether the node keeps the host memory that its cards need."""
        with self._lock:
            news = backed != self._backed
            self._backed = backed
        if news and self.scaling.above(self.inventory.devices):
            log.info("memory of cards is %s", "scaled" if backed else "not scaled")
            self._tell()

    @property
    def rival(self) -> str:
        """A sentence about another device plugin that is in the way; empty: no plugin is."""
        return self._rival

    def contested(self, sentence: str) -> None:
        """Records that another device plugin is in the way; empty: no plugin is any more."""
        self._rival = sentence
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


def _behind(held: Mapping[str, Held]) -> dict[str, int]:
    return {uuid: one.behind for uuid, one in held.items() if one.behind}
