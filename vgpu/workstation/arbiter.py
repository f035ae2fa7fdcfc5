"""The arbiter of `vgpu run`: one background process for all slices of a state directory.

The first command that needs an arbiter starts it, and it ends with the last slice. When it is killed, commands keep
their fixed limits until the next `vgpu run` starts another arbiter.
"""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vgpu import names
from vgpu.native import Limits
from vgpu.native.arbiter import Arbiter
from vgpu.workstation import lending, locks
from vgpu.workstation.slices import Run, SliceStore

LOCK: Final = "arbiter.lock"  #: the arbiter that works holds this lock
FOLLOW_SECONDS: Final = 0.25
SWEEP_SECONDS: Final = 2.0


def needed(limits: Limits, record: Run, runs: Iterable[Run]) -> bool:
    """Whether a command needs an arbiter.

    It does when its share may change, or when room of the card may be lent to it. It also does when neighbours on its
    cards disturb the measurement.
    """
    if limits.core_policy == "elastic" or limits.priority or limits.movable:
        return True
    limited = {piece.uuid for piece in record.slices if piece.cores}
    cards = {piece.uuid for piece in record.slices}
    others = [piece for run in runs if run.id != record.id for piece in run.slices if piece.uuid in cards]
    return any(piece.cores or piece.uuid in limited for piece in others)


def ensure(root: Path) -> None:
    """Starts an arbiter for the slices below `root` unless one works already. Needs the store's lock."""
    if locks.is_held(root / LOCK):
        return
    child = os.fork()  # twice: the command must not get a child that it did not start
    if child:
        os.waitpid(child, 0)
        return
    try:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "vgpu.workstation.arbiter", str(root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={
                name: value
                for name, value in os.environ.items()
                if name not in ("LD_PRELOAD", names.ENV_REGION_DIR, names.ENV_SLICES)
            },
            start_new_session=True,
        )
    finally:
        os._exit(0)


def follow(arbiter: Arbiter, store: SliceStore, lock: int) -> None:
    """Works until there are no slices; then gives up `lock` in the same step.

    FileNotFoundError: `root` is gone.
    """
    swept = 0.0
    while True:
        if time.monotonic() - swept > SWEEP_SECONDS:
            if not locks.is_at(lock, store.root / LOCK):
                return  # the state directory was removed and made again: another process is its arbiter
            with store.locked():
                runs = store.sweep()
                if not runs:
                    os.close(lock)
                    return
                lending.settle(store, runs)
            swept = time.monotonic()
        arbiter.follow(path.parent for path in (store.root / "slices").glob("*/limits"))
        time.sleep(FOLLOW_SECONDS)


def main(root: Path) -> int:
    lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # another arbiter was faster
    arbiter = Arbiter()
    arbiter.start()
    try:
        follow(arbiter, SliceStore(root), lock)
    except FileNotFoundError:
        pass  # the state directory was removed with all slices
    finally:
        arbiter.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
