"""Orders the moves of pods whose cards differ from their records: which records may change next. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vgpu.allocation import Held, excess
from vgpu.devices import Gpu

Holds = Mapping[str, Held]  #: by card UUID


@dataclass(frozen=True, slots=True)
class Mover:
    """One pod that asks for a move."""

    uid: str
    now: Holds  #: what the pod's record gives it
    then: Holds  #: what the record gives it after the move
    both: Holds  #: what counts while it is unknown which of the two is true
    leaving: bool = False  #: the pod holds nothing any more on its old cards
    asked: bool = False  #: the move is on its way to the API server


@dataclass(frozen=True, slots=True)
class Steps:
    """Writes that may be made now: they are safe in any order, and even if some of them do not take effect."""

    there: tuple[str, ...] = ()  #: pods whose records move
    aside: str = ""  #: a pod that makes room for other pods, because none of them can move before


def steps(cards: Mapping[str, Gpu], held: Holds, movers: Iterable[Mover]) -> Steps:
    """The next writes on one node.

    `held`: what all its pods hold; movers count with `both`. No state between two writes, nor a state after a crash,
    has more on a card than it can hold.
    """
    order = sorted(movers, key=lambda one: (not one.leaving, one.uid))
    used = dict(held)
    for one in order:
        if not one.asked:
            used = _add(_add(used, one.both, -1), one.now)
    able = _possible(cards, used, [one for one in order if not one.asked])
    there = []
    for one in able:
        if excess(cards, _add(used, one.now, -1), one.then) is None:
            used = _add(_add(used, one.now, -1), one.both)
            there.append(one.uid)
    stuck = [one.uid for one in able if not one.leaving and one.uid not in there]
    if there or any(one.asked for one in order) or not stuck:
        return Steps(tuple(there))
    return Steps(aside=stuck[0])


def _possible(cards: Mapping[str, Gpu], used: Holds, movers: list[Mover]) -> list[Mover]:
    """Those of `movers` that can all be on their new cards while the others stay.

    If not all fit, the last ones in order stay.
    """
    able = list(movers)
    while able:
        after = dict(used)
        for one in able:
            after = _add(_add(after, one.now, -1), one.then)
        crowded = [one for one in able if excess(cards, _add(after, one.then, -1), one.then) is not None]
        if not crowded:
            break
        able.remove(crowded[-1])
    return able


def _add(left: Holds, right: Holds, sign: int = 1) -> dict[str, Held]:
    found = dict(left)
    for uuid, more in right.items():
        before = found.get(uuid, Held())
        found[uuid] = Held(
            before.slots + sign * more.slots,
            before.mem + sign * more.mem,
            before.phys + sign * more.phys,
            before.cores + sign * more.cores,
            before.alone + sign * more.alone,
        )
    return found
