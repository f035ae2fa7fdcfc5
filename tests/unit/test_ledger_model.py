"""Every interleaving of the ledger's algorithm (account.c, slots.c of libvgpu/src/region): processes, reapers, deaths.

One account. Shared memory is the account's word (used, tag), and per lane bytes, after, intent, done and the claim.
Plain stores go through a first-in-first-out buffer of their actor (x86-64's order; release stores on aarch64 allow no
more) and reach memory at any later moment; compare-and-swaps wait until the buffer is empty. An actor that dies has its
issued stores carried out and does nothing more. A word is read half by half.

At every end: used equals the sum of the lanes in use, no free lane keeps a byte. In every state: 0 <= used <= limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

FREE = -1  #: claim of a lane that a new process may use


class Lane(NamedTuple):
    bytes: int = 0
    after: int = 0
    intent: tuple[int, bool] = (0, False)  #: sequence number, active
    done: int = 0
    claim: int = FREE  #: the actor that may write here


class Store(NamedTuple):
    lane: int
    field: str
    value: int | tuple[int, bool]


class Actor(NamedTuple):
    at: str  #: the next step
    lane: int
    program: tuple[int, ...] = ()  #: amounts that an owner still has to charge (negative: to release)
    tag: tuple[int, int] = (-1, 0)  #: half of the word as last read
    used: int = 0
    seen: int = 0  #: another lane's `done` as last read
    buffer: tuple[Store, ...] = ()
    alive: bool = True


class State(NamedTuple):
    used: int
    tag: tuple[int, int]  #: lane and sequence number of the operation that moved the word last
    lanes: tuple[Lane, ...]
    actors: tuple[Actor, ...]


@dataclass(frozen=True)
class Model:
    limit: int
    owners: tuple[tuple[int, ...], ...]  #: programs; owner i begins in lane i
    successors: tuple[tuple[int, tuple[int, ...]], ...] = ()  #: (lane, program): takes the lane once it is free
    reapers: int = 1
    deaths: int = 1
    #: a wrong rule, to show that the model finds it: "no help", "done first", "add bytes", "book late"
    mistake: str = ""
    is_reaper: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        first = len(self.owners) + len(self.successors)
        object.__setattr__(self, "is_reaper", frozenset(range(first, first + self.reapers)))

    def start(self) -> State:
        owners = tuple(Actor("idle", i, program) for i, program in enumerate(self.owners))
        successors = tuple(Actor("take", lane, program) for lane, program in self.successors)
        reapers = tuple(Actor("look", -1) for _ in range(self.reapers))
        lanes = tuple(Lane(claim=i) for i in range(len(self.owners)))
        return State(0, (-1, 0), lanes, owners + successors + reapers)

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        """All possible next states."""
        dead = sum(not actor.alive for actor in state.actors)
        for me, actor in enumerate(state.actors):
            if not actor.alive:
                continue
            if dead < self.deaths and actor.at not in ("take", "look"):
                yield f"die {me}", self.die(state, me)
            if actor.buffer:
                yield f"drain {me}", self.drain(state, me)
            yield from self.act(state, me)

    def die(self, state: State, me: int) -> State:
        while state.actors[me].buffer:
            state = self.drain(state, me)
        return change(state, me, alive=False, at="dead", tag=(-1, 0), used=0, seen=0, program=())

    def drain(self, state: State, me: int) -> State:
        first, *rest = state.actors[me].buffer
        return change(write(state, first), me, buffer=tuple(rest))

    def act(self, state: State, me: int) -> Iterator[tuple[str, State]]:
        actor = state.actors[me]
        if actor.at == "end":
            return
        step = getattr(self, "do_" + actor.at)
        rmw = actor.at in ("take", "look", "raise", "swap", "free")
        if rmw and actor.buffer:
            return
        for following in step(state, me, actor):
            yield f"{actor.at} {me}", following

    # An owner's life

    def do_take(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        if state.lanes[actor.lane].claim == FREE:
            yield change(write(state, Store(actor.lane, "claim", me)), me, at="idle")

    def do_idle(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        if not actor.program:
            yield change(state, me, at="end")
        elif view(state, actor).bytes + actor.program[0] < 0:  # nothing to release: the charge was refused
            yield change(state, me, program=actor.program[1:])
        else:
            yield put(change(state, me, at="intend"), me, "after", view(state, actor).bytes + actor.program[0])

    # An operation, by an owner or by a reaper in a dead lane

    def do_intend(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        yield put(change(state, me, at="read_tag"), me, "intent", (view(state, actor).intent[0] + 1, True))

    def do_read_tag(self, state: State, me: int, _: Actor) -> Iterator[State]:
        yield change(state, me, at="read_used", tag=state.tag)

    def do_read_used(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        lane = view(state, actor)
        delta = lane.after - lane.bytes
        if delta > 0 and state.used + delta > self.limit:
            yield put(change(state, me, at="clear"), me, "intent", (lane.intent[0], False))
            return
        helps = actor.tag[0] not in (-1, actor.lane) and self.mistake != "no help"
        yield change(state, me, at="help" if helps else "swap", used=state.used)

    def do_help(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        done = state.lanes[actor.tag[0]].done
        yield change(state, me, at="swap" if done >= actor.tag[1] else "raise", seen=done)

    def do_raise(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        if state.lanes[actor.tag[0]].done == actor.seen:
            yield change(write(state, Store(actor.tag[0], "done", actor.tag[1])), me, at="swap", seen=0)
        else:
            yield change(state, me, at="help")

    def do_swap(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        lane = view(state, actor)
        if (state.used, state.tag) != (actor.used, actor.tag):
            yield change(state, me, at="read_tag")
        else:
            moved = state._replace(used=state.used + lane.after - lane.bytes, tag=(actor.lane, lane.intent[0]))
            yield change(moved, me, at="clear" if self.mistake == "book late" else "book", tag=(-1, 0), used=0, seen=0)

    def do_book(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        lane = view(state, actor)
        value = lane.after
        if self.mistake == "add bytes" and me in self.is_reaper:  # a repeated booking that is not idempotent
            value = lane.bytes + 1
        yield put(change(state, me, at="ended" if self.mistake == "book late" else "clear"), me, "bytes", value)

    def do_clear(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        following = "book" if self.mistake == "book late" and view(state, actor).intent[1] else "ended"
        yield put(change(state, me, at=following), me, "intent", (view(state, actor).intent[0], False))

    def do_ended(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        done = change(state, me, tag=(-1, 0), used=0, seen=0)
        yield (
            change(done, me, at="settled")
            if me in self.is_reaper
            else change(done, me, at="idle", program=actor.program[1:])
        )

    # Reaping: claim a dead lane, settle what its process was doing, release what it held

    def do_look(self, state: State, me: int, _: Actor) -> Iterator[State]:
        for number, lane in enumerate(state.lanes):
            if lane.claim != FREE and not state.actors[lane.claim].alive:
                yield change(write(state, Store(number, "claim", me)), me, at="settle", lane=number)

    def do_settle(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        pending = view(state, actor).intent[1]
        yield change(
            state, me, at=("ask_done" if self.mistake == "done first" else "ask_tag") if pending else "settled"
        )

    def do_ask_tag(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        applied = state.tag == (actor.lane, view(state, actor).intent[0]) or actor.seen > 0
        otherwise = "drop" if self.mistake == "done first" else "ask_done"
        yield change(state, me, at="book" if applied else otherwise, seen=0)

    def do_ask_done(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        lane = view(state, actor)
        applied = lane.done >= lane.intent[0]
        if self.mistake == "done first":
            yield change(state, me, at="ask_tag", seen=int(applied))
        else:
            yield change(state, me, at="book" if applied else "drop")

    def do_drop(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        yield put(change(state, me, at="settled"), me, "intent", (view(state, actor).intent[0], False))

    def do_settled(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        if view(state, actor).bytes:
            yield put(change(state, me, at="intend"), me, "after", 0)
        else:
            yield change(state, me, at="free")

    def do_free(self, state: State, me: int, actor: Actor) -> Iterator[State]:
        yield change(write(state, Store(actor.lane, "claim", FREE)), me, at="look", lane=-1)

    def explore(self) -> tuple[int, str]:
        """Number of states, and what is wrong with the first bad one ("" when all are right)."""
        seen = {self.start()}
        todo = list(seen)
        while todo:
            state = todo.pop()
            if not 0 <= state.used <= self.limit:
                return len(seen), f"used out of range: {state}"
            moves = False
            for name, following in self.steps(state):
                moves |= not name.startswith("die")
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
            if not moves and (wrong := self.wrong_end(state)):
                return len(seen), wrong
        return len(seen), ""

    def wrong_end(self, state: State) -> str:
        if not any(state.actors[me].alive for me in self.is_reaper):
            return ""  # no actor was left to clean up
        held = sum(lane.bytes for lane in state.lanes if lane.claim != FREE)
        left = [lane for lane in state.lanes if lane.claim == FREE and (lane.bytes or lane.intent[1])]
        return f"used {state.used}, lanes {held}: {state}" if held != state.used or left else ""


def change(state: State, me: int, **values: object) -> State:
    actors = list(state.actors)
    actors[me] = actors[me]._replace(**values)
    return state._replace(actors=tuple(actors))


def write(state: State, store: Store) -> State:
    lanes = list(state.lanes)
    lanes[store.lane] = lanes[store.lane]._replace(**{store.field: store.value})
    return state._replace(lanes=tuple(lanes))


def put(state: State, me: int, name: str, value: int | tuple[int, bool]) -> State:
    """A plain store: into the actor's buffer."""
    actor = state.actors[me]
    return change(state, me, buffer=(*actor.buffer, Store(actor.lane, name, value)))


