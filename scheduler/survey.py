"""Decides which of the nodes in question can take a pod.

The survey judges all nodes at once, and single nodes only where that is not enough.
"""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from scheduler.cluster import ClusterState, rows_of
from vgpu.placement import fleet, policy, rules
from vgpu.placement.cards import Bools, Ints
from vgpu.placement.fit import Reason, Rejection, fit_pod
from vgpu.resources import PodRequest

NO_CARDS: Final = Rejection({Reason.COUNT: 0}, "the node has no cards")


#: Seconds of one filter for nodes that must be checked one by one. Undecided nodes are left out then: a pod must not
#: delay other pods, nor exceed the time-out of kube-scheduler
SEARCH_SECONDS: Final = 0.3


class Survey:
    """`fits` is a mask over `nodes`; every other node has a sentence. `mark`: the moment at which this was true.

    `failed`: pods are in the way, and an eviction could remove them; `unresolvable`: not even an empty node would do,
    or that is not known. For a pod of one container, whose answer takes a millisecond, the survey holds the state's
    lock. For other pods it holds the lock only while it copies the arrays.
    """

    def __init__(self, state: ClusterState, uid: str, pod: PodRequest, nodes: Sequence[str]) -> None:
        self.failed: dict[str, str] = {}
        self.unresolvable: dict[str, str] = {}
        self.reasons: set[Reason] = set()
        self._state, self._uid, self._pod, self._nodes = state, uid, pod, nodes
        self._policy = policy(pod.gpu_policy)
        row_of = state.row_of()
        self._rows = rows_of(row_of, nodes)
        with state.lock:
            self._view, self.mark = state.view(without=uid), state.mark()
            if self._view.row_of is not row_of:  # a node came or went
                self._rows = self._view.rows(nodes)
            self._asks = rules.asks(self._view.cards, pod)
            if len(pod.containers) == 1:
                self._judge()
                return
            self._view = self._view.copy()
        self._judge()

    def _judge(self) -> None:
        view, pod = self._view, self._pod
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
        if look.any():
            self._look(rest[look])

    def _tell(
        self, where: dict[str, str], places: Ints, rejections: Sequence[Rejection], kinds: Ints | None = None
    ) -> None:
        """Records the rejection of each place (index in `nodes`): the rejection of its kind, or the only one."""
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
        """Removes the nodes whose agents can start no pods; an eviction would not change that."""
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
        """Rejects nodes (indices in `nodes`) on which this container finds no cards, even alone."""
        if len(places):
            view, numa = self._view, self._pod.selector.numa_bind
            found = fleet.rejections(view.cards, view.usage, self._asks[index], self._rows[places], numa_bind=numa)
            self._divide(index, places, *found)

    def _divide(self, index: int, places: Ints, found: list[Rejection], kinds: Ints) -> None:
        """Records why this container finds no cards, and whether an eviction could help."""
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
        """Judges one node of each kind for all nodes of the kind, unless the pod names UUIDs."""
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

    def _look(self, places: Ints) -> None:
        """On nodes where each container alone finds cards: checks whether all find cards together.

        One node of each kind answers for all nodes of the kind.
        """
        view, until = self._view, time.monotonic() + SEARCH_SECONDS
        rows = self._rows[places]
        numa = view.cards.numa.T if self._pod.selector.numa_bind else None
        kinds = fleet.alike(view.left, self._asks, rows, numa)
        lost = self._hopeless(rows)
        order = np.argsort(kinds, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)
        groups.sort(key=len, reverse=True)  # largest groups first: they decide most nodes
        for number, group in enumerate(groups):
            name = self._nodes[places[group[0]]]
            found = fit_pod(self._state.cards_of(name, without=self._uid) or [], self._pod, self._policy, until=until)
            if not isinstance(found, Rejection):
                self.fits[places[group]] = True
            elif Reason.UNDECIDED in found.reasons:
                late = time.monotonic() > until
                self._tell(self.unresolvable, places[np.concatenate(groups[number:]) if late else group], [found])
                if late:
                    return
            else:
                for where, mask in ((self.failed, ~lost[group]), (self.unresolvable, lost[group])):
                    if mask.any():
                        self._tell(where, places[group[mask]], [found])
