"""Processes of one container that allocate and free at random where not all fits on the card, killed at any moment."""

import random
import subprocess
import time
from pathlib import Path

import pytest
from preloaded import compiled
from tiered import Container, container

PROCESSES, KILLS = 4, 25


def client(box: Container, seed: int, operations: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [compiled("tier_storm.c", driver=True), str(seed), str(operations)],
        env=box.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(box: Container) -> None:
    """At any moment: nothing is above its limit."""
    usage, limit = box.region.usage(), box.region.limits().cards[0]
    assert usage.cards[0].used <= (limit.memory or 0)
    assert usage.cards[0].resident <= (limit.guarantee or 0)
    assert usage.saturated == 0


@pytest.mark.parametrize("mode", ["static", "movable", "pinned"])
def test_kill_9_at_random_moments_loses_and_keeps_nothing(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)
    cards = "T4@12.4" if mode == "pinned" else "H100"
    box = container(
        tmp_path, cards=cards, memory=1200, guarantee=400, host=700, contexts=PROCESSES, movable=mode == "movable"
    )
    crowd = [client(box, seed, 0) for seed in range(PROCESSES)]
    for kill in range(KILLS):
        time.sleep(chance.uniform(0, 0.1))  # the moment is what is random
        victim = crowd.pop(chance.randrange(len(crowd)))
        victim.kill()
        _, words = victim.communicate()
        assert victim.returncode == -9, words
        check(box)
        crowd.append(client(box, 100 + kill, 0))
    resting = [client(box, 200 + number, 400) for number in range(PROCESSES)]
    for victim in crowd:
        time.sleep(chance.uniform(0, 0.05))
        victim.kill()
        _, words = victim.communicate()
        assert victim.returncode == -9, words
    for process in resting:  # each has its context before any of them fills the card
        assert process.stdout
        assert process.stdout.readline() == "begun\n", process.communicate()
    for process in resting:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    for process in resting:
        assert process.stdout
        assert process.stdout.readline().startswith("done "), process.communicate()
    usage, card = box.usage().cards[0], box.truth()
    assert (usage.resident, usage.host_used) == (card.used, card.host)
    assert usage.host_used > 0
    for process in resting:
        _, words = process.communicate("\n", timeout=30)
        assert process.returncode == 0, words
    usage = box.usage().cards[0]
    assert (usage.used, usage.resident, usage.host_used) == (0, 0, 0)
    assert (box.truth().used, box.truth().host) == (0, 0)
