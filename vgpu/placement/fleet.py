"""All nodes at once: which of them can take a pod, and why the others cannot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vgpu.allocation import Kind
from vgpu.placement import rules
from vgpu.placement.cards import Bools, Cards, Ints, count, nothing_held
from vgpu.placement.fit import rejection
from vgpu.placement.rules import Ask, Rejection
from vgpu.resources import PodRequest


@dataclass(frozen=True, slots=True)
class Verdict:
    """Nodes by what is known without looking at them one by one (masks over nodes)."""

    fits: Bools
    open: Bools  #: each container alone finds cards, a first try for all together does not: look closer
    failed: Ints  #: index of the first container that finds no cards even alone; meaningless where `fits` or `open`


def survey(cards: Cards, usage: Ints, wanted: Sequence[Ask], pod: PodRequest) -> Verdict:
    """Judges every node; exact for pods with one GPU container."""
    numa = pod.selector.numa_bind
    nodes = cards.present.shape[:-1]
    alone = np.ones(nodes, dtype=np.bool_)
    failed = np.zeros(nodes, dtype=np.int64)
    for at, asked in enumerate(wanted):
        enough = rules.enough(cards, rules.eligible(cards, usage, asked), asked.request, numa_bind=numa)
        failed[alone & ~enough] = at
        alone &= enough
    if len(wanted) == 1:
        return Verdict(alone, np.zeros(nodes, dtype=np.bool_), failed)
    together = _first_fit(cards, usage, wanted, pod) & alone
    return Verdict(together, alone & ~together, failed)


def _first_fit(cards: Cards, usage: Ints, wanted: Sequence[Ask], pod: PodRequest) -> Bools:
    """Nodes on which each container, one after the other, finds room on the first cards that have it."""
    works = np.ones(cards.present.shape[:-1], dtype=np.bool_)
    beside_init, beside_apps = usage, usage
    for container, asked in zip(pod.containers, wanted, strict=True):
        now = beside_apps if container.kind is Kind.APP else beside_init
        good = rules.eligible(cards, now, asked)
        if pod.selector.numa_bind:
            good = _first_numa(cards, good, asked.request.count)
        chosen = good & (np.cumsum(good, axis=-1, dtype=np.uint16) <= asked.request.count)
        works &= count(chosen) == asked.request.count
        if container.kind is Kind.SIDECAR:
            beside_init = beside_apps = asked.added(beside_init, chosen)
        elif container.kind is Kind.APP:
            beside_apps = asked.added(beside_apps, chosen)
    return works


def _first_numa(cards: Cards, good: Bools, size: int) -> Bools:
    """Of the good cards only those of the first NUMA node that has enough of them."""
    kept = np.zeros_like(good)
    for numa in cards.numa_nodes():
        group = good & (cards.numa == numa)
        kept |= group & ((count(group) >= size) & ~kept.any(axis=-1))[..., np.newaxis]
    return kept


def rejections(cards: Cards, usage: Ints, asked: Ask, rows: Ints, *, numa_bind: bool) -> tuple[list[Rejection], Ints]:
    """The different rejections of the nodes in `rows`, and for each of these nodes the index of its one."""
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


def _distinct(columns: Sequence[Ints], largest: int) -> tuple[Ints, Ints]:
    """Kinds of equal rows of a table, given by its columns (0 to `largest`): a row of each kind, the kind of each."""
    key, bound = columns[0], largest + 1
    for column in columns[1:]:
        if bound * (largest + 1) >= 2**62:
            key = np.unique(key, return_inverse=True)[1]
            bound = int(key.max(initial=0)) + 1
        key, bound = key * (largest + 1) + column, bound * (largest + 1)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def hopeless(cards: Cards, wanted: Sequence[Ask], pod: PodRequest) -> Bools:
    """Nodes whose cards could not take the pod even if no pod were there: evicting one cannot help."""
    verdict = survey(cards, nothing_held(*cards.present.shape), wanted, pod)
    return ~(verdict.fits | verdict.open)
