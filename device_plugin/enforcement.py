"""Looks at the node's kubelet, container runtime and NVIDIA's settings again and again, and chooses the mode.

The mode is an annotation of the node. Where the settings let containers bypass the limits, the agent reports that as a
condition of the node, an event and a metric.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from device_plugin import conditions, modes
from device_plugin.conditions import Finding
from device_plugin.cri import Facts, Runtime
from device_plugin.modes import Mode, Toolkit
from vgpu import names
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.objects import Node

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 5.0


class Enforcement:
    """One thread. `current` is the mode for the next Allocate."""

    def __init__(
        self,
        configured: str,
        runtime: Runtime,
        host_root: Path,
        cdi_dir: Path,
        client: KubeClient,
        node: str,
        *,
        tell: Callable[[str, str], None],
        show: Callable[[bool], None],
        driver: Callable[[str], str] = lambda _: "",
    ) -> None:
        """`tell(reason, sentence)` makes an event about the node; `show(unsafe)` feeds the metric.

        `driver(strategy)` says why containers would have no driver; empty: they have a driver.
        """
        self._configured = configured
        self._runtime = runtime
        self._host_root = host_root
        self._cdi_dir = cdi_dir
        self._client = client
        self._node = node
        self._tell = tell
        self._show = show
        self._driver = driver
        self._told = ""
        self._driverless = ""
        self._complaint = ""
        self._known: Facts | None = None  # what the runtime reported last
        self._mode: Mode | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="enforcement", daemon=True)

    @property
    def current(self) -> Mode:
        """The mode; looks itself when there was no look yet."""
        return self._mode or self._look()[0]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._stopping.wait(PERIOD_SECONDS if self.once() else _RETRY_SECONDS)

    def once(self) -> bool:
        """One look, and everything that follows from it; False: the API server does not answer, so try again soon."""
        mode, sentence, node = self._look()
        self._show(bool(sentence))
        if sentence != self._told:
            if sentence:
                log.warning("%s", sentence)
                self._tell(names.CONDITION_UNENFORCED, sentence)
            else:
                log.info("the container runtime's settings are safe now")
            self._told = sentence
        driverless = self._driver(mode.strategy)
        if driverless and driverless != self._driverless:
            log.warning("%s", driverless)
            self._tell(names.CONDITION_DRIVERLESS, driverless)
        self._driverless = driverless
        if node is None:
            return False
        try:
            if node.metadata.annotations.get(names.MODE) != str(mode):
                writes.patch_node(self._client, self._node, annotations={names.MODE: str(mode)})
            conditions.put(self._client, self._node, node.status.conditions, _finding(sentence))
            conditions.put(self._client, self._node, node.status.conditions, _driver_finding(driverless))
        except ApiError as error:
            log.warning("could not write the mode and condition of node %s: %s; retrying", self._node, error)
            return False
        return True

    def _look(self) -> tuple[Mode, str, Node | None]:
        with self._lock:
            node = self._read_node()
            facts = self._facts() or _told_by(node)
            seen = modes.Node(node.status.nodeInfo.kubeletVersion if node else "", facts, self._toolkit(facts))
            mode = modes.choose(self._configured, seen, self._cdi_dir)
            if node is None and self._mode is not None:
                mode = self._mode  # a fact that is unknown now keeps its earlier value
            if mode != self._mode:
                log.info("cards reach containers by %s", mode)
                self._mode = mode
            return mode, modes.unsafe(seen), node

    def _facts(self) -> Facts | None:
        """The facts of the runtime.

        A runtime that exists but does not answer keeps its earlier facts: it is busy or restarts.
        """
        facts = self._runtime.facts()
        if facts is not None or self._runtime.socket is None:
            self._known = facts
        return self._known

    def _read_node(self) -> Node | None:
        try:
            return msgspec.json.decode(self._client.get(f"/api/v1/nodes/{self._node}"), type=Node)
        except ApiError as error:
            log.debug("cannot read node %s yet: %s", self._node, error)
            return None

    def _toolkit(self, facts: Facts) -> Toolkit | None:
        for file in modes.toolkit_files(facts):
            try:
                text = (self._host_root / file.lstrip("/")).read_text("utf-8")
            except OSError:
                continue
            try:
                found = modes.read_toolkit(text, file)
            except ValueError as error:
                self._complain(f"{file} is not valid TOML, so the agent uses the defaults: {error}")
                return Toolkit(file)
            self._complaint = ""
            return found
        return None

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            log.warning("%s", text)
            self._complaint = text


def _finding(sentence: str) -> Finding:
    return Finding(
        names.CONDITION_UNENFORCED,
        sentence,
        "UnsafeRuntimeSetting",
        "RuntimeSettingsSafe",
        "NVIDIA's container runtime shows containers only the cards that they were given",
    )


def _driver_finding(sentence: str) -> Finding:
    well = "the driver's libraries reach containers"
    return Finding(names.CONDITION_DRIVERLESS, sentence, "DriverLibrariesMissing", "DriverLibrariesFound", well)


def _told_by(node: Node | None) -> Facts:
    """Name and version of the runtime, as the kubelet wrote them into its node."""
    name, _, version = (node.status.nodeInfo.containerRuntimeVersion if node else "").partition("://")
    return Facts(name=name, version=version)