def view(state: State, actor: Actor) -> Lane:
    """The actor's lane as the actor sees it: its own buffered stores first."""
    lane = state.lanes[actor.lane]
    for store in actor.buffer:
        if store.lane == actor.lane:
            lane = lane._replace(**{store.field: store.value})
    return lane


SOUND = {
    "two charge, one dies": Model(2, ((1,), (1,)), deaths=1),
    "a release dies": Model(2, ((2, -1), (1,)), deaths=1),
    "one too many": Model(2, ((2,), (1,)), deaths=1),
    "a reaper dies": Model(2, ((1,), (1,)), reapers=2, deaths=2),
    "a reused lane": Model(2, ((1,), (1,)), successors=((0, (1,)),), deaths=1),
    "a reused lane dies again": Model(1, ((1,),), successors=((0, (1, -1)),), reapers=1, deaths=2),
}


@pytest.mark.parametrize("name", SOUND)
def test_used_is_the_sum_of_the_lanes_in_every_interleaving(name: str) -> None:
    states, wrong = SOUND[name].explore()
    assert wrong == ""
    assert states > 100


@pytest.mark.parametrize(
    ("mistake", "model"),
    [
        ("no help", Model(2, ((1,), (1,)), deaths=1, mistake="no help")),
        ("done first", Model(2, ((1,), (1,)), deaths=1, mistake="done first")),
        ("book late", Model(2, ((1,), (1,)), deaths=1, mistake="book late")),
        ("add bytes", Model(2, ((1,),), reapers=2, deaths=2, mistake="add bytes")),
    ],
)
def test_a_wrong_rule_is_found(mistake: str, model: Model) -> None:
    _, wrong = model.explore()
    assert wrong, f"the model does not notice {mistake!r}"
