"""Many claims at one moment: a card's memory is given once."""

import threading
from pathlib import Path

from vgpu.devices import Gpu
from vgpu.errors import UserError
from vgpu.resources import GpuRequest
from vgpu.workstation import locks
from vgpu.workstation.place import Demand
from vgpu.workstation.run import acquire
from vgpu.workstation.slices import Claim, SliceStore

CLAIMERS, ROUNDS = 8, 25
CARD = Gpu("GPU-a", 0, "Tesla T4", 15360)


def test_one_of_many_at_once_gets_the_last_room(tmp_path: Path) -> None:
    start = threading.Barrier(CLAIMERS)
    won: list[Claim] = []
    refused: list[UserError] = []

    def claim() -> None:
        store = SliceStore(tmp_path, in_use=lambda directory: locks.is_held(directory / "lock"))
        start.wait()
        try:
            won.append(acquire(store, [CARD], Demand(GpuRequest(1, 10000)), ["true"], "", None))
        except UserError as error:
            refused.append(error)

    for _ in range(ROUNDS):
        won.clear()
        refused.clear()
        threads = [threading.Thread(target=claim) for _ in range(CLAIMERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(refused)) == (1, CLAIMERS - 1)
        SliceStore(tmp_path).give_up(won[0])
