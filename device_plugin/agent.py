"""Combines the parts of the agent: threads that follow and publish, and the plugin in the event loop."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from device_plugin import driver
from device_plugin.arbiter import Arbitration
from device_plugin.cards import Cards
from device_plugin.cri import Runtime, sockets
from device_plugin.discovery import Census
from device_plugin.enforcement import Enforcement
from device_plugin.exporter import Exporter
from device_plugin.foreign import Observer
from device_plugin.granting import Granting, Places
from device_plugin.health import CENSUS_SECONDS, Health
from device_plugin.holdings import Holdings
from device_plugin.identity import Identity
from device_plugin.lending import Lending
from device_plugin.plugin import Plugin
from device_plugin.pod_events import Consequences
from device_plugin.pods import Pods
from device_plugin.presence import STARTING, Presence
from device_plugin.publish import Publisher, published
from device_plugin.readiness import KUBELET
from device_plugin.registration import Registration
from device_plugin.sandbox import Sandboxes
from device_plugin.selinux import Labels
from device_plugin.starts import Starts
from device_plugin.sweep import Sweep
from device_plugin.watch import Watch
from vgpu import config as configuration
from vgpu import inventory, names, tier
from vgpu.config import Config
from vgpu.devices import Inventory
from vgpu.kube.client import ApiError, KubeClient
from vgpu.native import paths

log = logging.getLogger(__name__)

#: between two looks on a node without a driver, where a driver may be installed later
LOOK_FOR_CARDS_SECONDS: Final = 30.0
ASK_SECONDS: Final = 2.0  #: the same where the API server does not say whether there were cards
LEAVE_SECONDS: Final = 1.5  #: time for the API server to accept that this agent leaves
#: time after that for the scheduler to read it, and for the kubelet to admit pods that were bound before
SEEN_SECONDS: Final = 1.0
#: time for the API server to return what an earlier agent has published; then the agent goes on without it
RECALL_SECONDS: Final = 3.0


class Options(msgspec.Struct, frozen=True):
    node: str
    run_dir: Path
    cdi_dir: Path
    host_root: Path
    metrics_port: int
    health_port: int


class Agent:
    """The agent of one node. It holds nothing that a restart would lose."""

    def __init__(self, config: Config, options: Options, client: KubeClient) -> None:
        self._config = configuration.for_node(config, options.node)
        self._options = options
        self._client = client
        self._exporter = Exporter(options.node)
        self._presence: Presence | None = None
        # the question to the driver for its cards, still without an answer
        self._asking: asyncio.Future[Inventory] | None = None

    async def run(self) -> None:
        """Runs until cancelled. On a node that has no cards and had none before, waits for a driver with cards."""
        self._exporter.serve(self._options.metrics_port, self._options.health_port, lambda: self._obstacle)
        if self._config.simulate:
            inventory.use_simulator(self._config.simulate, self._simulator_state)
        census = Census(self._config, self._options.run_dir, self._driver)
        readiness = self._exporter.readiness
        cards = Cards(await self._cards(census), tier.wanted(self._config))
        readiness.found_cards()
        self._exporter.expect()
        settings = self._config.device_plugin
        kubelet = Path(settings.kubeletRoot)
        places = Places(
            cdi=self._options.cdi_dir,
            library=Path(self._config.global_.gpu_hook_path) / "vgpu",
            built_library=paths.libvgpu(),
            built_simulator=paths.simulator() if self._config.simulate else None,
            simulator_state=self._simulator_state if self._config.simulate else None,
            driver_at=self._driver,
        )
        pods = Pods(self._client, self._options.node)
        runtime = Runtime(sockets(self._options.host_root, settings.runtimeSocket))
        identity = Identity(kubelet, self._config.resource_name, runtime)
        labels = Labels(self._options.host_root)
        sandboxes = Sandboxes(self._options.run_dir, labels)
        holdings = Holdings(pods, sandboxes)
        consequences = Consequences(self._client, self._options.node)
        enforcement = Enforcement(
            settings.deviceListStrategy,
            runtime,
            self._options.host_root,
            self._options.cdi_dir,
            self._client,
            self._options.node,
            tell=consequences.node,
            show=self._exporter.show_unsafe,
            driver=lambda strategy: "" if self._config.simulate else driver.shortage(self._driver, strategy),
        )
        evict = settings.backstop == "evict"
        watch = Watch(
            *(cards, pods, consequences),
            evict=evict,
            look=Observer().look,
            strangers=holdings.strangers,
            end_bypass=settings.bypass == "evict",
        )
        lending = Lending(cards, sandboxes, holdings, watch)
        granting = Granting(self._config, cards, sandboxes, holdings, places, consequences, labels, lending)
        starts = Starts(self._config, cards, pods, identity, granting, consequences, mode=lambda: enforcement.current)
        presence = Presence(self._client, self._options.node)
        plugin = Plugin(cards, starts, self._exporter.observe, taken=presence.serve, lost=presence.lose)
        health = Health(
            cards,
            consequences.node,
            ignored=settings.ignoredXids,
            recovery_seconds=settings.recoverySeconds,
            count=lambda uuid, xid: self._exporter.count_xid(cards.by_uuid.get(uuid), xid),
            census=census.take,
        )
        publisher = Publisher(
            self._client,
            self._options.node,
            self._config,
            cards,
            lambda: holdings.held() if pods.synced else None,
            suspect=health.suspect,
            gone=lambda sentence: consequences.node(names.CONDITION_UNHEALTHY, sentence),
            heal=health.heal,
            unbacked=lambda sentence: consequences.node(names.CONDITION_UNBACKED, sentence),
            presence=presence.keep,
        )
        presence.changed = publisher.wake
        self._presence = presence
        sweep = Sweep(
            cards,
            pods,
            sandboxes,
            holdings,
            identity,
            self._exporter,
            places=places,
            current=lambda: granting.rollout.sources(),
            watch=watch,
            lending=lending,
            hangs=lambda: self._asking is not None and not self._asking.done(),
        )

        def contested(sentence: str) -> None:
            cards.contested(sentence)
            self._exporter.show_conflict(bool(sentence))
            if sentence:
                consequences.node(names.CONDITION_CONFLICT, sentence)

        registration = Registration(
            kubelet / "device-plugins",
            self._config.resource_name,
            plugin,
            cards,
            tell=contested,
            registered=lambda: readiness.done(KUBELET),
        )
        for part in (pods, publisher, health, sweep, enforcement, Arbitration(sandboxes)):
            part.start()
        try:
            # A card that was unhealthy must not be offered, not even for a moment.
            await asyncio.to_thread(publisher.recalled.wait, RECALL_SECONDS)
            await registration.run()
        finally:
            plugin.stop()
            consequences.stop()

    async def leave(self) -> None:
        """Reports that this agent leaves, and serves until the scheduler can have read it.

        After that, no pod is bound here. Takes LEAVE_SECONDS and SEEN_SECONDS at most.
        """
        if self._presence is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                if not await asyncio.to_thread(self._presence.leave, "it is shutting down"):
                    return
        await asyncio.sleep(SEEN_SECONDS)

    @property
    def _obstacle(self) -> str:
        return STARTING if self._presence is None else self._presence.obstacle

    @property
    def _driver(self) -> driver.Place:
        return driver.Place(self._options.host_root, self._config.device_plugin.driverRoot)

    @property
    def _simulator_state(self) -> Path:
        return self._options.run_dir / "simulator"

    async def _cards(self, census: Census) -> Inventory:
        """Waits for the first cards, or for the API server's answer that there were some.

        In the second case, the cards are silent.
        """
        complaint = ""
        # the API server has answered that there were none; only an agent of this node could change that
        none_before = False
        while True:
            try:
                if self._asking is None:
                    self._asking = asyncio.ensure_future(asyncio.to_thread(census.take))
                    await asyncio.wait((self._asking,), timeout=CENSUS_SECONDS)
                if (
                    not self._asking.done()
                ):  # a thread that is stuck in the kernel is left to itself, and no second one sent
                    raise inventory.InventoryError("the driver hangs")
                done, self._asking = self._asking, None
                found = done.result()
            except inventory.InventoryError as error:
                found, reason = Inventory(), str(error)
            else:
                if found.devices:
                    for gpu in found.devices:
                        log.info("card %d: %s, %d MiB, %s", gpu.index, gpu.model, gpu.physical_memory, gpu.uuid)
                    return found
                reason = (
                    "all cards are in MIG mode, which vgpu does not share" if found.mig else "the driver lists no cards"
                )
            pause = LOOK_FOR_CARDS_SECONDS
            try:
                before = Inventory()
                if not none_before:
                    before = await asyncio.to_thread(published, self._client, self._options.node)
            except ApiError as error:
                pause, reason = ASK_SECONDS, f"{reason}; {error}"
            else:
                if before.devices:
                    log.warning("%s; an earlier agent published %d cards", reason, len(before.devices))
                    silent = tuple(gpu.index for gpu in before.devices if gpu.uuid not in found.mig)
                    return msgspec.structs.replace(found, silent=silent)
                none_before = True
                self._exporter.readiness.idle()
                if self._asking is None:
                    self._exporter.idle()
            if reason != complaint:
                log.log(logging.WARNING if self._asking else logging.INFO, "idle: %s", reason)
                complaint = reason
            await asyncio.sleep(pause)
