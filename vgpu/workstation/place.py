"""Chooses the cards for a request on this machine, by the rules and policies of the cluster's scheduler. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from vgpu.allocation import Held, merge, of_slices
from vgpu.devices import Gpu, GpuSlice
from vgpu.native.region import CorePolicy
from vgpu.placement import policies
from vgpu.placement.fit import CardState, Reason, Rejection, fit_container
from vgpu.resources import CardSelector, GpuRequest
from vgpu.workstation.queue import Ticket
from vgpu.workstation.slices import Run

_AGAINST: Final = {
    Reason.TYPE: "another model",
    Reason.UUID: "another UUID",
    Reason.HEALTH: "unhealthy",
    Reason.SLOTS: "no slot free",
    Reason.UNUSED: "in use, and 100 % of cores needs an unused card",
    Reason.ALONE: "taken by a command with 100 % of cores",
    Reason.MEMORY: "too little memory free",
    Reason.GUARANTEE: "too little physical memory free",
    Reason.CORES: "too few cores free",
    Reason.COUNT: "no slice on it",
}


LEAST: Final = 4  #: at least one part in this many of the memory must be on a card


class Demand(msgspec.Struct, frozen=True):
    """What `vgpu run` asks for its command."""

    request: GpuRequest
    selector: CardSelector = CardSelector()
    policy: str = "spread"
    core_policy: CorePolicy = "fixed"
    cores_limit: int | None = None  #: elastic ceiling in %
    memory_mode: Literal["", "static", "movable"] = (
        ""  #: of memory that does not fit on the card; empty: all of it has to
    )
    guarantee: int | None = None  #: MiB on each card, where not all memory must fit; None: as much as fits
    host_memory: int | None = None  #: MiB that may be in host memory, equally behind each card; None: not given
    host_rule: str = "--host-memory"  #: the option or variable that set `host_memory`, for people


class NoRoom(msgspec.Struct, frozen=True):
    """Why a demand gets no cards now."""

    sentence: str
    per_card: tuple[str, ...] = ()  #: one line for each card


def place(
    cards: Sequence[Gpu], runs: Iterable[Run], ahead: Sequence[Ticket], demand: Demand
) -> list[GpuSlice] | NoRoom:
    """Slices for `demand`, or why there are none.

    A card that an earlier waiter could use is closed to all later ones. So large requests never starve, and requests
    for different cards do not wait for each other.
    """
    held: dict[str, Held] = {}
    for run in runs:
        held = merge(held, of_slices(map(_physical, run.slices)))
    closed = {uuid for ticket in ahead for uuid in ticket.accepts}
    states = [CardState(card, held.get(card.uuid, Held())) for card in sorted(cards, key=lambda card: card.index)]
    found = _fit([state for state in states if state.gpu.uuid not in closed], demand)
    if not isinstance(found, Rejection):
        return found
    return NoRoom(
        sentence=_sentence(found, ahead, any(card.uuid in closed for card in cards), len(states), demand.request.count),
        per_card=tuple(_line(state, demand, state.gpu.uuid in closed) for state in states),
    )


class _TooLittleHostMemory(Rejection, frozen=True):
    """The cards have enough room, but the host memory behind them does not."""


def _fit(states: Sequence[CardState], demand: Demand) -> list[GpuSlice] | Rejection:
    request, selector, policy = demand.request, demand.selector, policies()[demand.policy]
    if not demand.memory_mode:
        return fit_container(states, request, selector, policy)
    if demand.guarantee is None:
        found = fit_container(states, request, selector, policy)
        if not isinstance(found, Rejection):
            return found
    # As much as possible on cards, and at least LEAST of it: with less, all work would run at the speed of the bus.
    wanted = {state.gpu.uuid: request.memory_on(state.gpu.physical_memory) for state in states}
    free = {state.gpu.uuid: state.gpu.memory - state.held.mem for state in states}
    for room in _rooms(free, demand.guarantee):
        part = fit_container(states, msgspec.structs.replace(request, memory=room), selector, policy)
        if isinstance(part, Rejection):
            continue
        most = free if demand.guarantee is None else dict.fromkeys(free, room)
        slices = [
            GpuSlice(one.uuid, memory, one.cores, most[one.uuid] if most[one.uuid] < memory else None)
            for one, memory in ((one, wanted[one.uuid]) for one in part)
        ]
        if any(one.mem > LEAST * one.guarantee for one in slices):
            continue
        # each card has the same part of the host memory
        missing = len(slices) * max(one.mem - one.guarantee for one in slices)
        budget = demand.host_memory or 0
        if missing > budget:
            sentence = f"the command needs {missing} MiB of host memory and may use {budget} MiB ({demand.host_rule})"
            return _TooLittleHostMemory({Reason.GUARANTEE: len(states)}, sentence)
        return slices
    return _no_part(states, demand, max(wanted.values(), default=0))


def _rooms(free: Mapping[str, int], guarantee: int | None) -> list[int]:
    """MiB of a card to try, largest first."""
    if guarantee is not None:
        return [guarantee]
    return sorted({room for room in free.values() if room > 0}, reverse=True)


def _no_part(states: Sequence[CardState], demand: Demand, wanted: int) -> Rejection:
    """Why the cards lack the part of `wanted` MiB that must be on a card."""
    least = -(-wanted // LEAST)
    needed = least if demand.guarantee is None else max(demand.guarantee, least)
    request = msgspec.structs.replace(demand.request, memory=needed)
    found = fit_container(states, request, demand.selector, policies()[demand.policy])
    rule = (
        f"the guarantee is {needed} MiB (--guarantee)"
        if demand.guarantee == needed
        else f"a quarter of {wanted} MiB has to be on the card"
    )
    if not isinstance(found, Rejection):  # cards of different sizes, so that each card holds another part
        return Rejection({Reason.MEMORY: len(states)}, rule)
    if found.reasons.keys() & {Reason.MEMORY, Reason.GUARANTEE}:
        return Rejection(found.reasons, f"{found.sentence}: {rule}")
    return found


def _physical(piece: GpuSlice) -> GpuSlice:
    """The physical memory and time that a slice takes of its card."""
    return msgspec.structs.replace(piece, mem=piece.guarantee, phys=None)


def _sentence(rejection: Rejection, ahead: Sequence[Ticket], waits: bool, cards: int, needed: int) -> str:
    """The sentence for one machine.

    `cards`: number of usable cards, `needed`: number of cards that the demand needs.
    """
    if waits:
        return f"{len(ahead)} earlier {'requests wait' if len(ahead) > 1 else 'request waits'} for these cards"
    if cards < needed:
        return f"{cards} {'card' if cards == 1 else 'cards'} can be used here, {needed} needed"
    return rejection.sentence


def _against(state: CardState, demand: Demand) -> str:
    """Why this one card cannot take the demand; empty: it can."""
    found = _fit([state], msgspec.structs.replace(demand, request=msgspec.structs.replace(demand.request, count=1)))
    if isinstance(found, _TooLittleHostMemory):
        return "too little host memory for the rest"
    return _AGAINST[next(iter(found.reasons))] if isinstance(found, Rejection) else ""


def _line(state: CardState, demand: Demand, closed: bool) -> str:
    gpu, held = state.gpu, state.held
    why = "reserved for an earlier request" if closed else _against(state, demand) or "suitable"
    return (
        f"card {gpu.index}, {gpu.model}, {gpu.uuid}: {gpu.memory - held.mem} of {gpu.memory} MiB, "
        f"{gpu.cores - held.cores} of {gpu.cores} % and {gpu.slots - held.slots} of {gpu.slots} slices free: {why}"
    )


def acceptable(cards: Sequence[Gpu], demand: Demand) -> frozenset[str]:
    """UUIDs of the cards that could serve `demand` if they were idle.

    Empty when even all idle cards together could not.
    """
    idle = [CardState(card) for card in sorted(cards, key=lambda card: card.index)]
    if isinstance(_fit(idle, demand), Rejection):
        return frozenset()
    return frozenset(state.gpu.uuid for state in idle if not _against(state, demand))


def visible(cards: Sequence[Gpu], setting: str) -> list[Gpu]:
    """The cards that a CUDA_VISIBLE_DEVICES setting selects: indices, UUIDs or unique beginnings of UUIDs.

    As in the driver, the list ends at the first entry that names no card (CUDA programming guide, "CUDA environment
    variables").
    """
    found: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [card for card in cards if _names(entry, card)]
        if len(named) != 1 or named[0] in found:
            break
        found.append(named[0])
    return found


def _names(entry: str, card: Gpu) -> bool:
    return card.index == int(entry) if entry.isdecimal() else len(entry) > 4 and card.uuid.startswith(entry)
