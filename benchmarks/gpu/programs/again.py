"""A program that executes itself while it holds memory: `again.py MIB ROUNDS`.

Prints an object when it holds its memory for the first time, one when it has executed itself (no driver is loaded
then), and one when it holds memory again after ROUNDS executions, or was refused. Goes on at a line of input. Runs
with tests/native on its path.
"""

import json
import os
import sys
from pathlib import Path

MIB = 1 << 20


def files() -> list[str]:
    """Device files of the driver, or of the simulator, that are open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the folder's own
            continue
        if target.startswith("/dev/nvidia") or "/nvidia-simulated." in target:
            found.append(target)
    return sorted(found)


def hold(size: int) -> bool:
    """Whether a context and memory were to be had."""
    from driver_client import alloc, start

    try:
        start()
    except AssertionError:  # the driver's answer
        return False
    return alloc(size * MIB)[0] == 0


def charged() -> int | None:
    """Bytes by the ledger of a slice; None without one."""
    if "LD_PRELOAD" not in os.environ or "VGPU_DIR" not in os.environ:
        return None
    from vgpu.native import Region

    with Region.open(Path(os.environ["VGPU_DIR"])) as region:
        return region.usage().cards[0].used


def say(**what: object) -> None:
    print(json.dumps({"pid": os.getpid(), "files": files(), **what}), flush=True)
    sys.stdin.readline()


def main() -> None:
    size, rounds = int(sys.argv[1]), int(sys.argv[2])
    done = int(sys.argv[3]) if sys.argv[3:] else 0
    if done == 1:
        say()
    held = hold(size)
    if done == 0 and held:
        say(used=charged())
    if done == rounds or not held:
        say(used=charged(), held=held, rounds=done)
        return
    os.execv(sys.executable, [sys.executable, sys.argv[0], str(size), str(rounds), str(done + 1)])


main()
