"""Collectives under a core limit: kernels that spin until their peers on other cards have started."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from preloaded import environment

from vgpu.native import CardLimit, Limits, Region, simulator

RANKS = """
from driver_client import *
ok(cu.cuInit(0))
ranks = []
for device in (0, 1):
    context = c_void_p()
    ok(cu.cuDevicePrimaryCtxRetain(byref(context), device))
    ok(cu.cuCtxSetCurrent(context))
    ranks.append((context, function("all_meet2_2ms")))
print("ready", flush=True)
while True:
    for context, kernel in ranks:
        ok(cu.cuCtxSetCurrent(context))
        ok(launch(kernel))
"""


@pytest.mark.parametrize("cores", [(20, 20), (50, 50), (20, 50)])
def test_two_cards_go_on_as_fast_as_the_smaller_share_lets_one(tmp_path: Path, cores: tuple[int, int]) -> None:
    simulator.create(tmp_path / "cards", "T4x2")
    cards = simulator.cards(tmp_path / "cards")
    (tmp_path / "region").mkdir()
    limits = Limits(tuple(CardLimit(card.uuid, None, cores=share) for card, share in zip(cards, cores, strict=True)))

    def look() -> list[int]:
        books, metered = simulator.cards(tmp_path / "cards"), region.usage().cards
        return [*(card.busy_ns for card in books), *(card.gpu_ns for card in metered), time.monotonic_ns()]

    with Region.create(tmp_path / "region", limits) as region:
        env = environment(tmp_path, cards="T4x2", VGPU_DIR=str(region.directory))
        ranks = subprocess.Popen([sys.executable, "-c", RANKS], env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert ranks.stdout
            assert ranks.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 20
            while min(look()[:2]) < 300_000_000:  # what idling had earned is spent
                assert time.monotonic() < deadline, "no progress"
                time.sleep(0.05)
            begun = look()
            while time.monotonic_ns() < begun[-1] + 3_000_000_000:
                time.sleep(0.05)
            passed = [after - before for before, after in zip(begun, look(), strict=True)]
        finally:
            ranks.kill()
            ranks.communicate()
    first, second, *metered = (100 * ns / passed[-1] for ns in passed[:-1])
    assert min(cores) * 0.9 <= min(first, second)  # what one card alone gets, within 10 %
    assert first <= cores[0] + 1.5
    assert second <= cores[1] + 1.5
    assert metered == pytest.approx([first, second], abs=1)
