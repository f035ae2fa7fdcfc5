"""The node's record says whether pods can start on this node, or whether the agent leaves.

The scheduler obeys this mark. A pod that is bound while the kubelet has no plugin fails for good: the kubelet admits
the pod once, and finds no healthy device. Source: k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/manager.go
"devicesToAllocate".

A pod that is bound while the kubelet has no plugin fails for good: the kubelet admits the pod once, and finds no
healthy device. Source: k8s.io/kubernetes v1.36.3, pkg/kubelet/cm/devicemanager/manager.go "devicesToAllocate".
"""

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from vgpu import names
from vgpu.kube import agentmark, writes
from vgpu.kube.client import ApiError, KubeClient

log = logging.getLogger(__name__)

_NEW, _SERVING, _LOST, _ENDING = "new", "serving", "lost", "ending"
STARTING: Final = "the kubelet has not accepted its ids yet"
_WHY: Final = {_NEW: STARTING, _LOST: "the kubelet has closed its connection", _ENDING: "it is shutting down"}


class Presence:
    """Thread-safe.

    `changed` is called when there is something to write; the publisher then writes the node's record.
    """

    def __init__(self, client: KubeClient, node: str, changed: Callable[[], None] = lambda: None) -> None:
        self._client = client
        self._node = node
        self.changed = changed
        self._lock = threading.Lock()  # one write after the other, so that the last mark is the one that stays
        self._mark = ""  # empty: this agent has written no mark yet, and the mark of an earlier agent stays
        self._state = _NEW

    @property
    def obstacle(self) -> str:
        """Why no pods can start now, as a part of a sentence; empty: pods can start."""
        return "" if self._state == _SERVING else _WHY[self._state]

    def serve(self) -> None:
        """The kubelet has our ids, so pods can start. The mark contains the time at which that began."""
        if self._state in (_NEW, _LOST):
            self._mark, self._state = agentmark.serving(datetime.now(UTC)), _SERVING
            self.changed()

    def lose(self) -> None:
        """The kubelet does not follow our ids any more.

        It would admit a pod that is bound now before it has our ids again.
        """
        if self._state == _SERVING:
            self._mark, self._state = agentmark.leaving(_WHY[_LOST]), _LOST
            self.changed()

    def leave(self, reason: str) -> bool:
        """Writes at once that this agent leaves; returns whether the API server has accepted this.

        Waits for the API server. False where no mark is needed: nothing that this agent has published lets the
        scheduler place a pod.
        """
        served = self._state != _NEW
        self._state = _ENDING
        if not served:
            return False
        self._mark = agentmark.leaving(reason)
        try:
            self.keep({})
        except ApiError as error:
            log.warning("could not announce on node %s that this agent leaves: %s", self._node, error)
            return False
        return True

    def keep(self, annotations: Mapping[str, str]) -> None:
        """Writes the mark where the node's annotations differ from it. Raises ApiError."""
        with self._lock:
            mark = self._mark
            if mark and annotations.get(names.AGENT) != mark:
                writes.patch_node(self._client, self._node, annotations={names.AGENT: mark})
                log.info("node %s: agent %s", self._node, mark)
