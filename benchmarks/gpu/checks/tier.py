"""Slices with more memory than their guarantee.

The rows are limits, contents after moves, what programs see, and the cost of the bus.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from .children import Broken
from .machine import PROGRAMS, Command, Machine, Tier
from .memory import ALLOWANCE, UNKNOWN_CONTEXT, from_outside
from .rows import MIB, Row, broken, exact, mib, not_run

FAMILY: Final = "tier"
BUS: Final = "kernels, copies and moves over the bus"
CONTENTS: Final = "contents after moves"
POINTERS: Final = "what a program sees of host memory"
CONSTANTS: Final = "this card, for VGPU_SIM_TIME"
MODES: Final = ("static", "movable")
ROUNDS: Final = 4  #: half of them lend room, half take it back
GIVE_WAY_S: Final = 1.0
GIB: Final = 1024 * MIB
BUS_TIME: Final = "bus=profile"  #: value of VGPU_SIM_TIME with which the simulated bus takes time
#: attributes in which a block in host memory may differ from a block on the card, see docs/oversubscription.md
MAY_DIFFER: Final = ("legacy IPC", "handle types", "GPUDirect RDMA")
CANNOT_MAP: Final = "the driver cannot map host memory: such blocks are pinned, and none moves"


class Sizes(msgspec.Struct, frozen=True):
    """MiB; of a slice, in addition to one context."""

    memory: int
    guarantee: int
    loan: int
    block: int  #: size of blocks that move
    bus: int  #: for each kind of memory whose speed is measured
    turns: int  #: turns of each measurement; the best turn counts


REAL: Final = Sizes(memory=1024, guarantee=512, loan=256, block=16, bus=256, turns=5)
SIMULATED: Final = Sizes(
    memory=256, guarantee=128, loan=64, block=4, bus=16, turns=2
)  # there, processors run the kernels


def sizes(machine: Machine) -> Sizes:
    return SIMULATED if machine.simulate else REAL


def slice_of(machine: Machine, movable: bool) -> Tier:
    """The slice of these checks. It may use a quarter more host memory than necessary, because blocks are whole."""
    chosen = sizes(machine)
    context = machine.context_mib
    host = (chosen.memory - chosen.guarantee) * 5 // 4
    return Tier(context + chosen.memory, context + chosen.guarantee, host, movable)


def gbs(value: float) -> str:
    return f"{value:.4g} GB/s"


def speeds(answer: dict[str, Any]) -> list[Row]:
    """Rows of kernels on each kind of memory; their bar is that every word was right."""
    found = answer["speeds"]
    rows = []
    for kind, told in found.items():
        asked = "" if kind == "card" else f"card {gbs(found['card']['read'])}"
        got = f"read {gbs(told['read'])}, write {gbs(told['write'])}"
        remark = f"read and written at once {gbs(told['both'])}, of {mib(answer['bytes'])}"
        rows.append(Row(FAMILY, f"kernels on {kind} memory", asked, got, "", "right", told["right"], remark))
    if not answer["maps_host"]:
        rows.append(not_run(FAMILY, "kernels on HOST_NUMA memory", CANNOT_MAP))
    for kind, told in answer["copies"].items():
        got = f"to the card {gbs(told['to card'])}, from it {gbs(told['from card'])}"
        rows.append(Row(FAMILY, f"copies with {kind} memory", "", got))
    return rows


def moves(answer: dict[str, Any]) -> list[Row]:
    """Rows of moves by size and direction."""
    if not answer["moves"]:
        return [not_run(FAMILY, "a move", CANNOT_MAP)]
    rows = []
    for size, directions in answer["moves"].items():
        for direction, told in directions.items():
            steps = {name: took for name, took in told.items() if name != "right"}
            each = sum(steps.values()) * GIB / int(size)
            remark = ", ".join(f"{name} {1000 * took:.0f} us" for name, took in steps.items())
            got = f"{each:.1f} ms per GiB"
            what = f"a move of {mib(int(size))} {direction}"
            rows.append(Row(FAMILY, what, "", got, "", "right", told["right"], remark))
    return rows


def constants(answer: dict[str, Any]) -> Row:
    """The simulator settings that would make it like this card."""
    kind = "HOST_NUMA" if answer["maps_host"] else "pinned"
    got = f"bus={1000 * answer['speeds'][kind]['read']:.0f}MB/s"
    if answer["moves"]:
        smallest = answer["moves"][min(answer["moves"], key=int)]
        remap = 1000 * sum(told["remap"] for told in smallest.values()) / len(smallest)
        got += f",remap={remap:.0f}us"
    return Row(FAMILY, CONSTANTS, "", got, remark=f"kernels that read {kind} memory; small blocks")


def differences(told: dict[str, str], card: dict[str, str], may: tuple[str, ...] = ()) -> list[str]:
    return [
        f"{name} {told[name]} (card: {card[name]})" for name in card if told[name] != card[name] and name not in may
    ]


def by_the_driver(answer: dict[str, Any]) -> list[Row]:
    """How the driver itself distinguishes memory of the host from memory of the card: rows without a bar."""
    rows = []
    for kind, told in answer["pointers"].items():
        bad = answer["kinds"][kind]
        takes = "takes all copies and fills" if not bad else "; ".join(f"{name}: {why}" for name, why in bad.items())
        if kind == "card":
            rows.append(Row(FAMILY, "the driver on card memory", "", takes))
            continue
        other = ", ".join(differences(told, answer["pointers"]["card"])) or "nothing"
        rows.append(Row(FAMILY, f"the driver on {kind} memory", "", takes, remark=f"unlike card memory: {other}"))
    return rows


def looks(answer: dict[str, Any]) -> list[Row]:
    """Whether a program in a slice can distinguish a block in host memory from a block on the card."""
    other = differences(answer["host"], answer["card"], MAY_DIFFER)
    allowed = differences(answer["host"], answer["card"])
    attributes = Row(
        FAMILY, "pointer attributes of a block in host memory", "as of the card", f"{len(other)} others", "", "0",
        not other, "; ".join(other or allowed),
    )  # fmt: skip
    bad = [f"{where}, {name}: {why}" for where, kinds in answer["refused"].items() for name, why in kinds.items()]
    copies = Row(
        FAMILY, "copies and fills of a block in host memory", "all kinds", f"{len(bad)} refused or wrong", "", "0",
        not bad, "; ".join(bad),
    )  # fmt: skip
    status = answer["ipc"]
    shared = Row(FAMILY, "a legacy IPC handle of it", "refused", f"answered {status}", "", "refused", status != 0)
    return [attributes, copies, shared]


def kept(answer: dict[str, Any]) -> Row:
    """`answer` of `tier_slice.py contents`."""
    if not answer["maps_host"]:
        return not_run(FAMILY, CONTENTS, CANNOT_MAP)
    faults = []
    if not answer["granted"]:
        faults.append("a block within the limit was refused")
    if not answer["host"]:
        faults.append("nothing was in host memory")
    if not answer["up"] or not answer["down"]:
        faults.append("blocks did not move both ways")
    asked = f"{answer['blocks']} blocks of {mib(answer['bytes'])}, looked at {answer['rounds']} times"
    got = f"{answer['wrong']} halves or ends wrong"
    moved = f"{mib(answer['down'])} went down, {mib(answer['up'])} came up"
    met = not faults and answer["wrong"] == 0
    return Row(
        FAMILY, CONTENTS, asked, got, str(answer["wrong"]), "0, moved both ways", met, "; ".join([moved, *faults])
    )


def filled(mode: str, limit: int, answer: dict[str, Any]) -> Row:
    """Whether the limit was reached to the byte, and all figures agree; bytes."""
    left = limit - answer["used"]
    faults = []
    if answer["status"] != 2:
        faults.append(f"the last step was answered {answer['status']} instead of 2 (out of memory)")
    if not answer["refused"]:
        faults.append("the driver refused, not the library")
    if answer["used"] != answer["resident"] + answer["host"]:
        faults.append("what is on the card and in host memory is not what is allocated")
    if not answer["host"]:
        faults.append("nothing is in host memory")
    for who, told in answer["told"].items():
        if tuple(told) != (limit, answer["used"], left):
            faults.append(f"{who} tells total {mib(told[0])}, used {mib(told[1])}, free {mib(told[2])}")
    got = f"card {mib(answer['resident'])}, host {mib(answer['host'])}"
    remark = "; ".join(faults) or "cuMemGetInfo and NVML the same"
    met = left == 0 and not faults
    return Row(FAMILY, f"limit, {mode}", mib(limit), got, f"{mib(left)} left", "0 B left", met, remark)


def on_card(what: str, allowed: int, resident: int, seen: int | None, how: str, context: int) -> Row:
    """The card's bytes by the ledger and by NVML (from outside), against what the slice may hold there."""
    if seen is None:
        return not_run(FAMILY, what, how)
    most = allowed + ALLOWANCE + (0 if context else UNKNOWN_CONTEXT)
    met = resident <= allowed and seen <= most
    return Row(
        FAMILY, what, f"ledger {mib(resident)} of {mib(allowed)}", f"{how} {mib(seen)}",
        f"{(seen - resident) / MIB:+.1f} MiB", f"<= {mib(most)}", met, "real less charged",
    )  # fmt: skip


