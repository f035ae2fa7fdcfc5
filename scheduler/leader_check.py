"""Catches up with the API server when another replica may have bound pods that this replica has not seen.

kube-scheduler calls only while it leads, so every change of the leader comes with a pause of the calls. After a pause,
the Lease of kube-scheduler tells whether another replica has led meanwhile, or leads now: a replica that was frozen
sends late calls.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from vgpu.kube.client import ApiError, KubeClient
from vgpu.kube.objects import RawObject

log = logging.getLogger(__name__)

#: Seconds without a call after which another replica may have led. Less than the time in which one kube-scheduler ends,
#: another one leads, and this one starts again
IDLE_SECONDS: Final = 1.0


class Behind(Exception):
    """The state may lack what another replica did; the text says why, and kube-scheduler tries again."""


def term_in(client: KubeClient, namespace: str, name: str, *, seconds: float = 10) -> Callable[[], str]:
    """Returns a function that reads the term of the current leader (a consistent read); the function raises ApiError.

    The term is empty where no replica leads; `seconds`: time-out of the read. Source: client-go leaderelection.go: a
    replica that acquires a Lease counts leaseTransitions up.
    """
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"

    def read() -> str:
        try:
            spec = msgspec.json.decode(client.request("GET", path, timeout=seconds), type=RawObject).spec
        except ApiError as error:
            if error.status != 404:
                raise
            return ""
        holder = spec.get("holderIdentity")
        return f"{holder} {spec.get('leaseTransitions', 0)}" if holder else ""

    return read


def held_here(term: str) -> bool:
    """Whether the leader of this term runs in the same pod.

    Source: kubernetes cmd/kube-scheduler/app/options: the identity is HOSTNAME_UUID.
    """
    return term.startswith(f"{socket.gethostname()}_")


class Fence:
    """Lets a call pass once the state is known to be complete; `catch_up` completes it or raises ApiError.

    `term` returns the leader's term (see term_in). Where the term is empty, it is unknown, and every pause may be a
    change.
    """

    def __init__(
        self,
        catch_up: Callable[[], None],
        term: Callable[[], str],
        idle_seconds: float = IDLE_SECONDS,
        own: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`own`: whether the leader of a term is the kube-scheduler in this replica's pod."""
        self._own = own
        self._catch_up = catch_up
        self._read_term = term
        self._idle = idle_seconds
        self._lock = threading.Lock()
        self._term = ""  #: the term in which the state was complete
        self._round = 0  #: how often the state was completed
        self._last = float("-inf")  #: monotonic seconds of the last call that passed

    def leads(self) -> bool:
        """Whether this replica places pods now, with a complete state; raises ApiError."""
        with self._lock:
            term = self._read_term()
            if not term or not self._own(term):
                return False
            if term != self._term:
                self._catch_up()
                self._round += 1
                self._term = term
            return True

    def pass_(self) -> int:
        """Waits for the state to be complete where that is in doubt; raises Behind when that is not possible now.

        Returns a number that changes with each catch-up: after a change, cards that were chosen before may be taken.
        """
        begin = time.monotonic()
        if begin - self._last < self._idle:
            self._last = begin
            return self._round
        with self._lock:  # the first of several calls catches up for all
            if time.monotonic() - self._last >= self._idle:
                try:
                    term = self._read_term()  # read first: a replica that leads from now on binds after this read
                    if term and not self._own(term):
                        raise Behind("another replica leads")
                    if not term or term != self._term:
                        self._catch_up()
                        self._round += 1
                        log.info("caught up with the API server in %.3f s", time.monotonic() - begin)
                    self._term = term
                except ApiError as error:
                    raise Behind(f"cannot read the changes of other replicas: {error}") from None
            self._last = time.monotonic()
            return self._round
