"""Room of cards that no command of `vgpu run` is sure to need is lent to those whose blocks can move."""

from collections.abc import Sequence
from contextlib import ExitStack

from vgpu import tier
from vgpu.local.slices import Run, SliceStore
from vgpu.native import Region, Usage
from vgpu.tier import MIB, Want


def settle(store: SliceStore, runs: Sequence[Run]) -> None:
    """Writes loans by what is allocated now; `runs`: all of them. Needs the store's lock."""
    with ExitStack() as stack:
        open_: dict[tuple[str, int], tuple[Region, Usage]] = {}
        wants: dict[str, dict[tuple[str, int], Want]] = {}
        for run in runs:
            try:
                region = stack.enter_context(Region.open(store.directory(run), writable=True))
                limits, usage = region.limits(), region.usage()
            except OSError:
                continue  # claimed a moment ago, or damaged by its own command
            if not limits.movable:
                continue
            for at, piece in enumerate(run.slices):
                guarantee = piece.guarantee * MIB
                want = Want(max(0, usage.cards[at].used - guarantee), piece.mem * MIB - guarantee)
                wants.setdefault(piece.uuid, {})[run.id, at] = want
                open_[run.id, at] = region, usage
        changes = []
        for uuid, of_card in wants.items():
            held = [(piece, card) for run in runs for piece, card in zip(run.slices, run.cards, strict=True)]
            promised = sum(piece.guarantee for piece, _ in held if piece.uuid == uuid)
            physical = next(card.physical_memory for piece, card in held if piece.uuid == uuid)
            for key, loan in tier.loans(tier.room(physical * MIB, promised * MIB), of_card).items():
                changes.append((loan - open_[key][1].cards[key[1]].lent, key, loan))
        for change, key, loan in sorted(changes):  # what is taken back comes first
            if change:
                open_[key][0].lend(key[1], loan)
