"""A program that executes itself while it holds memory: `again.py MIB`.

Prints an object before, after (no driver is loaded then) and when it has started CUDA again; goes on at a line of
input. Runs with tests/native on its path.
"""

import json
import os
import sys
from pathlib import Path

MIB = 1 << 20


def files() -> list[str]:
    """Device files of the driver that are open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:  # the folder's own
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return sorted(found)


def hold(size: int) -> dict[str, object]:
    """Memory on the card, and what the ledger says of it where there is one."""
    from driver_client import alloc, ok, start

    start()
    status, _ = alloc(size * MIB)
    ok(status)
    if "LD_PRELOAD" not in os.environ or "VGPU_DIR" not in os.environ:
        return {}
    from vgpu.native import Region

    with Region.open(Path(os.environ["VGPU_DIR"])) as region:
        return {"used": region.usage().cards[0].used}


def say(**what: object) -> None:
    print(json.dumps({"pid": os.getpid(), "files": files(), **what}), flush=True)
    sys.stdin.readline()


if sys.argv[2:] == ["after"]:
    say()
    say(**hold(int(sys.argv[1])))
else:
    say(**hold(int(sys.argv[1])))
    os.execv(sys.executable, [sys.executable, *sys.argv, "after"])
