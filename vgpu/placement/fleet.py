"""All nodes at once: which of them can take a pod, and why the others cannot."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vgpu.allocation import Kind
from vgpu.placement import Policy, rules
from vgpu.placement.cards import FIGURES, Bools, Cards, Ints
from vgpu.placement.fit import rejection
from vgpu.placement.rules import REASONS, Ask, Rejection
from vgpu.resources import PodRequest


@dataclass(frozen=True, slots=True)
class Verdict:
    """Nodes by what is known without looking at them one by one (masks over nodes)."""

    fits: Bools
    open: Bools  #: each container alone finds cards, the policy's choice for all together does not: look closer
    failed: Ints  #: index of the first container that finds no cards even alone; meaningless where `fits` or `open`


def survey(cards: Cards, usage: Ints, wanted: Sequence[Ask], pod: PodRequest, policy: Policy) -> Verdict:
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
    together = _greedy(cards, usage, wanted, pod, policy) & alone
    return Verdict(together, alone & ~together, failed)


def _greedy(cards: Cards, usage: Ints, wanted: Sequence[Ask], pod: PodRequest, policy: Policy) -> Bools:
    """Nodes on which the first choice for each container, one after the other, works."""
    works = np.ones(cards.present.shape[:-1], dtype=np.bool_)
    sidecars, apps = np.zeros_like(usage), np.zeros_like(usage)
    for container, asked in zip(pod.containers, wanted, strict=True):
        now = usage + sidecars + apps if container.kind is Kind.APP else usage + sidecars
        good = rules.eligible(cards, now, asked)
        order = policy.card_order(cards, now)
        if pod.selector.numa_bind:
            good = _one_numa(cards, good, asked.request.count, order)
        ranked = np.take_along_axis(good, order, axis=-1)
        first = ranked & (np.cumsum(ranked, axis=-1) <= asked.request.count)
        works &= first.sum(axis=-1) == asked.request.count
        chosen = np.zeros_like(good)
        np.put_along_axis(chosen, order, first, axis=-1)
        added = asked.column * chosen
        if container.kind is Kind.SIDECAR:
            sidecars = sidecars + added
        elif container.kind is Kind.APP:
            apps = apps + added
    return works


def _one_numa(cards: Cards, good: Bools, count: int, order: Ints) -> Bools:
    """Only the good cards of the NUMA node whose first card comes first in the order and which has enough of them."""
    kept = np.zeros_like(good)
    rank = np.argsort(order, axis=-1)
    best = np.full(good.shape[:-1], good.shape[-1], dtype=np.int64)
    for numa in np.unique(cards.numa[cards.present]):
        group = good & (cards.numa == numa)
        first = np.where(group, rank, good.shape[-1]).min(axis=-1)
        better = (group.sum(axis=-1) >= count) & (first < best)
        best = np.where(better, first, best)
        kept = np.where(better[..., np.newaxis], group, kept)
    return kept


def rejections(cards: Cards, usage: Ints, asked: Ask, *, numa_bind: bool) -> list[Rejection]:
    """One for each node given (shape: nodes × cards); nodes that fail alike share one object."""
    codes = rules.judge(cards, usage, asked)
    width = len(REASONS) + 1
    table = np.empty((len(codes), width), dtype=np.uint8)
    for code in range(1, width):
        table[:, code] = (codes == code).sum(axis=-1)
    table[:, 0] = cards.present.sum(axis=-1)
    raw = table.tobytes()
    known: dict[bytes, Rejection] = {}
    result = []
    for start in range(0, len(raw), width):
        row = raw[start : start + width]
        found = known.get(row)
        if found is None:
            counted = {REASONS[at - 1]: row[at] for at in range(1, width) if row[at]}
            found = known[row] = rejection(counted, row[0], asked.request, numa_bind=numa_bind)
        result.append(found)
    return result


def hopeless(cards: Cards, wanted: Sequence[Ask], pod: PodRequest, policy: Policy) -> Bools:
    """Nodes whose cards could not take the pod even if no pod were there: evicting one cannot help."""
    empty = np.zeros((FIGURES, *cards.present.shape), dtype=np.int64)
    verdict = survey(cards, empty, wanted, pod, policy)
    return ~(verdict.fits | verdict.open)
