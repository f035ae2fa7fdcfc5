"""A container whose memory may be in host memory, on simulated cards, and the simulator's count of what it holds."""

from dataclasses import dataclass
from pathlib import Path

from preloaded import MIB, environment, python

from vgpu.native import CardLimit, Limits, Region, Usage, simulator

PRELUDE = """from driver_client import *
def attribute(which, pointer, kind=c_uint64):
    out = kind()
    return cu.cuPointerGetAttribute(byref(out), which, c_uint64(pointer)), out.value
def where(pointer):  # 2: memory of a card
    return attribute(2, pointer, c_uint)[1]
"""


@dataclass
class Container:
    """A region with the tier on, on simulated cards."""

    folder: Path
    region: Region
    env: dict[str, str]

    def python(self, script: str) -> list[str]:
        return python(PRELUDE + script, self.env)

    def usage(self) -> Usage:
        self.region.reap()
        return self.region.usage()

    def truth(self, card: int = 0) -> simulator.SimCard:
        return simulator.cards(self.folder / "cards")[card]


def container(
    folder: Path,
    *,
    cards: str = "H100",
    memory: int = 1024,
    guarantee: int = 512,
    host: int | None = 768,
    movable: bool = False,
    contexts: int = 1,
) -> Container:
    """Sizes in MiB, per card, in addition to this many contexts of each card."""
    simulator.create(folder / "cards", cards)
    (folder / "region").mkdir()
    limits = Limits(
        tuple(
            CardLimit(
                card.uuid,
                memory * MIB + contexts * card.context_bytes,
                guarantee * MIB + contexts * card.context_bytes,
                context_bytes=card.context_bytes,
            )
            for card in simulator.cards(folder / "cards")
        ),
        host_memory=None if host is None else host * MIB,
        oversubscribe=True,
        movable=movable,
    )
    region = Region.create(folder / "region", limits)
    return Container(folder, region, environment(folder, cards=cards, VGPU_DIR=str(folder / "region")))


#: what the program does at its end: charges, of the whole container, while it still runs, against what the cards hold
TRUTH = """
import os
from pathlib import Path
from vgpu.native import Region, simulator
def truth(card=0, contexts=1):
    usage = Region.open(Path(os.environ["VGPU_DIR"])).usage().cards[card]
    really = simulator.cards(Path(os.environ["VGPU_SIM_DIR"]))[card]
    assert (usage.resident, usage.host_used) == (really.used, really.host), (usage, really)
    mine = contexts * really.context_bytes
    return (usage.used - mine) // MIB, (usage.resident - mine) // MIB, usage.host_used // MIB
"""


KINDS = ("static", "movable", "pinned")  #: both modes; and a driver that cannot map host memory


def of_kind(folder: Path, kind: str) -> Container:
    """A container of one of KINDS."""
    return container(folder, cards="T4@12.4" if kind == "pinned" else "H100", movable=kind == "movable")
