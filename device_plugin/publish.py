"""What a node publishes about its cards: annotation, label and capacity, written again and again.

The kubelet copies capacity to allocatable, and sets extended resources to zero when its checkpoint is gone. After a
restart, the kubelet admits running pods again against the numbers (measured on 1.36). So the numbers are never lower
than what live pods hold.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec

from device_plugin import backing, conditions
from device_plugin.cards import ABSENT, Cards
from device_plugin.conditions import Finding
from vgpu import names
from vgpu.allocation import Held
from vgpu.config import Config
from vgpu.devices import Gpu, Inventory, decode_inventory, encode_inventory
from vgpu.kube import cardmarks, writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Node
from vgpu.resources import parse_quantity

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_SPACING_SECONDS: Final = 0.3  #: minimum between two looks: changes in between are written together


class Publisher:
    """One thread that keeps the node object as it should be; `held` returns what live pods hold, by card.

    `held` returns None while that is not known yet. Until then, the amounts that an earlier agent published do not
    shrink.

    `suspect(uuid, reason)` receives cards that an earlier agent published as unhealthy, `gone(sentence)` cards that do
    not exist any more, `heal(uuids)` cards that the node's mark calls repaired. `unbacked(sentence)` receives why
    memory is not scaled. `presence(annotations)` keeps the agent's mark on the node.
    """

    def __init__(
        self,
        client: KubeClient,
        node: str,
        config: Config,
        cards: Cards,
        held: Callable[[], Mapping[str, Held] | None],
        *,
        suspect: Callable[[str, str], None],
        gone: Callable[[str], None],
        heal: Callable[[Collection[str]], None],
        unbacked: Callable[[str], None],
        presence: Callable[[Mapping[str, str]], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._name = node
        self._config = config
        self._cards = cards
        self._held = held
        self._suspect = suspect
        self._gone = gone
        self._heal = heal
        self._unbacked = unbacked
        self._presence = presence
        self._flat: str | None = None  # why memory is not scaled; None: not known yet
        self.recalled = threading.Event()  #: set once the agent knows what an earlier agent published
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._node: Node | None = None
        self._complaint = ""
        self._written = -PERIOD_SECONDS  # monotonic seconds of the last write of the cards and their condition
        self._healed = ""  # version of the node whose mark of repaired cards was obeyed
        self._unmarked = ""  # version of the node whose mark was obeyed and removed
        self._informer = Informer(
            client,
            "/api/v1/nodes",
            Node,
            params={"fieldSelector": f"metadata.name={node}"},
            on_change=self._change,
        )
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        cards.listen(self._wake.set)

    def start(self) -> None:
        self._informer.start()
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._wake.set()
        self._informer.stop()

    def wake(self) -> None:
        """Wakes the thread: there is something to write."""
        self._wake.set()

    def _change(self, change: str, node: Node) -> None:
        if change == "set":
            self._cards.cordon(cardmarks.listed(node.metadata.annotations.get(names.CORDON, "")))
            self._weigh(node)
            if not self.recalled.is_set():
                self._recall(node)
                self.recalled.set()
        self._node = node if change == "set" else None
        self._wake.set()

    def _weigh(self, node: Node) -> None:
        """Decides whether memory is scaled, from what the node says about its own memory."""
        sentence = backing.verdict(self._cards.inventory.devices, self._cards.scaling, node)
        if sentence is None:
            return
        if sentence and sentence != self._flat:
            log.warning("node %s: %s", self._name, sentence)
            self._unbacked(sentence)
        self._flat = sentence
        self._cards.back(not sentence)

    def _recall(self, node: Node) -> None:
        """Cards that were unhealthy when an earlier agent published them stay unhealthy until they prove to work.

        Cards that do not answer are unhealthy, too: the agent cannot distinguish them from cards that were taken out.
        """
        try:
            before = decode_inventory(node.metadata.annotations.get(names.DEVICES, "{}"))
        except ValueError as error:
            log.warning("node %s: %s", self._name, error)
            return
        known = self._cards.by_uuid
        for gpu in before.devices:
            if not gpu.healthy and gpu.uuid in known and gpu.trouble != ABSENT:
                self._suspect(gpu.uuid, gpu.trouble)
        for gpu in self._cards.recall(before):
            sentence = f"card {gpu.uuid} ({gpu.model}), which an earlier agent published, is gone"
            log.warning("%s", sentence)
            self._gone(sentence)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake.clear()
            try:
                pause = PERIOD_SECONDS if self._assert() else _RETRY_SECONDS
                self._complaint = ""
            except ApiError as error:
                if str(error) != self._complaint:
                    log.warning("could not update node %s in the API server: %s; retrying", self._name, error)
                    self._complaint = str(error)
                pause = _RETRY_SECONDS
            except Exception as error:
                # Anybody may write to a node object. If this thread ended, the node would stay unchanged until a
                # restart.
                if str(error) != self._complaint:
                    log.exception("could not update node %s in the API server; retrying", self._name)
                    self._complaint = str(error)
                pause = _RETRY_SECONDS
            self._ending.wait(_SPACING_SECONDS)
            self._wake.wait(pause)

    def _assert(self) -> bool:
        """Writes the node; whether everything is written. False: the agent does not know yet what pods hold."""
        node = self._node
        if node is None:
            return True
        self._weigh(node)  # the cards may have changed since the node last changed
        meta = node.metadata
        repaired = meta.annotations.get(names.HEAL)
        if repaired is not None:
            self._repair(repaired, meta.resourceVersion)
        held = self._held()
        if held is None:
            inventory = unraised(self._cards.inventory, meta.annotations)
        else:
            self._cards.hold(held)
            inventory = self._cards.inventory
        # A card may have a hundred errors a second of several kinds: each write comes back here as a change.
        if not (_reworded(meta.annotations, inventory) and time.monotonic() - self._written < PERIOD_SECONDS):
            self._tell(node, inventory)
        conditions.put(self._client, self._name, node.status.conditions, contested(self._cards.rival))
        self._presence(meta.annotations)
        if self._flat is not None:
            conditions.put(self._client, self._name, node.status.conditions, backing.finding(self._flat))
        wanted = capacity(inventory.devices, self._cards.cordoned, held or {}, self._config)
        known = {name: parse_quantity(node.status.capacity[name]) for name in wanted if name in node.status.capacity}
        if not inventory.devices and not known:
            return True  # a node without cards
        if held is None:
            wanted = {name: value for name, value in wanted.items() if value > known.get(name, -1)}
        if any(value != known.get(name) for name, value in wanted.items()):
            writes.patch_node_capacity(self._client, self._name, {n: str(value) for n, value in wanted.items()})
            log.info("node %s: capacity %s", self._name, ", ".join(f"{n}={v}" for n, v in wanted.items()))
        return held is not None

    def _tell(self, node: Node, inventory: Inventory) -> None:
        """Writes the cards and their condition."""
        annotations, labels = marks(inventory)
        told = _differs(node.metadata.annotations, annotations) or _differs(node.metadata.labels, labels)
        if told:
            writes.patch_node(self._client, self._name, annotations=annotations, labels=labels)
            log.info("node %s: published %d cards", self._name, len(inventory.devices))
        if conditions.put(self._client, self._name, node.status.conditions, ailing(inventory)) or told:
            self._written = time.monotonic()

    def _repair(self, cards: str, version: str) -> None:
        """Heals the cards, and only then removes the mark.

        An agent that ends in between leaves the mark to the next agent.
        """
        if self._healed != version:
            self._heal(cardmarks.listed(cards))
            self._healed = version
        if self._unmarked != version:
            try:
                writes.patch_node(self._client, self._name, annotations={names.HEAL: None}, version=version)
            except ApiError as error:
                if error.status != 409:
                    raise
                log.debug("node %s has changed: reading its marks again", self._name)  # the watch delivers the new node
            self._unmarked = version


def published(client: KubeClient, node: str) -> Inventory:
    """What an earlier agent has published; empty also where this cannot be read. Raises ApiError."""
    try:
        found = msgspec.json.decode(client.get(f"/api/v1/nodes/{node}"), type=Node)
        return decode_inventory(found.metadata.annotations.get(names.DEVICES, "{}"))
    except ApiError as error:
        if error.status != 404:
            raise
        return Inventory()
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("node %s: %s", node, error)
        return Inventory()


def marks(inventory: Inventory) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """(annotations, labels) of a node; None: remove the key."""
    if not inventory.devices:
        return {names.DEVICES: None}, {names.LABEL_PRESENT: None}
    return {names.DEVICES: encode_inventory(inventory)}, {names.LABEL_PRESENT: "true"}


def unraised(inventory: Inventory, known: Mapping[str, str]) -> Inventory:
    """The cards with at most the memory that the annotations `known` say.

    Used while it is not known what pods hold behind the cards.
    """
    try:
        before = {gpu.uuid: gpu.memory for gpu in decode_inventory(known.get(names.DEVICES, "{}")).devices}
    except ValueError:
        return inventory
    devices = tuple(
        msgspec.structs.replace(gpu, memory=before[gpu.uuid], physical=gpu.physical_memory)
        if before.get(gpu.uuid, gpu.memory) < gpu.memory
        else gpu
        for gpu in inventory.devices
    )
    return msgspec.structs.replace(inventory, devices=devices)


def ailing(inventory: Inventory) -> Finding:
    """The condition that names the cards that do not work."""
    cards = [
        f"card {gpu.index} ({gpu.model}, {gpu.uuid}): {gpu.trouble}" for gpu in inventory.devices if not gpu.healthy
    ]
    known = {gpu.index for gpu in inventory.devices}
    cards += [f"card {index}: it does not answer the driver" for index in inventory.silent if index not in known]
    return Finding(names.CONDITION_UNHEALTHY, "; ".join(cards), "CardsUnhealthy", "CardsHealthy", "all cards work")


def contested(sentence: str) -> Finding:
    """The condition that reports another device plugin."""
    well = "no other device plugin serves this node's cards"
    return Finding(names.CONDITION_CONFLICT, sentence, "OtherDevicePlugin", "NoOtherDevicePlugin", well)


def capacity(
    cards: Iterable[Gpu], cordoned: frozenset[str], held: Mapping[str, Held], config: Config
) -> dict[str, int]:
    """Resource → MiB or %: everything of healthy cards without cordon, and what pods still hold on the other cards.

    The other cards include cards that `held` names and that do not exist any more: dead since a boot, or in MIG mode.

    Percentages and priorities are there for autoscalers: when a node lacks a resource, an autoscaler assumes that no
    pod that asks for this resource fits there. The kubelet counts these resources, too. So their capacity covers
    everything that cards can hold, healthy or not.
    """
    memory = cores = percentage = slots = 0
    left = dict(held)
    for gpu in cards:
        usable = gpu.healthy and gpu.uuid not in cordoned
        now = left.pop(gpu.uuid, Held())
        memory += max(now.mem, gpu.memory if usable else 0)
        cores += max(now.cores, gpu.cores if usable else 0)
        percentage += -(-100 * max(now.mem, gpu.memory) // max(gpu.physical_memory, 1))  # rounded up
        slots += gpu.slots
    memory += sum(gone.mem for gone in left.values())
    cores += sum(gone.cores for gone in left.values())
    split = config.device_plugin.deviceSplitCount
    return {
        names.RESOURCE_TOTAL_MEMORY: memory,
        names.RESOURCE_TOTAL_CORES: cores,
        config.resource_mem: memory,
        config.resource_cores: cores,
        config.resource_mem_percentage: percentage + 100 * split * len(left),
        config.resource_priority: names.PRIORITY_LOW * (slots + split * len(left)),
    }


def _reworded(known: Mapping[str, str], inventory: Inventory) -> bool:
    """Whether the only news is why cards are unhealthy, and how much memory others have."""
    try:
        before = decode_inventory(known.get(names.DEVICES, "{}"))
    except ValueError:
        return False
    return before != inventory and _silenced(before) == _silenced(inventory)


def _silenced(inventory: Inventory) -> Inventory:
    devices = tuple(msgspec.structs.replace(gpu, trouble="", others=0) for gpu in inventory.devices)
    return msgspec.structs.replace(inventory, devices=devices)


def _differs(known: Mapping[str, str], wanted: Mapping[str, str | None]) -> bool:
    return any(known.get(key) != value for key, value in wanted.items())
