"""`vgpu run`: a command under limits on this machine's cards, by the rules and the policies of the cluster.

This process claims the slices, makes their region and then *becomes* the command (execve). Exit code, signals, terminal
and process group are therefore the command's own, and there is no separate runner process that could be killed.
"""

import fcntl
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import pynvml

from vgpu import contexts, inventory, names, tier
from vgpu.config import Config
from vgpu.devices import Gpu
from vgpu.errors import UserError
from vgpu.native import CardLimit, Limits, Region, paths
from vgpu.workstation import arbiter, enclosure, host_memory, lending, reach, simulated, strays
from vgpu.workstation.environment import countable, environment
from vgpu.workstation.library import preloadable
from vgpu.workstation.place import Demand, NoRoom, acceptable, place, visible
from vgpu.workstation.progress import progress
from vgpu.workstation.queue import Queue, Ticket
from vgpu.workstation.slices import LOCK_DESCRIPTOR, Claim, Run, SliceStore
from vgpu.workstation.state import state_dir

MIB: Final = 1 << 20
POLL: Final = 0.2  #: seconds between two looks of the first waiter; the n-th waiter looks n times as rarely
SLOWEST_POLL: Final = 2.0
BACK_SECONDS: Final = 10.0  #: without any lent memory given back in this time, the command gives up
WHOLE_SECONDS: Final = 5.0  #: a command that may have host memory waits this long for all of its guarantees
NOT_EXECUTABLE: Final = 126  #: exit codes as the POSIX shell has them
NOT_FOUND: Final = 127


def run(
    command: Sequence[str], demand: Demand, config: Config, *, simulate: str, wait: float | None, strict: bool = False
) -> NoReturn:
    """Replaces this process by `command` with slices for `demand`; raises UserError when that is not possible.

    `simulate`: PROFILE[xN][@CUDA] for simulated cards, else the driver's cards. `wait`: seconds to stay in the queue,
    None: no waiting. `strict`: programs that lose their environment are limited, too.
    """
    program = find(command[0])
    refuse_nesting()
    root = state_dir()
    simulator = simulated.directory(root, simulate) if simulate else None
    library = preloadable()
    cards, counted = read_cards(root, config, simulate, simulator)
    store = SliceStore(root)
    claim = acquire(store, cards, demand, command, str(simulator or ""), wait)
    for line in (*too_small(claim.record), *beyond_reach(command, strict=strict)):
        print(f"vgpu run: {line}", file=sys.stderr)
    try:
        wanted = limits(claim, demand, config)
        Region.create(claim.directory, wanted).close()
        with store.locked():
            runs = store.sweep()
            lending.settle(store, runs)
            if arbiter.needed(wanted, claim.record, runs):
                arbiter.ensure(root)
        await_room(store, claim, tiered=bool(demand.memory_mode))
        environ = environment(
            os.environ,
            claim.record.slices,
            region=claim.directory,
            library=None if strict else library,
            priority=demand.request.priority,
            simulator=(paths.simulator(), simulator) if simulator else None,
            oversubscribe=bool(demand.memory_mode),
            record=carried(claim.record),
            indices=[card.index for card in claim.record.cards] if counted else None,
        )
        if strict:
            command = enclosure.through(claim.directory, library, program, command)
            program = command[0]
        become(program, command, environ, (claim.descriptor, claim.folder))
    except BaseException:
        store.give_up(claim)
        raise


def find(name: str) -> str:
    """The path of a program, found as the shell would find it."""
    if not name:
        raise UserError("the command's name is empty: write it after --", NOT_FOUND)
    program = shutil.which(name)
    if program is not None:
        return program
    if os.sep in name and Path(name).exists():
        raise UserError(f"{name}: not executable", NOT_EXECUTABLE)
    raise UserError(f"{name}: no such program", NOT_FOUND)


def refuse_nesting() -> None:
    inside = os.environ.get(names.ENV_REGION_DIR)
    if inside and names.ENV_SLICES in os.environ:
        raise UserError(
            f"this process already runs in slice {Path(inside).name}, and vgpu cannot divide a slice: "
            "start the command without vgpu run"
        )


def carried(record: Run) -> str:
    """A record for the environment, without the command's words: one variable may have 128 KiB (execve(2))."""
    return msgspec.json.encode(msgspec.structs.replace(record, command=())).decode()


