"""Moves records to the cards that pods were given.

Where cards come by mounts, the kubelet's ids decide, and the kubelet may choose other cards than the record says. The
agent asks for the move in the record (`moving`). The scheduler makes the move, because only the scheduler knows which
pods it is about to bind.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final

from scheduler.cluster import Claim, ClusterState
from vgpu import allocation, names
from vgpu.allocation import Allocation
from vgpu.kube import writes
from vgpu.kube.client import ApiError, KubeClient, Unreachable
from vgpu.placement.moves import Mover, steps

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.5  #: between two looks, while pods wait for room


class Moves:
    """One thread that moves records.

    Each write names the version of the pod that it changes, so that no write takes effect twice or late.
    """

    def __init__(self, client: KubeClient, state: ClusterState, leads: Callable[[], bool]) -> None:
        """`leads`: whether this replica places pods now with a complete state; it may raise ApiError."""
        self._client = client
        self._state = state
        self._leads = leads
        # uid → (version of the pod that the write changes, new record)
        self._sent: dict[str, tuple[str, Allocation]] = {}
        self._unsure: set[str] = set()  # uids of pods whose writes had no answer
        self._complaint = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moves", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._state.claimed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        waiting = False
        while True:
            self._state.claimed.wait(PERIOD_SECONDS if waiting else None)
            if self._stopping.is_set():
                return
            self._state.claimed.clear()
            try:
                waiting = self.once()
            except Exception:  # without this thread, pods would wait for ever
                log.exception("cannot move records now; trying again")
                waiting = True

    def once(self) -> bool:
        """Writes the moves that are possible now; returns whether pods still wait."""
        if not self._state.claims():
            self._sent.clear()
            self._unsure.clear()
            return False
        try:
            leads = self._leads()
        except ApiError as error:
            self._complain(f"cannot move the records of waiting pods: {error}")
            return True
        for claim, uid, record in self._next() if leads else ():
            self._write(uid, claim, record)
        return True

    def _complain(self, sentence: str) -> None:
        """Logs the sentence once, even if the same trouble repeats."""
        if sentence != self._complaint:
            log.warning("%s", sentence)
            self._complaint = sentence

    def _next(self) -> list[tuple[Claim, str, Allocation]]:
        """Chooses the next moves.

        Holds the lock of the binds, so that a bind and a move never get the same room.
        """
        found: list[tuple[Claim, str, Allocation]] = []
        with self._state.lock:
            nodes = self._state.claims()
            versions = {uid: one.claim.version for pods in nodes.values() for uid, one in pods.items() if one.claim}
            self._sent = {uid: sent for uid, sent in self._sent.items() if versions.get(uid) == sent[0]}
            self._unsure &= self._sent.keys()
            for node, pods in nodes.items():
                claims = {uid: one.claim for uid, one in pods.items() if one.claim is not None}
                movers = [
                    Mover(uid, claim.now, claim.then, pods[uid].held, not _stays(claim), uid in self._sent)
                    for uid, claim in claims.items()
                ]
                cards = self._state.cards_of(node) or []
                todo = steps({one.gpu.uuid: one.gpu for one in cards}, {c.gpu.uuid: c.held for c in cards}, movers)
                found += [(claims[uid], uid, claims[uid].record.moved()) for uid in todo.there]
                if todo.aside:
                    found.append((claims[todo.aside], todo.aside, claims[todo.aside].record.leaving()))
                found += [(claims[uid], uid, self._sent[uid][1]) for uid in claims if uid in self._unsure]
            self._sent |= {uid: (claim.version, record) for claim, uid, record in found}
        return found

    def _write(self, uid: str, claim: Claim, record: Allocation) -> None:
        text = allocation.encode(record)
        change = {"annotations": {names.ALLOCATION: text}, "resourceVersion": claim.version}
        self._unsure.discard(uid)
        try:
            writes.patch_pod(self._client, claim.namespace, claim.name, change, uid=uid, by_status=True)
        except ApiError as error:
            if isinstance(error, Unreachable) or error.status >= 500:
                self._unsure.add(uid)
            elif error.status not in (404, 409):  # else the watch brings the change
                del self._sent[uid]
                self._complain(f"cannot move the record of pod {claim.namespace}/{claim.name}: {error}")
            return
        log.info("moved the record of pod %s/%s to the cards of its device ids: %s", claim.namespace, claim.name, text)


def _stays(claim: Claim) -> bool:
    """Whether containers that move still hold something on their old cards."""
    return any(name in claim.record.containers for name in claim.record.moving)
