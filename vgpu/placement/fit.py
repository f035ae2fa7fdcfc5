"""Chooses the cards of one node for a container or for a whole pod; pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from vgpu.allocation import Allocation, Kind
from vgpu.devices import GpuSlice
from vgpu.placement import Policy, rules
from vgpu.placement.cards import SLOTS, Bools, Cards, CardState, Ints, count
from vgpu.placement.rules import Ask, Reason, Rejection
from vgpu.resources import CardSelector, ContainerRequest, GpuRequest, PodRequest

__all__ = ["CardState", "Reason", "Rejection", "fit_container", "fit_pod"]

#: Choices that are tried for one pod on one node before it counts as not fitting. Needed only where several
#: containers compete for cards and the first choice of the policy leaves no room for the last container.
TRIES = 512


def fit_container(
    cards: Sequence[CardState],
    request: GpuRequest,
    selector: CardSelector,
    policy: Policy,
    *,
    oversubscribe: bool = True,
) -> list[GpuSlice] | Rejection:
    """Slices of `request.count` different cards, the policy's best first, or why not; `cards` in index order."""
    pod = PodRequest(
        (ContainerRequest("", Kind.APP, request),), selector=selector, oversubscribe=None if oversubscribe else False
    )
    found = fit_pod(cards, pod, policy)
    return found if isinstance(found, Rejection) else list(found.containers[""])


def fit_pod(cards: Sequence[CardState], pod: PodRequest, policy: Policy) -> Allocation | Rejection:
    """Slices for every container of a pod on one node, or why not; `cards` in index order.

    Containers may share cards. Init containers count by peak, as in vgpu.allocation.held: they never run together
    with the apps, so what they hold is free for these.
    """
    arrays, usage = Cards.of(cards)
    search = _Search(arrays, usage, pod, policy)
    chosen = search.run()
    if chosen is None:
        return search.rejection()
    return Allocation(
        {
            container.name: tuple(_slice(cards[at], container.gpu, asked, at) for at in places)
            for container, asked, places in zip(pod.containers, search.asks, chosen, strict=True)
        }
    )


def _slice(state: CardState, request: GpuRequest, asked: Ask, at: int) -> GpuSlice:
    memory, guarantee = int(asked.memory[at]), int(asked.guarantee[at])
    return GpuSlice(state.gpu.uuid, memory, request.cores, guarantee if guarantee < memory else None)


@dataclass(frozen=True, slots=True)
class _Beside:
    """Usage of the pod itself while it is placed, container by container (usage arrays)."""

    sidecars: Ints
    apps: Ints
    peak: Ints

    def now(self, kind: Kind) -> Ints:
        """What runs beside a container of this kind."""
        return self.sidecars + self.apps if kind is Kind.APP else self.sidecars

    def plus(self, kind: Kind, asked: Ask, chosen: Bools) -> "_Beside":
        """With one container more, on the chosen cards."""
        peak = np.maximum(self.peak, asked.added(self.now(kind), chosen))
        if kind is Kind.SIDECAR:
            return _Beside(asked.added(self.sidecars, chosen), self.apps, peak)
        if kind is Kind.APP:
            return _Beside(self.sidecars, asked.added(self.apps, chosen), peak)
        return _Beside(self.sidecars, self.apps, peak)


class _Search:
    """Depth first in the order of the spec: the first way down is the policy's own choice."""

    def __init__(self, cards: Cards, usage: Ints, pod: PodRequest, policy: Policy) -> None:
        self.cards, self.usage, self.pod, self.policy = cards, usage, pod, policy
        self.asks = rules.asks(cards, pod)
        self.tries = TRIES
        self.failed_at: tuple[int, Ints] | None = None  #: the container that first found no card, and the usage then

    def run(self) -> list[tuple[int, ...]] | None:
        """Places of each container's cards."""
        nothing = np.zeros_like(self.usage)
        return self._place(0, _Beside(nothing, nothing, nothing))

    def _place(self, at: int, beside: _Beside) -> list[tuple[int, ...]] | None:
        if at == len(self.pod.containers):
            return []
        kind, asked = self.pod.containers[at].kind, self.asks[at]
        own = beside.now(kind)
        usage = self.usage + own
        good = rules.eligible(self.cards, usage, asked)
        found = False
        for places in self._choices(good, usage, own, beside.peak, asked):
            found = True
            if self.tries == 0:
                return None
            self.tries -= 1
            chosen = np.zeros_like(good)
            chosen[list(places)] = True
            rest = self._place(at + 1, beside.plus(kind, asked, chosen))
            if rest is not None:
                return [places, *rest]
            if kind is Kind.INIT:
                return None  # it ends before the others start: another choice leaves them no more room
        if not found and self.failed_at is None:
            self.failed_at = at, usage
        return None

    def _choices(self, good: Bools, usage: Ints, own: Ints, peak: Ints, asked: Ask) -> Iterator[tuple[int, ...]]:
        """Sets of good cards, the best first; above all others, what the pod holds for an init container anyway."""
        paid = (peak[SLOTS] > 0) & (asked.added(own, self.cards.present) <= peak).all(axis=0)
        order = self.policy.card_order(self.cards, usage)
        ordered = [int(place) for place in order[np.argsort(~paid[order], kind="stable")] if good[place]]
        size = asked.request.count
        if not self.pod.selector.numa_bind:
            yield from combinations(ordered, size)
            return
        groups: dict[int, list[int]] = {}
        for place in ordered:
            groups.setdefault(int(self.cards.numa[place]), []).append(place)
        for group in groups.values():
            yield from combinations(group, size)

    def rejection(self) -> Rejection:
        if self.failed_at is None:  # the tries were used up on choices that never reached the end
            return Rejection({Reason.COUNT: len(self.cards.present)}, "no choice of cards was found for all containers")
        at, usage = self.failed_at
        found = explain(self.cards, usage, self.asks[at], numa_bind=self.pod.selector.numa_bind)
        if len(self.pod.containers) == 1:
            return found
        return Rejection(found.reasons, f"container {self.pod.containers[at].name}: {found.sentence}")


def explain(cards: Cards, usage: Ints, asked: Ask, *, numa_bind: bool) -> Rejection:
    """Why one node's cards (one dimension) do not take one container."""
    counted = {reason: int(count(bad)) for reason, bad in rules.judge(cards, usage, asked) if bad.any()}
    return rejection(counted, int(cards.present.sum()), asked.request, numa_bind=numa_bind)


def rejection(counted: Mapping[Reason, int], total: int, request: GpuRequest, *, numa_bind: bool) -> Rejection:
    """The sentence and the reasons of a node with `total` cards, of which those in `counted` break a rule."""
    text = rules.sentence(counted, total, request, numa_bind=numa_bind)
    if total < request.count:
        return Rejection({Reason.COUNT: total}, text)
    if total - sum(counted.values()) >= request.count:
        return Rejection({Reason.NUMA: total}, text)
    return Rejection(dict(counted), text)
