"""Judges all nodes at once: which of them can take a pod, and why the others cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vgpu.allocation import Kind
from vgpu.placement import bound, room, rules
from vgpu.placement.cards import Bools, Cards, Ints, count, nothing_held, of_nodes
from vgpu.placement.fit import TRIES, largest_first, rejection
from vgpu.placement.room import Small, Want
from vgpu.placement.rules import Ask, Rejection
from vgpu.resources import PodRequest


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of every node without a look at single nodes (masks over nodes)."""

    fits: Bools
    clash: Bools  #: each container alone finds cards, but all together do not
    open: Bools  #: as `clash`, but only a first try for all containers was made: look closer
    failed: Ints  #: index of the first container that finds no cards even alone; meaningless where a mask is set


def survey(cards: Cards, left: Small, wanted: Sequence[Ask], pod: PodRequest) -> Verdict:
    """Judges every node; `left`: the nodes' room.

    Nodes stay open only for pods for which `fit` itself may give up.
    """
    wants = _wants(wanted)
    numa = cards.numa.T if pod.selector.numa_bind else None
    nodes = left.shape[-1]
    alone, none = np.ones(nodes, dtype=np.bool_), np.zeros(nodes, dtype=np.bool_)
    failed = np.zeros(nodes, dtype=np.int64)
    for at, want in enumerate(wants):
        if any(want is before for before in wants[:at]):
            continue  # an equal container was checked already
        enough = _enough(room.eligible(left, want), want.count, numa)
        failed[alone & ~enough] = at
        alone &= enough
    if len(wants) == 1:
        return Verdict(alone, none, none, failed)
    kinds = [container.kind for container in pod.containers]
    together = _first_fit(left, wants, kinds, numa) & alone
    rest = alone & ~together
    clash = none
    if rest.any():
        at_rest = np.flatnonzero(rest)
        part, theirs, _ = _of(at_rest, left, wants, None)
        clash = none.copy()
        clash[at_rest] = ~bound.possible(part, theirs, kinds)
        rest &= ~clash
    if rest.any():  # in another order; a closer look at a single node has the same result
        at_rest = np.flatnonzero(rest)
        places = {each.name: at for at, each in enumerate(pod.containers)}
        order = [places[each.name] for each in largest_first(pod).containers]
        part, theirs, groups = _of(at_rest, left, wants, numa)
        found = _first_fit(part, [theirs[at] for at in order], [kinds[at] for at in order], groups)
        together[at_rest[found]] = True
        rest &= ~together
    if not rest.any() or not _searchable(len(left[0]), wants, kinds):
        return Verdict(together, clash, rest, failed)
    at_rest = np.flatnonzero(rest)
    found = _search(*_of(at_rest, left, wants, numa), kinds)
    together[at_rest[found]] = True
    return Verdict(together, clash | (rest & ~together), none, failed)


def _wants(wanted: Sequence[Ask]) -> list[Want]:
    """The wants of the containers; containers with the same ask share one object."""
    known = {id(asked): asked for asked in wanted}
    wants = {key: Want.of(asked) for key, asked in known.items()}
    return [wants[id(asked)] for asked in wanted]


def _enough(good: Bools, size: int, numa: Ints | None) -> Bools:
    """Nodes with at least `size` good cards (on one NUMA node where `numa` is given)."""
    if numa is None:
        return room.count(good) >= size
    found = np.zeros(good.shape[1], dtype=np.bool_)
    for group in _groups(good, numa):
        found |= room.count(group) >= size
    return found


def _groups(good: Bools, numa: Ints) -> Iterator[Bools]:
    """The good cards of each NUMA node."""
    if not numa.size:
        return
    low, high = int(numa.min()), int(numa.max())
    # np.unique takes as long as all the rest
    numbers = range(low, high + 1) if high - low < 64 else np.unique(numa).tolist()
    for number in numbers:
        yield good & (numa == number)


def _first_fit(left: Small, wants: Sequence[Want], kinds: Sequence[Kind], numa: Ints | None) -> Bools:
    """Nodes on which each container, one after the other, finds room on the first cards that have it."""
    works = np.ones(left.shape[-1], dtype=np.bool_)
    now = left
    for at, (want, kind) in enumerate(zip(wants, kinds, strict=True)):
        good = room.eligible(now, want)
        if numa is not None:
            good = _first_group(good, numa, want.count)
        chosen, enough = room.first(good, want.count)
        works &= enough
        if kind is not Kind.INIT and at + 1 < len(wants):
            now = now if now is not left else left.copy()
            room.place(now, want, chosen)
    return works


def _first_group(good: Bools, numa: Ints, size: int) -> Bools:
    """The good cards of the first NUMA node that has enough of them."""
    kept = np.zeros_like(good)
    for group in _groups(good, numa):
        kept |= group & ((room.count(group) >= size) & ~kept.any(axis=0))
    return kept


def _searchable(cards: int, wants: Sequence[Want], kinds: Sequence[Kind]) -> bool:
    """Whether `fit`, which decides in the end, would also try every choice among so many cards."""
    tries, choices = 1, 1
    for want, kind in zip(wants[:-1], kinds, strict=False):
        choices *= 1 if kind is Kind.INIT else comb(cards, want.count)
        tries += choices
    return tries <= TRIES


def _of(nodes: Ints, left: Small, wants: Sequence[Want], numa: Ints | None) -> tuple[Small, list[Want], Ints | None]:
    """The same for these nodes."""
    part = None if numa is None else np.take(numa, nodes, axis=-1)
    there = {id(want): want.at(nodes) for want in wants}
    return np.take(left, nodes, axis=-1), [there[id(want)] for want in wants], part