def read_cards(root: Path, config: Config, simulate: str, simulator: Path | None) -> tuple[list[Gpu], bool]:
    """The usable cards: the driver's or simulated cards, without those that CUDA_VISIBLE_DEVICES hides.

    Also returns whether CUDA_VISIBLE_DEVICES may name them by index.
    """
    instead = "; to try it on simulated cards, write: vgpu run --simulate T4 -- COMMAND" if not simulate else ""
    try:
        if simulator is not None:
            inventory.use_simulator(simulate, simulator)
        plugin = config.device_plugin
        cards = inventory.read(split=plugin.deviceSplitCount, core_scaling=plugin.deviceCoreScaling)
    except ValueError as error:
        raise UserError(f"--simulate is {simulate!r}: {error}", 2) from None
    except inventory.InventoryError as error:
        raise UserError(f"{error}{instead}") from None
    if not cards.devices:
        why = f"{len(cards.mig)} in MIG mode" if cards.mig else "the driver lists none"
        raise UserError(f"there is no card that can be shared: {why}{instead}")
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = tier.scaled(contexts.learn(cards, root / "contexts.json").devices, tier.wanted(config), backed=False)
    chosen = list(found) if setting is None else visible(found, setting)
    if not chosen:
        raise UserError(f"CUDA_VISIBLE_DEVICES is {setting!r}: it selects no card of this machine")
    return chosen, countable(cards)


def acquire(
    store: SliceStore, cards: Sequence[Gpu], demand: Demand, command: Sequence[str], simulator: str, wait: float | None
) -> Claim:
    """Slices for `demand`, at once or after waiting in order of arrival; raises UserError with the reason per card."""
    queue = Queue(store.root)

    def attempt(ticket: Ticket | None) -> Claim | NoRoom:
        runs, ahead = strays.renamed(store.sweep(), cards, simulator), queue.ahead(ticket)
        if not demand.memory_mode and isinstance(refused := place(cards, runs, ahead, demand), NoRoom):
            return refused  # before the next look, which takes a while
        runs += strays.on_cards(strays.find(store, runs, users()), cards, simulator)
        asked = host_memory.bounded(demand, host_memory.now(store, runs)) if demand.memory_mode else demand
        if isinstance(asked, NoRoom):
            return asked
        found = place(cards, runs, ahead, asked)
        if isinstance(found, NoRoom):
            return found
        by_uuid = {card.uuid: card for card in cards}
        found.sort(key=lambda piece: by_uuid[piece.uuid].index)  # CUDA and NVML then have the same order
        promised = host_memory.promised(demand.host_memory, asked, found)
        return store.claim(found, [by_uuid[piece.uuid] for piece in found], command, simulator, time.time(), promised)

    deadline = time.monotonic() + (wait or 0)
    with store.locked():
        outcome = attempt(None)
        if isinstance(outcome, Claim):
            return outcome
        accepts = acceptable_here(cards, demand)
        if not accepts:
            raise UserError(refusal("this can never fit here", outcome, hint(cards, demand)))
        if wait is None:
            raise UserError(refusal("no room now (--wait waits for it)", outcome), os.EX_TEMPFAIL)
        ticket = queue.enter(accepts)
    with progress() as shown:
        while True:
            try:
                with store.locked():
                    position = len(queue.ahead(ticket)) + 1
                    outcome = attempt(ticket)
                    left = deadline - time.monotonic()
                    if isinstance(outcome, Claim) or left <= 0:
                        queue.leave(ticket)
            except FileNotFoundError:
                if store.is_there() and queue.holds(ticket):
                    raise
                store = SliceStore(state_dir())  # the state was removed: the first waiter makes it again
                if not queue.holds(ticket):
                    queue = Queue(store.root)
                    with store.locked():
                        ticket = queue.enter(accepts)
                continue
            if isinstance(outcome, Claim):
                return outcome
            if left <= 0:
                raise UserError(refusal(f"no room within {wait:g} s", outcome), os.EX_TEMPFAIL)
            shown.update(position, outcome.sentence)
            time.sleep(min(POLL * position, SLOWEST_POLL, left))


def users() -> dict[str, dict[int, int]]:
    """UUID → pid → bytes, for every card that reports its processes."""
    with suppress(inventory.InventoryError, pynvml.NVMLError):
        return inventory.users()
    return {}


