"""The arbiter of `vgpu run`: one process in the background for all slices of a state directory, while there are any.

It is started by the first command that needs one and ends with the last slice. When it is killed, commands keep to
their fixed limits, until the next `vgpu run` starts another.
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

LOCK: Final = "arbiter.lock"  #: held by the one that is at work
FOLLOW_SECONDS: Final = 0.25
SWEEP_SECONDS: Final = 2.0


def needed(limits: Limits, record: Run, runs: Iterable[Run]) -> bool:
    """Whether a command cannot do without.

    Its share may move, room of the card may be lent to it, or neighbours on its cards disturb what is measured.
    """
    if limits.core_policy == "elastic" or limits.priority or limits.movable:
        return True
    limited = {piece.uuid for piece in record.slices if piece.cores}
    cards = {piece.uuid for piece in record.slices}
    others = [piece for run in runs if run.id != record.id for piece in run.slices if piece.uuid in cards]
    return any(piece.cores or piece.uuid in limited for piece in others)


def ensure(root: Path) -> None:
    """Starts an arbiter for the slices below `root` unless one is at work. Needs the store's lock."""
    if locks.is_held(root / LOCK):
        return
    child = os.fork()  # twice: the command must not find a child that it has not started
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
    """Until there are no slices; gives up `lock` in one step with finding none. FileNotFoundError: `root` is gone."""
    swept = 0.0
    while True:
        if time.monotonic() - swept > SWEEP_SECONDS:
            if not locks.is_at(lock, store.root / LOCK):
                return  # the state directory was removed and made again: its next arbiter is another process
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
        return 0  # another one was faster
    arbiter = Arbiter()
    arbiter.start()
    try:
        follow(arbiter, SliceStore(root), lock)
    except FileNotFoundError:
        pass  # the state directory was removed, and every slice with it
    finally:
        arbiter.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