def way_given(seconds: float, before: int, after: int, guarantee: int) -> Row:
    """How long a program that launches all the time took to shrink to its guarantee on the card; bytes."""
    down = after <= guarantee
    got = f"after {1000 * seconds:.0f} ms" if down else "never"
    met = down and seconds <= GIVE_WAY_S
    rate = gbs((before - after) / seconds / 1e9) if seconds else "at once"
    moved = f"{mib(before - after)} went down between launches, {rate}"
    what = "a loan that is taken back"
    return Row(FAMILY, what, mib(guarantee), got, "", f"<= {1000 * GIVE_WAY_S:.0f} ms", met, moved, timed=down)


def full(machine: Machine, mode: str) -> list[Row]:
    """A full slice: its limit, its guarantee by NVML, the way it gives room back, and the rest after all is freed."""
    movable = mode == "movable"
    piece, loan = slice_of(machine, movable), sizes(machine).loan * MIB
    guarantee, lent = piece.guarantee * MIB, loan if movable else 0
    before = machine.free()
    with machine.tiered([sys.executable, PROGRAMS / "tier_slice.py", "full", str(loan)], piece) as child:
        first = child.answer()
        pids = [first["pid"]]
        rows = [filled(mode, piece.memory * MIB, first)]
        seen = from_outside(machine, pids, before)
        what = f"guarantee and loan, {mode}" if movable else f"guarantee, {mode}"
        rows.append(on_card(what, guarantee + lent, first["resident"], *seen, machine.context))
        child.tell()
        if movable:
            after = child.answer()
            if first["maps_host"]:
                rows.append(way_given(after["seconds"], first["resident"], after["resident"], guarantee))
                seen = from_outside(machine, pids, before)
                what = f"guarantee, {mode}: afterwards"
                rows.append(on_card(what, guarantee, after["resident"], *seen, machine.context))
            else:
                rows.append(not_run(FAMILY, "a loan that is taken back", CANNOT_MAP))
            child.tell()
        last = child.answer()
        charged = last["used"], last["resident"] + last["host"]
        rows.append(exact(FAMILY, f"freed, {mode}", last["context"], max(charged), f"host {mib(last['host'])}"))
        child.tell()
    return rows


