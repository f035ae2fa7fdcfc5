"""A program that executes itself while it holds memory: `again.py MIB ROUNDS`.

Prints three objects: when it holds its memory for the first time; when it has executed itself (no driver is loaded
then); and when it holds memory again after ROUNDS executions, or was refused. Goes on after a line of input. Runs with
tests/native on its path.
"""

import json
import os
import sys
from pathlib import Path

MIB = 1 << 20


def files() -> list[str]:
    """Open device files of the driver, or of the simulator."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # descriptor of the folder itself
            continue
        if target.startswith("/dev/nvidia") or "/nvidia-simulated." in target:
            found.append(target)
    return sorted(found)


def hold(size: int) -> bool:
    """Whether the program could get a context and memory."""
    from driver_client import alloc, start

    try:
        start()
    except AssertionError:  # driver_client's error with the driver's status
        return False
    return alloc(size * MIB)[0] == 0


def charged() -> int | None:
    """Bytes in the ledger of a slice; None without a slice."""
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
