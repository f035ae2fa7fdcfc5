"""Which of the nodes in question can take a pod: all at once, one by one only where that does not decide."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from scheduler.cluster import ClusterState, View
from vgpu.placement import fleet, policy, rules
from vgpu.placement.cards import CardState, Ints
from vgpu.placement.fit import Reason, Rejection, fit_pod
from vgpu.placement.rules import Ask
from vgpu.resources import PodRequest

NO_CARDS: Final = Rejection({Reason.COUNT: 0}, "the node has no cards")


class Survey:
    """Made under the state's lock. `fits` is a mask over `nodes`; every other node has a rejection.

    `failed`: pods in the way, which an eviction could remove; `unresolvable`: not even an empty node would do.
    """

    def __init__(self, state: ClusterState, view: View, uid: str, pod: PodRequest, nodes: Sequence[str]) -> None:
        self.failed: dict[str, Rejection] = {}
        self.unresolvable: dict[str, Rejection] = {}
        self._view, self._pod, self._nodes = view, pod, nodes
        self._policy = policy(pod.gpu_policy)
        asks = rules.asks(view.cards, pod)
        verdict = fleet.survey(view.cards, view.usage, asks, pod, self._policy)
        rows = view.rows(nodes)
        known = rows >= 0
        self.fits = known.copy()
        self.fits[known] = verdict.fits[rows[known]]
        for at in np.flatnonzero(~known).tolist():
            self.unresolvable[nodes[at]] = NO_CARDS
        rest = np.flatnonzero(known & ~self.fits)
        if not len(rest):
            return
        look = verdict.open[rows[rest]]
        for index, asked in enumerate(asks):
            self._reject(index, asked, asks, rest[~look & (verdict.failed[rows[rest]] == index)], rows)
        for at in rest[look].tolist():
            self._look(state, uid, at)

    def _reject(self, index: int, asked: Ask, asks: Sequence[Ask], places: Ints, rows: Ints) -> None:
        """Nodes (indices in `nodes`) on which this container finds no cards, even alone."""
        if not len(places):
            return
        part = rows[places]
        cards = self._view.cards.take(part)
        numa = self._pod.selector.numa_bind
        found = fleet.rejections(cards, self._view.usage[:, part], asked.take(part), numa_bind=numa)
        hopeless = fleet.hopeless(cards, [each.take(part) for each in asks], self._pod, self._policy)
        several = len(self._pod.containers) > 1
        named: dict[int, Rejection] = {}
        for at, rejected, lost in zip(places.tolist(), found, hopeless.tolist(), strict=True):
            shown = rejected
            if several:
                shown = named.get(id(rejected)) or self._named(index, rejected)
                named[id(rejected)] = shown
            (self.unresolvable if lost else self.failed)[self._nodes[at]] = shown

    def _named(self, index: int, rejected: Rejection) -> Rejection:
        return Rejection(rejected.reasons, f"container {self._pod.containers[index].name}: {rejected.sentence}")

    def _look(self, state: ClusterState, uid: str, at: int) -> None:
        """A node on which each container alone finds cards: do they all, together?"""
        node = self._nodes[at]
        cards = state.cards_of(node, without=uid) or []
        found = fit_pod(cards, self._pod, self._policy)
        if not isinstance(found, Rejection):
            self.fits[at] = True
            return
        empty = fit_pod([CardState(each.gpu, cordoned=each.cordoned) for each in cards], self._pod, self._policy)
        (self.unresolvable if isinstance(empty, Rejection) else self.failed)[node] = found

    def rejections(self) -> Iterator[Rejection]:
        yield from self.failed.values()
        yield from self.unresolvable.values()