def acceptable_here(cards: Sequence[Gpu], demand: Demand) -> frozenset[str]:
    """UUIDs of the cards that could serve `demand` if this machine were idle."""
    asked = host_memory.bounded(demand, host_memory.read().idle)
    return frozenset() if isinstance(asked, NoRoom) else acceptable(cards, asked)


def hint(cards: Sequence[Gpu], demand: Demand) -> str:
    """What would make a demand possible that can never fit; empty: nothing is known."""
    if demand.memory_mode or not acceptable_here(cards, msgspec.structs.replace(demand, memory_mode="static")):
        return ""
    return "; with --oversubscribe, memory that does not fit on the card goes to host memory"


def await_room(store: SliceStore, claim: Claim, *, tiered: bool = False) -> None:
    """Waits until the lent room of the claim's cards has been given back; UserError when there is no more progress.

    `tiered`: the command may have host memory, too, and waits only WHOLE_SECONDS for all of its guarantees.
    """
    least, deadline, began = -1, 0.0, time.monotonic()
    while True:
        late = tiered and time.monotonic() - began > WHOLE_SECONDS
        with store.locked():
            owed = lending.settle(store, store.sweep(), lending.later(claim.record) if late else None)
        mine = sum(owed.get(card.uuid, 0) for card in claim.record.cards)
        if least < 0 or mine < least:
            least, deadline = mine, time.monotonic() + BACK_SECONDS
        lacking = lending.sentence(claim.record.cards, owed)
        if not lacking:
            return
        if time.monotonic() > deadline:
            raise UserError(
                f"no room now: other commands still have {lacking} that vgpu lent them; they give this memory back "
                "when their work pauses; a stopped process or one with an open capture gives nothing back",
                os.EX_TEMPFAIL,
            )
        time.sleep(POLL)


def too_small(record: Run) -> list[str]:
    """A warning for each slice in which no program can start: it has less memory than one context takes on its card."""
    return [
        f"warning: {piece.mem} MiB are less than one context takes on {card.model} "
        f"({-(-card.context // MIB)} MiB): every CUDA program will run out of memory"
        for piece, card in zip(record.slices, record.cards, strict=True)
        if piece.mem * MIB < card.context
    ]


def beyond_reach(command: Sequence[str], *, strict: bool) -> list[str]:
    """A warning where a command visibly starts programs that the limits will not hold."""
    why = reach.doubt(command)
    if not why or (strict and reach.CLEARED in why):
        return []
    instead = "; --strict limits it" if reach.CLEARED in why else ""
    return [f"warning: {why}: the program gets the whole card, without limits{instead} (docs/limits.md)"]


def refusal(start: str, outcome: NoRoom, advice: str = "") -> str:
    return "\n  ".join((f"{start}: {outcome.sentence}{advice}", *outcome.per_card))


def limits(claim: Claim, demand: Demand, config: Config) -> Limits:
    """The limits in the region of a claim."""
    return Limits(
        cards=tuple(
            CardLimit(
                uuid=piece.uuid,
                memory=piece.mem * MIB,
                guarantee=piece.guarantee * MIB,
                context_bytes=card.context,
                cores=piece.cores,
                cores_ceiling=max(demand.cores_limit, piece.cores) if demand.cores_limit else 0,
            )
            for piece, card in zip(claim.record.slices, claim.record.cards, strict=True)
        ),
        core_policy="none" if config.device_plugin.disablecorelimit else demand.core_policy,
        priority=demand.request.priority or 0,
        allow_disable_control=config.device_plugin.allowDisableControl,
        oversubscribe=bool(demand.memory_mode),
        movable=demand.memory_mode == "movable",
        host_memory=claim.record.host_memory * MIB // len(claim.record.slices),
        fills_on_engine=config.device_plugin.fillsOn == "engine",
        copies_on_sms=config.device_plugin.copiesOn == "sms",
    )


def become(program: str, command: Sequence[str], environ: dict[str, str], held: Sequence[int]) -> NoReturn:
    """Executes the command, which inherits the locks; raises UserError when the kernel refuses the program."""
    for lock in held:
        inheritable(lock)
    # The interpreter ignores these signals for itself (os.exec* keeps that); a pipeline's `| head` must end the
    # command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, list(command), environ)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}", NOT_EXECUTABLE) from None


def inheritable(lock: int) -> int:
    """A copy of the lock's descriptor that survives execve, with a number that no script uses."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return fcntl.fcntl(lock, fcntl.F_DUPFD, min(LOCK_DESCRIPTOR, max(soft - 8, 3)))
