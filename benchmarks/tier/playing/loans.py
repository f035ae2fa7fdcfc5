"""Two tenants of one card: how soon one tenant gets its guarantee when the other one has it on loan."""

import time
from contextlib import ExitStack

import msgspec

from playing.machine import BLOCK, BLOCK_MIB, BLOCKS, BUS, SEED, UNIT, WAIT, Machine, guarantee
from vgpu.native import Region

HALF = BLOCKS // 2
ENDLESS = 1_000_000  #: launches: the program runs until it is killed
PATIENCE_S = 20.0
LOOK_EVERY_S = 0.002
#: of the tenant that has to give way: launches between its waits; None: it makes no calls
MANNERS = {"waits after 8 launches": WAIT, "never waits": 0, "makes no calls": None}
MODES = {"movable": True, "static": False}
#: time of the bytes that must go over the bus in both directions, seconds
LEAST_S = 2 * HALF * BLOCK / BUS / 1e6


class Return(msgspec.Struct, frozen=True):
    """Seconds since the loan was taken back and the neighbour began to allocate; None: not within PATIENCE_S."""

    given_s: float | None  #: the first tenant holds no more than its guarantee
    taken_s: float | None  #: all of the second tenant's guarantee is on the card


def _resident(region: Region) -> int:
    return region.usage().cards[0].resident


def taken_back(machine: Machine, wait: int | None, movable: bool) -> Return:
    """One tenant has twice its guarantee on the card when a second tenant starts.

    The second tenant has the other half as its guarantee. `wait`: launches between two waits of the first tenant, 0: it
    never waits, None: it makes no calls. `movable`: whether the second tenant's blocks move.
    """

    def arguments(wait: int) -> tuple[object, ...]:
        return ("random", HALF, ENDLESS, SEED, "alloc", BLOCK_MIB, wait, UNIT)

    with machine.room() as room, ExitStack() as stack:
        card = room.card()
        ours = 2 * (card.context_bytes + card.module_bytes)
        stack.enter_context(room.program("ballast", 2 * guarantee(HALF) + ours))
        first = stack.enter_context(room.region("first", HALF, movable=True))
        second = stack.enter_context(room.region("second", HALF, movable))
        first.lend(0, HALF * BLOCK)
        one = stack.enter_context(room.program(*arguments(wait or 0), region="first"))
        other = stack.enter_context(room.program(*arguments(WAIT), region="second"))
        one.tell()
        one.heard()
        if _resident(first) != BLOCKS * BLOCK:
            raise RuntimeError(f"of {BLOCKS} blocks, {_resident(first) / BLOCK:g} are on the card at the beginning")
        if wait is not None:
            one.tell()
            time.sleep(0.1)  # the tenant works
        other.tell()
        begun = time.monotonic()
        first.lend(0, 0)
        other.heard()
        other.tell()
        given = taken = None
        while (now := time.monotonic() - begun) < PATIENCE_S and (given is None or taken is None):
            if given is None and _resident(first) <= first.limits().cards[0].guarantee:
                given = now
            if taken is None and _resident(second) >= HALF * BLOCK:
                taken = now
            time.sleep(LOOK_EVERY_S)
        return Return(given, taken)
