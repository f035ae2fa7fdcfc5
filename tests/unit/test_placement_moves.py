"""Records that follow the ids: in any order of writes, no card is ever recorded beyond its size."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.allocation import Held, excess, merge
from vgpu.devices import Gpu
from vgpu.placement.moves import Mover, Steps, steps

SIZE = 100
CARDS = {uuid: Gpu(uuid, index, "Tesla T4", SIZE) for index, uuid in enumerate("ABC")}


def holds(uuid: str, mem: int) -> dict[str, Held]:
    return {uuid: Held(1, mem, mem)}


def mover(uid: str, mem: int, here: str, there: str) -> Mover:
    now, then = holds(here, mem), holds(there, mem)
    return Mover(uid, now, then, merge(now, then))


class Records:
    """The content of the API server: pods that stay, and movers with their last written record."""

    def __init__(self, movers: list[Mover], stay: dict[str, Held] | None = None) -> None:
        self.stay = stay or {}
        self.waiting = {one.uid: one for one in movers}
        self.there: dict[str, Mover] = {}
        self.check()

    def held(self, records_only: bool = False) -> dict[str, Held]:
        total = self.stay
        for one in self.waiting.values():
            total = merge(total, dict(one.now if records_only else one.both))
        for one in self.there.values():
            total = merge(total, dict(one.then))
        return total

    def check(self) -> None:
        for uuid, now in self.held(records_only=True).items():
            assert now.mem <= SIZE, f"card {uuid} is recorded with {now.mem}"

    def todo(self) -> Steps:
        return steps(CARDS, self.held(), self.waiting.values())

    def take(self, uid: str, aside: bool) -> None:
        """A write takes effect."""
        one = self.waiting.pop(uid)
        if aside:
            self.waiting[uid] = replace(one, now={}, both=one.then, leaving=True, asked=False)
        else:
            self.there[uid] = one
        self.check()

    def run(self) -> None:
        """Makes all possible moves."""
        for _ in range(4 * len(self.waiting) + 1):
            todo = self.todo()
            for uid in (*todo.there, *filter(None, [todo.aside])):
                self.take(uid, aside=uid == todo.aside)
        assert self.todo() == Steps()


def test_a_move_to_a_card_with_room_is_made() -> None:
    records = Records([mover("one", 60, "A", "B")], holds("B", 40))
    assert records.todo() == Steps(("one",))


def test_a_move_to_a_card_without_room_waits_where_it_is() -> None:
    records = Records([mover("one", 60, "A", "B")], holds("B", 41))
    assert records.todo() == Steps()


def test_moves_compete_for_room_and_one_of_them_waits() -> None:
    records = Records([mover("one", 60, "A", "B"), mover("two", 60, "C", "B")])
    assert records.todo() == Steps(("one",))


@pytest.mark.parametrize("circle", ["AB", "ABC"])
def test_pods_that_swapped_cards_make_room_for_each_other(circle: str) -> None:
    movers = [mover(f"p{n}", 60 + n, here, (circle * 2)[n + 1]) for n, here in enumerate(circle)]
    records = Records(movers)
    assert records.todo() == Steps(aside="p0")
    records.run()
    assert not records.waiting


def test_who_cannot_move_anyway_makes_no_room() -> None:
    records = Records([mover("one", 60, "A", "B"), mover("two", 70, "B", "A")], holds("A", 31))
    records.run()
    assert records.waiting.keys() == {"one", "two"}
    assert not any(one.leaving for one in records.waiting.values())


def test_what_others_leave_is_not_taken_before_they_have_left() -> None:
    records = Records([mover("one", 60, "A", "B"), mover("two", 60, "B", "C")])
    assert records.todo() == Steps(("two",))
    records.waiting["two"] = replace(records.waiting["two"], asked=True)
    assert records.todo() == Steps()
    records.take("two", aside=False)
    assert records.todo() == Steps(("one",))


@given(st.data())
def test_no_order_of_writes_and_binds_passes_a_card(data: st.DataObject) -> None:
    used = dict.fromkeys(CARDS, 0)
    movers = []
    for n in range(data.draw(st.integers(1, 6))):
        here, there = data.draw(st.permutations("ABC"))[:2]
        mem = data.draw(st.integers(1, 80))
        if used[here] + mem <= SIZE:
            used[here] += mem
            movers.append(mover(f"p{n}", mem, here, there))
    records = Records(movers)
    sent: dict[str, bool] = {}
    for _ in range(data.draw(st.integers(0, 12))):
        todo = records.todo()
        for uid in (*todo.there, *filter(None, [todo.aside])):
            sent[uid] = uid == todo.aside
            records.waiting[uid] = replace(records.waiting[uid], asked=True)
        match data.draw(st.sampled_from(("answer", "bind"))):
            case "answer" if sent:
                uid = data.draw(st.sampled_from(sorted(sent)))
                records.take(uid, aside=sent.pop(uid))
            case "bind":
                uuid, mem = data.draw(st.sampled_from("ABC")), data.draw(st.integers(1, 60))
                if excess(CARDS, records.held(), holds(uuid, mem)) is None:
                    records.stay = merge(records.stay, holds(uuid, mem))
                    records.check()
    for uid, aside in sent.items():
        records.take(uid, aside=aside)
    records.run()
