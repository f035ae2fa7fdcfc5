"""Chooses the cards of one node for a container or for a whole pod; pure."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import inf

import msgspec
import numpy as np

from vgpu.allocation import Allocation, Kind
from vgpu.devices import GpuSlice
from vgpu.placement import Policy, bound, room, rules
from vgpu.placement.cards import SLOTS, Bools, Cards, CardState, Ints, count
from vgpu.placement.room import Want
from vgpu.placement.rules import Ask, Reason, Rejection
from vgpu.resources import CardSelector, ContainerRequest, GpuRequest, PodRequest

__all__ = ["CardState", "Reason", "Rejection", "fit_container", "fit_pod"]

#: Number of choices that are tried for one pod on one node before the pod counts as not fitting. More than one choice
#: is needed only where several containers compete for cards and the policy's first choice leaves no room for the last
#: container. A choice that leaves the same room as a failed one does not count
TRIES = 512
ALIKE = 8 * TRIES  #: limit for the choices that do not count
UNDECIDED = (
    "not decided: the containers of the pod allow more combinations of cards than the search tries;"
    " ask for fewer cards, or for equal amounts in all containers"
)


def fit_container(
    cards: Sequence[CardState],
    request: GpuRequest,
    selector: CardSelector,
    policy: Policy,
    *,
    oversubscribe: bool = True,
) -> list[GpuSlice] | Rejection:
    """Slices of `request.count` different cards, or why not; both in index order."""
    pod = PodRequest(
        (ContainerRequest("", Kind.APP, request),), selector=selector, oversubscribe=None if oversubscribe else False
    )
    found = fit_pod(cards, pod, policy)
    return found if isinstance(found, Rejection) else list(found.containers[""])


def fit_pod(
    cards: Sequence[CardState], pod: PodRequest, policy: Policy, *, until: float = inf
) -> Allocation | Rejection:
    """Slices for every container of a pod on one node, or why not; `cards` in index order.

    The slices of a container are in index order as well: CUDA and NVML count a container's cards in this order, and the
    numbers in the names of its limits must mean the same cards.

    `until`: monotonic seconds at which the search ends. A search that ends early, or that tries TRIES choices without
    success, returns a rejection with Reason.UNDECIDED.

    Containers may share cards. Init containers count by peak, as in vgpu.allocation.held: they never run together with
    the apps, so the apps may use what they hold.
    """
    arrays, usage = Cards.of(cards)
    ways: list[tuple[PodRequest, Policy | None]]
    if len(pod.containers) == 1:
        ways = [(pod, policy)]
    else:  # the last two ways begin with the choices that `fleet` checks
        ways = [(each, how) for how in (policy, None) for each in (pod, largest_first(pod))]
    first: Rejection | None = None
    for asked, how in ways:
        search = _Search(arrays, usage, asked, how, until)
        chosen = search.run()
        if chosen is not None:
            found = {
                container.name: tuple(_slice(cards[at], container.gpu, ask, at) for at in sorted(places))
                for container, ask, places in zip(asked.containers, search.asks, chosen, strict=True)
            }
            return Allocation({container.name: found[container.name] for container in pod.containers})
        first = first or search.rejection()
        if not search.gave_up:
            return search.rejection()
    assert first is not None  # there is at least one way
    return first


def largest_first(pod: PodRequest) -> PodRequest:
    """The same pod with its apps in another order: the app that is hardest to place comes first.

    The order may change, because all apps run at once.
    """
    apps = [each for each in pod.containers if each.kind is Kind.APP]
    others = [each for each in pod.containers if each.kind is not Kind.APP]
    apps.sort(key=lambda each: (each.gpu.count, each.gpu.cores == 100, _size(each.gpu)), reverse=True)
    return msgspec.structs.replace(pod, containers=(*others, *apps))


def _size(request: GpuRequest) -> tuple[int, int, int]:
    return (request.memory, request.percent if not request.memory else 0, request.cores)


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
        """What runs at the same time as a container of this kind."""
        return self.sidecars + self.apps if kind is Kind.APP else self.sidecars

    def plus(self, kind: Kind, asked: Ask, chosen: Bools) -> "_Beside":
        """The usage with one more container, on the chosen cards."""
        peak = np.maximum(self.peak, asked.added(self.now(kind), chosen))
        if kind is Kind.SIDECAR:
            return _Beside(asked.added(self.sidecars, chosen), self.apps, peak)
        if kind is Kind.APP:
            return _Beside(self.sidecars, asked.added(self.apps, chosen), peak)
        return _Beside(self.sidecars, self.apps, peak)


class _Search:
    """Depth-first search in the order of the spec: the first path is the policy's own choice."""

    def __init__(self, cards: Cards, usage: Ints, pod: PodRequest, policy: Policy | None, until: float) -> None:
        # Without a policy: cards in the order of their index.
        self.cards, self.usage, self.pod, self.policy, self.until = cards, usage, pod, policy, until
        self.asks = rules.asks(cards, pod)
        self.wants = {id(asked): Want.of(asked) for asked in self.asks}
        self.kinds = [container.kind for container in pod.containers]
        self.tries, self.alike, self.gave_up = TRIES, ALIKE, False
        self.failed: set[tuple[object, ...]] = set()  #: (containers left, room) for which no choice works
        #: the container that first found no card, and the usage at that time
        self.failed_at: tuple[int, Ints] | None = None

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
            if self._gives_up():
                return None
            chosen = np.zeros_like(good)
            chosen[list(places)] = True
            then = beside.plus(kind, asked, chosen)
            if self.failed_at is not None and self._hopeless(at + 1, then):
                self.alike -= 1
                continue
            self.tries -= 1
            rest = self._place(at + 1, then)
            if rest is not None:
                return [places, *rest]
            if self.gave_up:
                return None
            self.failed.add(self._room(at + 1, then))
            if kind is Kind.INIT:
                return None  # it ends before the others start: another choice leaves them no more room
        if not found and self.failed_at is None:
            self.failed_at = at, usage
        return None

    def _gives_up(self) -> bool:
        self.gave_up = self.gave_up or self.tries <= 0 or self.alike <= 0 or time.monotonic() > self.until
        return self.gave_up

    def _room(self, at: int, beside: _Beside) -> tuple[object, ...]:
        """A key of the room that a choice leaves.

        Choices with equal keys count as one, because equal cards have no order.
        """
        own = (beside.sidecars + beside.apps).T.tolist()
        return at, *sorted(zip(self._classes, map(tuple, own), strict=True))

    @cached_property
    def _classes(self) -> list[tuple[object, ...]]:
        """The class of each card: cards of one class give every container the same slice."""
        cards = self.cards
        columns = [cards.healthy, cards.cordoned, cards.memory, cards.physical, cards.cores, cards.slots, cards.foreign]
        columns += [*self.usage, *([cards.numa] if self.pod.selector.numa_bind else [])]
        for asked in {id(each): each for each in self.asks}.values():
            masks = [mask for mask in (asked.models, asked.uuids) if mask is not None]
            columns += [asked.memory, asked.guarantee, *masks]
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _hopeless(self, at: int, beside: _Beside) -> bool:
        """Whether no choice works for the containers from `at` on.

        Either they need more than the cards have, or the same room has failed before.
        """
        if at + 1 >= len(self.asks):
            return False  # a direct try of the last container is faster
        if self._room(at, beside) in self.failed:
            return True
        left = room.of(self.cards, self.usage + beside.sidecars + beside.apps)
        return not bound.possible(left, [self.wants[id(asked)] for asked in self.asks[at:]], self.kinds[at:])

    def _choices(self, good: Bools, usage: Ints, own: Ints, peak: Ints, asked: Ask) -> Iterator[tuple[int, ...]]:
        """Sets of good cards, best first.

        Cards where the pod already holds enough for an init container come before all others.
        """
        if self.policy is None:
            yield from self._sets([int(place) for place in np.flatnonzero(good)], asked.request.count)
            return
        paid = (peak[SLOTS] > 0) & (asked.added(own, self.cards.present) <= peak).all(axis=0)
        order = self.policy.card_order(self.cards, usage)
        ordered = [int(place) for place in order[np.argsort(~paid[order], kind="stable")] if good[place]]
        yield from self._sets(ordered, asked.request.count)

    def _sets(self, ordered: list[int], size: int) -> Iterator[tuple[int, ...]]:
        """Sets of `size` of these cards, from one NUMA node where the pod asks for that."""
        if not self.pod.selector.numa_bind:
            yield from combinations(ordered, size)
            return
        groups: dict[int, list[int]] = {}
        for place in ordered:
            groups.setdefault(int(self.cards.numa[place]), []).append(place)
        for group in groups.values():
            yield from combinations(group, size)

    def rejection(self) -> Rejection:
        if self.gave_up or self.failed_at is None:
            return Rejection({Reason.UNDECIDED: len(self.cards.present)}, UNDECIDED)
        at, usage = self.failed_at
        found = explain(self.cards, usage, self.asks[at], numa_bind=self.pod.selector.numa_bind)
        if len(self.pod.containers) == 1:
            return found
        return Rejection(found.reasons, f"container {self.pod.containers[at].name}: {found.sentence}")


def explain(cards: Cards, usage: Ints, asked: Ask, *, numa_bind: bool) -> Rejection:
    """Why one node's cards (one dimension) cannot take one container."""
    counted = {reason: int(count(bad)) for reason, bad in rules.judge(cards, usage, asked) if bad.any()}
    return rejection(counted, int(cards.present.sum()), asked.request, numa_bind=numa_bind)


def rejection(counted: Mapping[Reason, int], total: int, request: GpuRequest, *, numa_bind: bool) -> Rejection:
    """The sentence and the reasons of a node with `total` cards; `counted`: number of cards that break each rule."""
    text = rules.sentence(counted, total, request, numa_bind=numa_bind)
    if total < request.count:
        return Rejection({Reason.COUNT: total}, text)
    if total - sum(counted.values()) >= request.count:
        return Rejection({Reason.NUMA: total}, text)
    return Rejection(dict(counted), text)