def bus(machine: Machine) -> list[Row]:
    """The driver's behaviour without the library."""
    chosen = sizes(machine)
    command: Command = [sys.executable, PROGRAMS / "bus.py", str(chosen.bus * MIB), str(chosen.turns)]
    with machine.native(command, variables=timed(machine)) as child:
        answer = child.answer()
    if machine.simulate:
        return [
            *noted(speeds(answer), "simulated: constants of the profile, and 10 us a kernel"),
            *noted(moves(answer), "simulated: processors copy"),
            not_run(FAMILY, CONSTANTS, "simulated: only hardware can tell"),
            *noted(by_the_driver(answer), "the simulated driver's word"),
        ]
    return [*speeds(answer), *moves(answer), constants(answer), *by_the_driver(answer)]


def noted(rows: list[Row], note: str) -> list[Row]:
    """The rows with `note` before each remark."""
    return [
        msgspec.structs.replace(row, remark="; ".join(filter(None, (note, row.remark)))) if row.ran else row
        for row in rows
    ]


def timed(machine: Machine) -> Mapping[str, str]:
    """Variables with which the simulated bus takes time."""
    return {"VGPU_SIM_TIME": BUS_TIME} if machine.simulate else MappingProxyType({})


def contents(machine: Machine) -> list[Row]:
    chosen = sizes(machine)
    numbers = [str(chosen.block * MIB), str(ROUNDS), str(chosen.loan * MIB)]
    command: Command = [sys.executable, PROGRAMS / "tier_slice.py", "contents", *numbers]
    with machine.tiered(command, slice_of(machine, True)) as child:
        return [kept(child.answer())]


def pointers(machine: Machine) -> list[Row]:
    command: Command = [sys.executable, PROGRAMS / "tier_slice.py", "pointers", str(sizes(machine).block * MIB)]
    with machine.tiered(command, slice_of(machine, False)) as child:
        return looks(child.answer())


CHECKS: Final = {BUS: bus, CONTENTS: contents, POINTERS: pointers} | {
    f"limit and guarantee, {mode}": lambda machine, mode=mode: full(machine, mode) for mode in MODES
}


def check(machine: Machine, what: str) -> list[Row]:
    """One of CHECKS; a program that broke is a row."""
    try:
        return CHECKS[what](machine)
    except Broken as error:
        return [broken(FAMILY, what, str(error))]
