"""Cards and what is held on them as arrays: of one node (shape: cards) or of a cluster (shape: nodes × cards).

Arrays of one node keep the cards in the order of their index; where nodes differ in their number of cards, `present`
says which places are cards.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from vgpu.allocation import Held
from vgpu.devices import Gpu

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
T = TypeVar("T", bound=np.generic)

#: Rows of a usage array (shape: 5 × the shape of the cards), in the order of `Held`'s fields
SLOTS, MEM, PHYS, CORES, ALONE = range(5)
FIGURES: Final = 5


class CardState(msgspec.Struct, frozen=True):
    """One card and what pods hold on it."""

    gpu: Gpu
    held: Held = Held()
    cordoned: bool = False


def nothing_held(*shape: int) -> Ints:
    """A usage array of zeros for cards of this shape, each figure column-major as the cards are."""
    *nodes, cards = shape
    return np.moveaxis(np.zeros((FIGURES, cards, *nodes), dtype=np.int64), 1, -1)


def count(mask: Bools) -> Ints:
    """Number of cards of each node that are in the mask."""
    narrow = np.uint8 if mask.shape[-1] < 256 else np.uint16  # no wider than needed: this is several times as fast
    return np.asarray(np.add.reduce(mask.view(np.uint8), axis=-1, dtype=narrow), dtype=np.int64)


def of_nodes(array: NDArray[T], nodes: Ints) -> NDArray[T]:
    """The array (… × nodes × cards) for these nodes, column-major as well: plain indexing would not keep that."""
    return np.swapaxes(np.take(np.swapaxes(array, -1, -2), nodes, axis=-1), -1, -2)


def figures(held: Held) -> Ints:
    """One column of a usage array."""
    return np.array((held.slots, held.mem, held.phys, held.cores, held.alone), dtype=np.int64)


@dataclass(slots=True)
class Cards:
    """Facts about cards that do not depend on pods.

    All arrays have the same shape; all copies share `models` and `places`.
    """

    present: Bools
    healthy: Bools
    cordoned: Bools
    memory: Ints  #: MiB that slices may share
    physical: Ints  #: MiB of the card itself
    cores: Ints  #: % that slices may share
    slots: Ints
    numa: Ints
    foreign: Ints  #: MiB that others than vgpu have
    model: Ints  #: index in `models`
    models: list[str]
    places: Mapping[str, Sequence[tuple[int, ...]]]  #: UUID → indices of the cards with this UUID
    scaled: bool = False  #: on at least one card, now or earlier, slices may share more memory than the card has

    @classmethod
    def empty(cls, *shape: int) -> "Cards":
        # Column-major: most questions are sums over the few cards of each of many nodes.
        def zeros() -> Ints:
            return np.zeros(shape, dtype=np.int64, order="F")

        def false() -> Bools:
            return np.zeros(shape, dtype=np.bool_, order="F")

        return cls(false(), false(), false(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), zeros(), [], {})

    @classmethod
    def of(cls, states: Sequence[CardState]) -> tuple["Cards", Ints]:
        """Arrays of one node's cards in the given order, and their usage."""
        cards = cls.empty(len(states))
        usage = nothing_held(len(states))
        places: dict[str, list[tuple[int, ...]]] = {}
        for at, state in enumerate(states):
            cards.put((at,), state.gpu, cordoned=state.cordoned)
            usage[:, at] = figures(state.held)
            places.setdefault(state.gpu.uuid, []).append((at,))
        cards.places = places
        return cards, usage

    def put(self, place: tuple[int, ...], gpu: Gpu, *, cordoned: bool) -> None:
        """Writes one card; the caller keeps `places` up to date."""
        if gpu.model not in self.models:
            self.models.append(gpu.model)
        self.scaled = self.scaled or gpu.memory > gpu.physical_memory
        self.present[place] = True
        self.healthy[place] = gpu.healthy
        self.cordoned[place] = cordoned
        self.memory[place] = gpu.memory
        self.physical[place] = gpu.physical_memory
        self.cores[place] = gpu.cores
        self.slots[place] = gpu.slots
        self.numa[place] = gpu.numa
        self.foreign[place] = gpu.taken
        self.model[place] = self.models.index(gpu.model)

    def first(self, rows: int) -> "Cards":
        """The cards of the first nodes: views, not copies."""
        return self._each(lambda array: array[:rows])

    def copy(self) -> "Cards":
        """A copy that later changes do not affect; `places` is not copied."""
        return self._each(lambda array: array.copy(order="K"))

    def at(self, nodes: Ints) -> "Cards":
        """The cards of these nodes.

        `places` stays that of all nodes: select by UUID before this call.
        """
        return self._each(lambda array: of_nodes(array, nodes))

    def _each(self, part: Callable[[NDArray[Any]], NDArray[Any]]) -> "Cards":
        return Cards(
            part(self.present),
            part(self.healthy),
            part(self.cordoned),
            part(self.memory),
            part(self.physical),
            part(self.cores),
            part(self.slots),
            part(self.numa),
            part(self.foreign),
            part(self.model),
            self.models,
            self.places,
            self.scaled,
        )


def load(cards: Cards, usage: Ints) -> Floats:
    """How full each card is, 0 to 1: the larger of its memory share and its core share."""
    memory = (usage[MEM] + cards.foreign) / np.maximum(cards.memory, 1)
    cores = usage[CORES] / np.maximum(cards.cores, 1)
    return np.asarray(np.maximum(memory, cores), dtype=np.float64)


def node_load(cards: Cards, usage: Ints) -> Floats:
    """How full each node is, 0 to 1: the larger of its memory share and its core share over all cards."""

    def share(used: Ints, total: Ints) -> Floats:
        held = np.where(cards.present, used, 0).sum(axis=-1)
        of = np.where(cards.present, total, 0).sum(axis=-1)
        return np.asarray(held / np.maximum(of, 1), dtype=np.float64)

    return np.asarray(
        np.maximum(share(usage[MEM] + cards.foreign, cards.memory), share(usage[CORES], cards.cores)), dtype=np.float64
    )
