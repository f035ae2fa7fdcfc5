"""What containers with more memory than their guarantee may have beyond it.

Containers whose blocks can move get lent room of the card; others get host memory behind the card.

The agent writes this into the containers' limits once a second. Before a new container starts, the agent first takes
back what is lent of its cards. Guarantees and loans never sum up to more than a card. A container starts when the lent
room has been given back. A container that may also have host memory waits only some seconds for all of its guarantee.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import msgspec

from device_plugin.cards import Cards
from device_plugin.container_lifecycle import Course
from device_plugin.holdings import Holdings
from device_plugin.looks import Looks
from device_plugin.overdue_loans import OVERDUE_SECONDS, Debts
from device_plugin.refusal import Refusal
from device_plugin.sandbox import Entry, Sandboxes
from device_plugin.watch import Watch
from vgpu import tier
from vgpu.allocation import Held, merge
from vgpu.devices import Gpu, GpuSlice
from vgpu.native import CardLimit, Limits, Region, Usage
from vgpu.tier import MIB, Need, Want, on_tier

log = logging.getLogger(__name__)

#: The agent keeps room for this long for a container that it refused for lack of room; the kubelet tries again within
#: this time
COMING_SECONDS: Final = 60.0
#: A container that may have host memory waits this long for all of its guarantee, then only for what it needs at once.
#: Neighbours whose work pauses from time to time give back room within this time
WHOLE_SECONDS: Final = 5.0


class _Tenant(msgspec.Struct, frozen=True):
    """One container with memory on the tier; its region is open."""

    region: Region
    limits: Limits
    usage: Usage
    absent: tuple[int, ...] = ()  #: of each card: bytes that the container claims and does not have

    def resident(self, at: int) -> int:
        """Bytes of a card that the container has.

        Its own charges are not proof: its limit and the driver's count bound them.
        """
        limit, said = self.limits.cards[at].memory or 0, self.usage.cards[at].resident
        return max(0, min(limit, said - (self.absent[at] if self.absent else 0)))

    def above(self, at: int) -> int:
        """Bytes of a card that the container has beyond its guarantee and can give back."""
        return max(0, self.resident(at) - _guarantee(self.limits.cards[at])) if self.limits.movable else 0


class _Coming(msgspec.Struct, frozen=True):
    """A pod with a container that is about to start; times are monotonic seconds."""

    holds: Mapping[str, Held]  #: by card, including this container
    since: float
    until: float  #: until this time, room is kept for the pod


_Tenants = Mapping[Entry, _Tenant]


class Lending:
    """Thread-safe: only one thread at a time works on a container's limits."""

    def __init__(
        self,
        cards: Cards,
        sandboxes: Sandboxes,
        holdings: Holdings,
        watch: Watch,
    ) -> None:
        """`watch`: which processes use the cards; until this is known, nothing more is lent.

        Earlier loans are still taken back.
        """
        self._watch = watch
        self._cards = cards
        self._sandboxes = sandboxes
        self._holdings = holdings
        self._lock = threading.Lock()
        self._host_memory: Mapping[Entry, int] = {}  # of each container, as last written
        # bytes that each container may have in host memory, by its budgets now and before
        self._most_host: dict[Entry, int] = {}
        self._coming: dict[str, _Coming] = {}  # by pod uid
        self._course = Course()
        self._debts = Debts()
        self._looks = Looks()
        self._owed: Mapping[tuple[Entry, str], int] = {}

    def settle(self) -> None:
        """Sets loans and budgets by what containers have allocated now; OSError: the folders cannot be listed.

        Does nothing while a container is being started, which may take as long as the driver takes to answer.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._settle()
        finally:
            self._lock.release()

    def _settle(self) -> None:
        with ExitStack() as stack:
            self._lend(tenants := self._tenants(stack))
            self._budget(tenants)

    @contextmanager
    def making_room(
        self, uid: str, container: str, holds: Mapping[str, Held], slices: Sequence[GpuSlice]
    ) -> Iterator[int]:
        """Surrounds the start of one container.

        Yields the bytes of host memory that the container may use behind each of its cards. From now on, nothing that
        the container and the rest of its pod hold is lent. `uid`: of the pod; `holds`: what the pod holds with this
        container, by card. Raises Refusal while neighbours still have lent room that this container needs.
        """
        with self._lock:
            now = time.monotonic()
            since = self._coming[uid].since if uid in self._coming else now
            self._coming[uid] = _Coming(holds, since, now + COMING_SECONDS)
            self._course.starts(uid, container, self._holdings.pod(uid))
            with ExitStack() as stack:
                self._lend(tenants := self._tenants(stack))
                promised = merge(self._holdings.granted(without={uid}), dict(holds))
                whole = not on_tier(slices) or now - since < WHOLE_SECONDS
                self._given_back(tenants, promised, slices, whole=whole)
                others = {
                    entry: one for entry, one in tenants.items() if (entry.pod_uid, entry.container) != (uid, container)
                }
                budget = self._budget(others, slices)
            yield budget
            self._coming.pop(uid, None)
            if on_tier(slices):
                self._settle()  # so that its first allocations find what can be lent to it

    def _promised(self) -> dict[str, Held]:
        """What is promised to pods that have started, and to pods that are about to start."""
        now = time.monotonic()
        self._coming = {uid: one for uid, one in self._coming.items() if one.until > now}
        promised = self._holdings.granted(without=self._coming)
        for coming in self._coming.values():
            promised = merge(promised, dict(coming.holds))
        return promised

    def _given_back(
        self, tenants: _Tenants, promised: Mapping[str, Held], slices: Sequence[GpuSlice], *, whole: bool
    ) -> None:
        """Raises Refusal while other containers have lent room on these cards that guarantees need.

        `whole`: all of the starting container's guarantee counts, else only the part that it needs at once.
        """
        above = _above(tenants)
        for piece in slices:
            gpu = self._cards.by_uuid.get(piece.uuid)
            if gpu is None:
                continue
            guarantee = piece.guarantee * MIB
            later = 0 if whole else guarantee - tier.at_first(guarantee, gpu.context)
            guaranteed = promised.get(gpu.uuid, Held()).phys * MIB - later
            owed = tier.owed(_lendable(gpu), guaranteed, above.get(gpu.uuid, 0), self._watch.uncounted(gpu.uuid))
            if owed:
                raise Refusal(
                    f"other containers still have {-(-owed // MIB)} MiB of card {gpu.index} ({gpu.model}, {gpu.uuid}) "
                    "that vgpu lent them; they give this memory back when their work on the card pauses",
                    transient=True,
                    waits=True,
                )

    def _tenants(self, stack: ExitStack) -> _Tenants:
        known = self._sandboxes.granted()
        self._course.forget(known.keys() | self._coming.keys())
        found = {}
        for entry in self._sandboxes.entries():
            if not on_tier(known.get(entry.pod_uid, {}).get(entry.container, ())):
                continue
            try:
                region = stack.enter_context(Region.open(entry.path, writable=True))
                region.reap()  # a process that has ended gives nothing back
                limits = region.limits()
                absent = tuple(self._watch.absent(entry, card.uuid) for card in limits.cards)
                tenant = _Tenant(region, limits, region.usage(), absent)
                if tenant.usage.process_count or not self._ended(entry, known[entry.pod_uid]):
                    found[entry] = tenant
                else:
                    for at, card in enumerate(tenant.usage.cards):
                        if card.lent:
                            region.lend(at, 0)
            except OSError as error:
                log.debug("%s: %s", entry.path, error)
        return found

    def _ended(self, entry: Entry, granted: Collection[str]) -> bool:
        """Whether a container without processes will not run again."""
        pod = self._holdings.pod(entry.pod_uid)
        return pod is not None and (pod.finished or self._course.ended(pod, entry.container, granted))

    def _lend(self, tenants: _Tenants) -> None:
        """Puts the loans in force."""
        promised = self._promised() if tenants else {}
        self._tell(tenants, promised)
        wants: dict[str, dict[tuple[Entry, int], Want]] = {}
        for entry, tenant in tenants.items():
            for at, card in enumerate(tenant.limits.cards if tenant.limits.movable else ()):
                wants.setdefault(card.uuid, {})[entry, at] = _want(tenant, at)
        cards = self._cards.by_uuid
        loans: dict[tuple[Entry, int], int] = {}
        for uuid, of_card in wants.items():
            physical = _lendable(cards[uuid]) if uuid in cards else 0
            free = tier.room(physical, promised.get(uuid, Held()).phys * MIB, self._watch.uncounted(uuid))
            loans |= tier.loans(free, of_card)
        changes = [(loan - tenants[entry].usage.cards[at].lent, entry, at) for (entry, at), loan in loans.items()]
        for change, entry, at in sorted(changes, key=lambda one: one[0]):  # loans that shrink come first
            if change < 0 or (change and self._watch.knows):
                try:
                    tenants[entry].region.lend(at, loans[entry, at])
                except OSError as error:
                    log.warning("%s: %s", entry.path, error)

    def _tell(self, tenants: _Tenants, promised: Mapping[str, Held]) -> None:
        """Reports containers that for long have given back nothing of what others are guaranteed."""
        above, cards = _above(tenants), self._cards.by_uuid
        short = {
            uuid
            for uuid, gpu in cards.items()
            if tier.owed(
                _lendable(gpu), promised.get(uuid, Held()).phys * MIB, above.get(uuid, 0), self._watch.uncounted(uuid)
            )
        }
        self._owed = {
            (entry, card.uuid): max(0, tenant.above(at) - tenant.usage.cards[at].lent)
            for entry, tenant in tenants.items()
            for at, card in enumerate(tenant.limits.cards)
            if card.uuid in short
        }
        for one in self._debts.once(self._owed, self._looks.at(time.monotonic())):
            gpu = cards[one.card]
            sentence = (
                f"Container {one.entry.container} must give back {-(-one.bytes // MIB)} MiB of card {gpu.index} "
                f"({gpu.model}, {gpu.uuid}) that vgpu lent it, since they are guaranteed to others. It has given back "
                f"nothing for {OVERDUE_SECONDS:.0f} s: its work on the card does not pause"
            )
            self._watch.keeps(one.entry, sentence, again=one.again)

    def _budget(self, tenants: _Tenants, slices: Sequence[GpuSlice] = ()) -> int:
        """Puts the budgets of host memory in force.

        Returns the budget of a container with these slices that is about to start.
        """
        above = _above(tenants)
        coming = need(slices, above)
        if self._cards.backed is None:
            return coming.bytes if coming else 0  # the amount to share is not known yet
        total = self._cards.host_memory * MIB
        needs: dict[Entry | None, Need] = {
            entry: _need_of(tenant, above, self._may_have(entry, tenant)) for entry, tenant in tenants.items()
        }
        if coming:
            needs[None] = coming
        budgets = tier.budgets(total, needs)
        for entry, tenant in tenants.items():
            if tenant.limits.host_memory != budgets[entry]:
                try:
                    tenant.region.set_limits(msgspec.structs.replace(tenant.limits, host_memory=budgets[entry]))
                except OSError as error:
                    log.warning("%s: %s", entry.path, error)
        self._host_memory = {entry: budgets[entry] for entry in tenants}
        self._most_host = {entry: max(budgets[entry], self._may_have(entry, one)) for entry, one in tenants.items()}
        return budgets.get(None, 0)

    def _may_have(self, entry: Entry, tenant: _Tenant) -> int:
        """Bytes of host memory that a container can have behind a card, regardless of what the container reports.

        This is its budget, or what it still has of an earlier, larger budget.
        """
        used = max((card.host_used for card in tenant.usage.cards), default=0)
        return max(tenant.limits.host_memory or 0, min(self._most_host.get(entry, 0), used))

    def host_memory(self, entry: Entry) -> int:
        """Bytes of host memory that a container may use behind each of its cards."""
        return self._host_memory.get(entry, 0)

    def owed(self, entry: Entry, card: str) -> int:
        """Bytes of a card (UUID) that a container has to give back because they are guaranteed to others."""
        return self._owed.get((entry, card), 0)


def _above(tenants: _Tenants) -> dict[str, int]:
    """Bytes of each card that movable containers have beyond their guarantees."""
    found: dict[str, int] = {}
    for tenant in tenants.values():
        for at, card in enumerate(tenant.limits.cards):
            found[card.uuid] = found.get(card.uuid, 0) + tenant.above(at)
    return found


def need(slices: Sequence[GpuSlice], above: Mapping[str, int]) -> Need | None:
    """Host memory that a container with these slices needs when it starts; None: nothing.

    `above`: bytes of each card that others have beyond their guarantees.
    """
    if not on_tier(slices):
        return None
    lack = max(min(piece.guarantee * MIB, above.get(piece.uuid, 0)) for piece in slices)
    behind = max(piece.mem - piece.guarantee for piece in slices)
    return Need(behind * MIB, len(slices), lack=lack)


def _need_of(tenant: _Tenant, above: Mapping[str, int], most: int) -> Need:
    """`most`: bytes that the container can have behind a card."""
    cards = list(zip(tenant.limits.cards, tenant.usage.cards, strict=True))
    used = [min(usage.host_used, most) for _, usage in cards]
    return Need(
        bytes=max(((card.memory or 0) - _guarantee(card) for card, _ in cards), default=0),
        cards=len(cards),
        lack=max(
            (max(0, min(_guarantee(card) - usage.resident, above[card.uuid])) for card, usage in cards), default=0
        ),
        used=max(used, default=0),
        sum=sum(used),
    )


def _lendable(gpu: Gpu) -> int:
    """Bytes of a card that containers may have: its memory less what the administrator keeps back."""
    return min(gpu.memory, gpu.physical_memory) * MIB


def _guarantee(card: CardLimit) -> int:
    return (card.memory or 0) if card.guarantee is None else card.guarantee


def _want(tenant: _Tenant, at: int) -> Want:
    card = tenant.limits.cards[at]
    guarantee = _guarantee(card)
    return Want(max(0, tenant.usage.cards[at].used - guarantee), (card.memory or 0) - guarantee)
