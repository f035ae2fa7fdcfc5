"""Which of the nodes in question can take a pod: all at once, one by one only where that does not decide."""

from collections.abc import Sequence
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
    """Made under the state's lock. `fits` is a mask over `nodes`; every other node has a sentence.

    `failed`: pods in the way, which an eviction could remove; `unresolvable`: not even an empty node would do.
    """

    def __init__(self, state: ClusterState, view: View, uid: str, pod: PodRequest, nodes: Sequence[str]) -> None:
        self.failed: dict[str, str] = {}
        self.unresolvable: dict[str, str] = {}
        self.reasons: set[Reason] = set()
        self._view, self._pod, self._nodes = view, pod, nodes
        self._policy = policy(pod.gpu_policy)
        asks = rules.asks(view.cards, pod)
        verdict = fleet.survey(view.cards, view.usage, asks, pod)
        rows = view.rows(nodes)
        known = rows >= 0
        self.fits = known.copy()
        self.fits[known] = verdict.fits[rows[known]]
        if not known.all():
            self._tell(self.unresolvable, np.flatnonzero(~known), [NO_CARDS])
        rest = np.flatnonzero(known & ~self.fits)
        if not len(rest):
            return
        look = verdict.open[rows[rest]]
        for index, asked in enumerate(asks):
            self._reject(index, asked, asks, rest[~look & (verdict.failed[rows[rest]] == index)], rows)
        for at in rest[look].tolist():
            self._look(state, uid, at)

    def _tell(
        self, where: dict[str, str], places: Ints, rejections: Sequence[Rejection], kinds: Ints | None = None
    ) -> None:
        """Writes down the rejection of each place (index in `nodes`): the one of its kind, or the only one."""
        nodes = [self._nodes[at] for at in places.tolist()]
        if kinds is None:
            where.update(dict.fromkeys(nodes, rejections[0].sentence))
        else:
            sentences = [each.sentence for each in rejections]
            where.update(zip(nodes, [sentences[at] for at in kinds.tolist()], strict=True))
        for each in rejections:
            self.reasons.update(each.reasons)

    def _reject(self, index: int, asked: Ask, asks: Sequence[Ask], places: Ints, rows: Ints) -> None:
        """Nodes (indices in `nodes`) on which this container finds no cards, even alone."""
        if not len(places):
            return
        part = rows[places]
        cards, usage, numa = self._view.cards, self._view.usage, self._pod.selector.numa_bind
        found, kind = fleet.rejections(cards, usage, asked, part, numa_bind=numa)
        if len(self._pod.containers) > 1:
            prefix = f"container {self._pod.containers[index].name}: "
            found = [Rejection(each.reasons, prefix + each.sentence) for each in found]
        lost = fleet.hopeless(cards, asks, self._pod)[part]
        for where, mask in ((self.failed, ~lost), (self.unresolvable, lost)):
            self._tell(where, places[mask], found, kind[mask])

    def _look(self, state: ClusterState, uid: str, at: int) -> None:
        """A node on which each container alone finds cards: do they all, together?"""
        cards = state.cards_of(self._nodes[at], without=uid) or []
        found = fit_pod(cards, self._pod, self._policy)
        if not isinstance(found, Rejection):
            self.fits[at] = True
            return
        empty = fit_pod([CardState(each.gpu, cordoned=each.cordoned) for each in cards], self._pod, self._policy)
        where = self.unresolvable if isinstance(empty, Rejection) else self.failed
        self._tell(where, np.array([at]), [found])
