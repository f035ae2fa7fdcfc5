"""Random work in four processes at twice what a card may hold, while blocks move, with kill -9: `make storm-moves`.

Round after round: four processes of two threads do their operations while memory of the card is lent and taken back;
one of them may be killed amid that. When the others have done theirs, with their blocks still allocated, each has found
every byte that it looked at to be right, and charges are compared with what the simulated card says. Ends with 1 at
the first thing that is wrong.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from select import select
from signal import SIGKILL

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "tests/native")]
from preloaded import MIB, compiled, environment  # noqa: E402  (behind the folder above)

from vgpu.native import CardLimit, Limits, Region, simulator  # noqa: E402  (behind the folder above)

GUARANTEE, LIMIT = 128 * MIB, 256 * MIB
PROCESSES, THREADS, BLOCKS = 4, 2, 10
PATIENCE_S, REST_S = 300, 10


class Wrong(Exception):
    """What does not hold."""


def differences(folder: Path, region: Region, living: int) -> dict[str, tuple[int, int]]:
    """What charges say and what the card's books say, where that is not the same."""
    region.reap()
    usage = region.usage()
    charged, card = usage.cards[0], simulator.cards(folder / "cards")[0]
    device = card.used - living * (card.context_bytes + card.module_bytes)
    faults = sum(sum(process.faults) for process in simulator.processes(folder / "cards"))
    found = {"resident": (charged.resident, device), "host": (charged.host_used, card.host), "faults": (faults, 0)}
    found |= {"saturated": (usage.saturated, 0), "above the limit": (max(charged.used - LIMIT, 0), 0)}
    return {what: both for what, both in found.items() if both[0] != both[1]}


def truth(folder: Path, region: Region, living: int) -> None:
    """Compares charges with the card's books, once blocks have come to rest; raises Wrong."""
    until = time.monotonic() + REST_S
    while found := differences(folder, region, living):
        if time.monotonic() > until:
            raise Wrong(", ".join(f"{what}: {here}, not {there}" for what, (here, there) in found.items()))
        time.sleep(0.05)


def start(folder: Path, seed: int, operations: int) -> subprocess.Popen[str]:
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [compiled("tier_moves.c", driver=True), *map(str, (seed, THREADS, operations, BLOCKS))],
            env=environment(folder, VGPU_DIR=str(folder / "region"), LIBCUDA_LOG_LEVEL="4"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )


def one_round(folder: Path, region: Region, chance: random.Random, operations: int) -> tuple[int, int]:
    """Operations done, and kills; raises Wrong."""
    running = [start(folder, chance.randrange(1 << 30), operations) for _ in range(PROCESSES)]
    victim = chance.choice([*running, None])
    begin, kill_after = time.monotonic(), chance.random()
    waiting = {process.stdout: process for process in running if process.stdout}
    lines = dict.fromkeys(running, "")
    while waiting:
        region.lend(0, chance.randrange(4) * GUARANTEE // 3)
        for output in select(list(waiting), [], [], 0.02)[0]:
            lines[waiting.pop(output)] = output.readline()
        if victim and victim.stdout in waiting and time.monotonic() - begin > kill_after:
            victim.kill()
            victim.wait()
        if time.monotonic() - begin > PATIENCE_S:
            raise Wrong("a process hangs")
    region.lend(0, 0)
    killed = [process for process in running if process.poll() == -SIGKILL]
    done = [line.split() for process, line in lines.items() if process not in killed]
    if wrong := [line for line in done if line[:1] != ["done"]]:
        raise Wrong(str(wrong))
    truth(folder, region, PROCESSES - len(killed))
    for process in running:
        process.communicate(timeout=PATIENCE_S)
        if process not in killed and process.returncode != 0:
            raise Wrong(f"exit {process.returncode}")
    truth(folder, region, 0)
    return sum(int(line[1]) for line in done), len(killed)


def storm(folder: Path, operations: int, seed: int) -> str:
    """A sentence about what was played; raises Wrong. `folder`: empty."""
    simulator.create(folder / "cards", "T4")
    (folder / "region").mkdir()
    card = CardLimit(simulator.cards(folder / "cards")[0].uuid, LIMIT, GUARANTEE)
    limits = Limits((card,), host_memory=LIMIT, oversubscribe=True, movable=True)
    chance = random.Random(seed)
    done = kills = rounds = 0
    with Region.create(folder / "region", limits) as region:
        while done < operations:
            more, killed = one_round(folder, region, chance, 1000 + chance.randrange(4000))
            done, kills, rounds = done + more, kills + killed, rounds + 1
    moves = len(re.findall("moved ", (folder / "log").read_text()))
    return f"{done} operations in {rounds} rounds of {PROCESSES} processes, {kills} killed, {moves} moves: all right"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vgpu-moves-") as folder:
        begin = time.monotonic()
        try:
            print(storm(Path(folder), chosen.operations, chosen.seed), f"({time.monotonic() - begin:.0f} s)")
        except Wrong as what:
            print(f"seed {chosen.seed}: {what}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