def alike(left: Small, wanted: Sequence[Ask], rows: Ints, numa: Ints | None) -> Ints:
    """The kind of each node in `rows`. Nodes of one kind have equal answers, because everything that decides is equal.

    Nodes whose cards are the same in another order are of different kinds.
    """
    figures: list[NDArray[Any]] = [left.reshape(-1, left.shape[-1])[:, rows]]
    for want in {id(each): each for each in _wants(wanted)}.values():
        figures += [each[:, rows] for each in (want.memory, want.guarantee) if not isinstance(each, int)]
        figures += [] if want.accepted is None else [want.accepted[:, rows]]
    figures += [] if numa is None else [numa[:, rows]]
    table = np.ascontiguousarray(np.concatenate(figures, dtype=np.int64, casting="unsafe").T)
    keys = table.view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel()
    return np.asarray(np.unique(keys, return_inverse=True)[1], dtype=np.int64)


def _search(left: Small, wants: Sequence[Want], numa: Ints | None, kinds: Sequence[Kind]) -> Bools:
    """Nodes on which some choice of cards has room for all containers. Tries every choice, for all nodes at once."""
    want, *others = wants
    good = room.eligible(left, want)
    found = _enough(good, want.count, numa)
    if not others:
        return found
    if kinds[0] is Kind.INIT:  # it has ended when the others start
        return found & _search(left, others, numa, kinds[1:])
    found[:] = False
    for choice in combinations(range(len(good)), want.count):
        works = good[list(choice)].all(axis=0) & ~found
        if numa is not None:
            works &= (numa[list(choice)] == numa[choice[0]]).all(axis=0)
        nodes = np.flatnonzero(works)
        if not len(nodes):
            continue
        now, (mine, *theirs), part = _of(nodes, left, wants, numa)
        chosen = np.zeros(now.shape[1:], dtype=np.bool_)
        chosen[list(choice)] = True
        room.place(now, mine, chosen)
        found[nodes] = _search(now, theirs, part, kinds[1:])
    return found


def rejections(cards: Cards, usage: Ints, asked: Ask, rows: Ints, *, numa_bind: bool) -> tuple[list[Rejection], Ints]:
    """The different rejections of the nodes in `rows`, and for each node the index of its rejection."""
    if len(rows) < len(cards.present) // 4:  # else it is faster to judge all nodes
        cards, usage, asked = cards.at(rows), of_nodes(usage, rows), asked.at(rows)
        rows = np.arange(len(rows))
    totals = count(cards.present)[rows]
    reasons, columns = [], [totals]
    for reason, bad in rules.judge(cards, usage, asked):
        if bad.any():
            reasons.append(reason)
            columns.append(count(bad)[rows])
    first, inverse = _distinct(columns, cards.present.shape[-1])
    found = []
    for node in first.tolist():
        counted = {reason: int(column[node]) for reason, column in zip(reasons, columns[1:], strict=True)}
        present = {reason: number for reason, number in counted.items() if number}
        found.append(rejection(present, int(totals[node]), asked.request, numa_bind=numa_bind))
    return found, inverse


def clashes(
    cards: Cards, usage: Ints, wanted: Sequence[Ask], pod: PodRequest, rows: Ints
) -> Iterator[tuple[int, Ints, list[Rejection], Ints]]:
    """For nodes in the verdict's `clash`: (container, places in `rows`, rejections, index of each node's rejection).

    The reported container is the first that finds no cards next to the containers before it, which have the first cards
    with room.
    """
    cards, now = cards.at(rows), of_nodes(usage, rows)
    numa_bind = pod.selector.numa_bind
    undecided = np.ones(len(rows), dtype=np.bool_)
    for at, (container, whole) in enumerate(zip(pod.containers, wanted, strict=True)):
        asked = whole.at(rows)
        good = rules.eligible(cards, now, asked).T
        if numa_bind:
            good = _first_group(good, cards.numa.T, asked.request.count)
        chosen, enough = room.first(good, asked.request.count)
        places = np.flatnonzero(undecided & ~enough)
        if len(places):
            yield at, places, *rejections(cards, now, asked, places, numa_bind=numa_bind)
        undecided &= enough
        if not undecided.any():
            return
        if container.kind is not Kind.INIT:
            now = asked.added(now, chosen.T)


def _distinct(columns: Sequence[Ints], largest: int) -> tuple[Ints, Ints]:
    """Groups equal rows of a table, given by its columns (0 to `largest`).

    Returns one row of each kind, and the kind of each row.
    """
    key, bound = columns[0], largest + 1
    for column in columns[1:]:
        if bound * (largest + 1) >= 2**62:
            key = np.unique(key, return_inverse=True)[1]
            bound = int(key.max(initial=0)) + 1
        key, bound = key * (largest + 1) + column, bound * (largest + 1)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def hopeless(cards: Cards, wanted: Sequence[Ask], pod: PodRequest, rows: Ints) -> Bools:
    """Which of these nodes could not take the pod even without any other pod: evictions cannot help there."""
    cards = cards.at(rows)
    empty = room.of(cards, nothing_held(*cards.present.shape))
    there = {id(asked): asked.at(rows) for asked in wanted}
    verdict = survey(cards, empty, [there[id(asked)] for asked in wanted], pod)
    return ~(verdict.fits | verdict.open)
