"""Which of the nodes in question can take a pod: all at once, one by one only where that does not decide."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from scheduler.cluster import ClusterState, View
from vgpu.placement import fleet, policy, rules
from vgpu.placement.cards import Bools, CardState, Ints
from vgpu.placement.fit import Reason, Rejection, fit_pod
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
        self._asks = rules.asks(view.cards, pod)
        self._rows = view.rows(nodes)
        verdict = fleet.survey(view.cards, view.left, self._asks, pod)
        known = self._rows >= 0
        rows = self._rows[known]
        self.fits = known.copy()
        self.fits[known] = verdict.fits[rows]
        if not known.all():
            self._tell(self.unresolvable, np.flatnonzero(~known), [NO_CARDS])
        if view.away:
            known &= ~self._tell_away(known)
        rest = np.flatnonzero(known & ~self.fits)
        if not len(rest):
            return
        rows = self._rows[rest]
        look, clash = verdict.open[rows], verdict.clash[rows]
        for index in range(len(self._asks)):
            self._reject(index, rest[~look & ~clash & (verdict.failed[rows] == index)])
        if clash.any():
            places = rest[clash]
            for index, part, found, kinds in fleet.clashes(view.cards, view.usage, self._asks, pod, self._rows[places]):
                self._divide(index, places[part], found, kinds)
        for at in rest[look].tolist():
            self._look(state, uid, at)

    def _tell(
        self, where: dict[str, str], places: Ints, rejections: Sequence[Rejection], kinds: Ints | None = None
    ) -> None:
        """Writes down the rejection of each place (index in `nodes`): the one of its kind, or the only one."""
        nodes = self._nodes
        if len(places) < len(nodes):
            nodes = [nodes[at] for at in places.tolist()]
        sentences = [each.sentence for each in rejections]
        if len(sentences) == 1 or kinds is None:
            where.update(dict.fromkeys(nodes, sentences[0]))
        else:
            where.update(zip(nodes, map(sentences.__getitem__, kinds.tolist()), strict=True))
        for each in rejections:
            self.reasons.update(each.reasons)

    def _tell_away(self, known: Bools) -> Bools:
        """Leaves out the nodes whose agents can start no pods; an eviction would not change that."""
        view = self._view
        away = np.zeros(len(view.row_of), dtype=np.bool_)
        away[[view.row_of[name] for name in view.away if name in view.row_of]] = True
        out = np.zeros_like(known)
        out[known] = away[self._rows[known]]
        self.fits &= ~out
        for at in np.flatnonzero(out).tolist():
            self.unresolvable[self._nodes[at]] = view.away[self._nodes[at]]
        return out

    def _reject(self, index: int, places: Ints) -> None:
        """Nodes (indices in `nodes`) on which this container finds no cards, even alone."""
        if len(places):
            view, numa = self._view, self._pod.selector.numa_bind
            found = fleet.rejections(view.cards, view.usage, self._asks[index], self._rows[places], numa_bind=numa)
            self._divide(index, places, *found)

    def _divide(self, index: int, places: Ints, found: list[Rejection], kinds: Ints) -> None:
        """Tells why this container finds no cards, and whether an eviction could help."""
        if len(self._pod.containers) > 1:
            prefix = f"container {self._pod.containers[index].name}: "
            found = [Rejection(each.reasons, prefix + each.sentence) for each in found]
        lost = self._hopeless(self._rows[places])
        for where, mask in ((self.failed, ~lost), (self.unresolvable, lost)):
            if mask.all():
                self._tell(where, places, found, kinds)
            elif mask.any():
                self._tell(where, places[mask], found, kinds[mask])

    def _hopeless(self, rows: Ints) -> Bools:
        """One node of each kind tells for all, unless the pod names UUIDs."""
        view, selector = self._view, self._pod.selector
        if selector.use_uuids or selector.nouse_uuids:
            return fleet.hopeless(view.cards, self._asks, self._pod, rows)
        kinds = view.kinds[rows]
        one = np.full(int(kinds.max()) + 1, -1, dtype=np.int64)
        one[kinds] = rows
        present = np.flatnonzero(one >= 0)
        lost = np.zeros(len(one), dtype=np.bool_)
        lost[present] = fleet.hopeless(view.cards, self._asks, self._pod, one[present])
        return np.asarray(lost[kinds], dtype=np.bool_)

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
