"""Lends room of cards that no command of `vgpu run` is sure to need to commands whose blocks can move."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pynvml

from vgpu import inventory, tier
from vgpu.devices import Gpu
from vgpu.native import CardUsage, Region, simulator
from vgpu.tier import MIB, Want
from vgpu.workstation import strays
from vgpu.workstation.slices import Run, SliceStore


class _Share(msgspec.Struct, frozen=True):
    """What one command has of one card; its region is open."""

    region: Region
    at: int  #: place of the card in the command's limits
    uuid: str
    guarantee: int  #: bytes
    limit: int
    movable: bool
    usage: CardUsage
    on_card: int  #: bytes that are on the card


def settle(store: SliceStore, runs: Sequence[Run], later: Mapping[str, int] | None = None) -> dict[str, int]:
    """Writes loans by what is allocated now; `runs`: all commands. Needs the store's lock.

    Returns, by card, the bytes that must be given back before every command has its guarantee. Bytes that are not
    needed yet (`later`, by card) do not count.
    """
    with ExitStack() as stack:
        shares = _shares(stack, store, runs)
        lent = {share.uuid for share in shares if share.movable}
        if not lent:
            return {}
        runs = [*runs, *strays.find(store, runs)]
        in_use = _in_use(runs)
        owed: dict[str, int] = {}
        changes: list[tuple[int, int, int]] = []
        for uuid in lent:
            gpu = next(card for run in runs for card in run.cards if card.uuid == uuid)
            physical = min(gpu.memory, gpu.physical_memory) * MIB
            promised = sum(piece.guarantee for run in runs for piece in run.slices if piece.uuid == uuid) * MIB
            of_card = {number: share for number, share in enumerate(shares) if share.uuid == uuid}
            others = max(0, in_use[uuid] - sum(share.on_card for share in of_card.values())) if uuid in in_use else 0
            movable = {number: share for number, share in of_card.items() if share.movable}
            above = sum(max(0, share.usage.resident - share.guarantee) for share in movable.values())
            owed[uuid] = tier.owed(physical, promised - (later or {}).get(uuid, 0), above, others)
            for number, loan in tier.loans(tier.room(physical, promised, others), _wants(movable)).items():
                change = loan - shares[number].usage.lent
                if change < 0 or (change and uuid in in_use):
                    changes.append((change, number, loan))
        for _, number, loan in sorted(changes):  # loans that shrink come first
            shares[number].region.lend(shares[number].at, loan)
        return owed


def later(run: Run) -> dict[str, int]:
    """By card: bytes of its guarantees that a command with host memory does not need at once."""
    return {
        piece.uuid: piece.guarantee * MIB - tier.at_first(piece.guarantee * MIB, card.context)
        for piece, card in zip(run.slices, run.cards, strict=True)
    }


def _shares(stack: ExitStack, store: SliceStore, runs: Sequence[Run]) -> list[_Share]:
    found = []
    for run in runs:
        if run.folder:
            continue  # another state's arbiter writes there
        try:
            region = stack.enter_context(Region.open(store.directory(run), writable=True))
            region.reap()
            limits, usage = region.limits(), region.usage()
        except OSError:
            continue  # claimed a moment ago, or damaged by the command itself
        found += [
            _Share(
                region,
                at,
                piece.uuid,
                piece.guarantee * MIB,
                piece.mem * MIB,
                limits.movable,
                card,
                card.resident if limits.oversubscribe else card.used,
            )
            for at, (piece, card) in enumerate(zip(run.slices, usage.cards, strict=False))
        ]
    return found


def _wants(shares: Mapping[int, _Share]) -> dict[int, Want]:
    return {
        number: Want(max(0, share.usage.used - share.guarantee), share.limit - share.guarantee)
        for number, share in shares.items()
    }


def _in_use(runs: Sequence[Run]) -> dict[str, int]:
    """Bytes of cards that all processes together have, also processes outside `vgpu run`.

    By UUID, for cards that report their use.
    """
    found: dict[str, int] = {}
    # Nothing more is lent of cards that do not report their use.
    for directory in {run.simulator for run in runs if run.simulator}:
        with suppress(OSError, ValueError):
            found |= {card.uuid: card.used for card in simulator.cards(Path(directory))}
    if not all(run.simulator for run in runs):
        with suppress(inventory.InventoryError, pynvml.NVMLError):
            found |= {uuid: sum(sizes.values()) for uuid, sizes in inventory.users().items() if uuid not in found}
    return found


def sentence(cards: Sequence[Gpu], owed: Mapping[str, int]) -> str:
    """Which of these cards other commands still have to give back; empty: none."""
    return ", ".join(
        f"{-(-owed[card.uuid] // MIB)} MiB of card {card.index} ({card.model}, {card.uuid})"
        for card in cards
        if owed.get(card.uuid)
    )
