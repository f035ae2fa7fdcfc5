"""Loans change one container after the other: guarantees and loans never sum up to more than the card."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from device_plugin.cards import Cards
from device_plugin.lending import Lending, _Tenant
from device_plugin.sandbox import Entry
from device_plugin.watch import Watch
from vgpu.allocation import Held
from vgpu.devices import Gpu, Inventory
from vgpu.native import CardLimit, CardUsage, Limits, Region, Usage
from vgpu.tier import MIB, Scaling

CARD = 1000  #: MiB
SIZES = st.integers(0, 400)


class Loans:
    """The loans of containers, and their largest sum so far."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most = 0

    def take(self, name: str, amount: int) -> None:
        self.now[name] = amount
        self.most = max(self.most, sum(self.now.values()))


class Container:
    """A region that records its loan."""

    def __init__(self, loans: Loans, name: str) -> None:
        self.loans, self.name = loans, name

    def lend(self, card: int, amount: int) -> None:
        assert card == 0
        self.loans.take(self.name, amount)


class Knowing:
    """A watch that has seen no other process on the cards."""

    knows = True

    def uncounted(self, card: str) -> int:
        assert card == "GPU-a"
        return 0


@given(st.lists(st.tuples(SIZES, SIZES, SIZES), min_size=1, max_size=6), st.data())
def test_what_is_taken_back_comes_before_what_is_given(pods: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Each pod: guarantee, what its limit is above that, and what it has allocated above it."""
    unused = cast(Any, None)
    cards = Cards(Inventory(devices=(Gpu("GPU-a", 0, "T4", CARD, CARD),)))
    lending, loans = Lending(cards, unused, unused, cast(Watch, Knowing())), Loans()
    promised = {"GPU-a": Held(phys=sum(guarantee for guarantee, _, _ in pods))}
    lending._holdings = cast(Any, SimpleNamespace(granted=lambda without: promised))  # noqa: ARG005 its name
    for _ in range(2):
        tenants = {}
        for at, (guarantee, more, _) in enumerate(pods):
            beyond = data.draw(st.integers(0, more))
            limit = CardLimit("GPU-a", (guarantee + more) * MIB, guarantee=guarantee * MIB)
            usage = CardUsage(used=(guarantee + beyond) * MIB, lent=loans.now.get(str(at), 0))
            limits = Limits((limit,), oversubscribe=True, movable=True)
            tenants[Entry("uid", str(at), Path())] = _Tenant(
                cast(Region, Container(loans, str(at))), limits, Usage((usage,), ())
            )
        lending._lend(tenants)
        assert promised["GPU-a"].phys * MIB + loans.most <= max(CARD, promised["GPU-a"].phys) * MIB


class Books:
    """A region whose limits can be set."""

    def __init__(self) -> None:
        self.limits = Limits(())

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits


def test_who_says_that_it_has_host_memory_that_it_was_never_given_takes_none_from_others() -> None:
    cards = Cards(Inventory(devices=(Gpu("GPU-a", 0, "T4", CARD, CARD),)), Scaling(2, host_memory=1000))
    cards.back(True)
    unused = cast(Any, None)
    lending = Lending(cards, unused, unused, cast(Watch, Knowing()))
    first, lacks = (Entry("uid", name, Path()) for name in ("first", "lacks"))
    books = {entry: Books() for entry in (first, lacks)}

    def turn(budget: int, uses: int) -> dict[Entry, int]:
        """Budgets (MiB) after a look: the first container is above its guarantee and claims to use `uses`."""
        limit = CardLimit("GPU-a", 700 * MIB, guarantee=300 * MIB)
        tenants = {
            entry: _Tenant(
                cast(Region, books[entry]),
                Limits((limit,), oversubscribe=True, movable=True, host_memory=given * MIB),
                Usage((CardUsage(host_used=used * MIB, resident=resident * MIB),), ()),
            )
            for entry, given, used, resident in ((first, budget, uses, 600), (lacks, 400, 0, 0))
        }
        lending._budget(tenants)
        return {entry: (books[entry].limits.host_memory or 0) // MIB for entry in tenants}

    assert turn(100, 10**6)[lacks] == 700, "its budget is what it can have: all else is free"
    assert turn(500, 10**6)[lacks] == 500, "500 of 1000 are free"
    assert turn(100, 500)[lacks] == 500, "it may have that still of a budget that was larger"
    assert turn(100, 200)[lacks] == 700
    assert turn(100, 500)[lacks] == 500, "what was put in force is 500 again"
