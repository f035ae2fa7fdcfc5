"""Programs that only launch, in a region of their own, and their true share of the simulated card."""

import mmap
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from preloaded import environment

from vgpu.native import CardLimit, Limits, Region, simulator
from vgpu.native.region import CorePolicy

WINDOW_S = 1.0
PROGRAM = """
from driver_client import *
import threading

def wait():
    ok(cu.cuCtxSynchronize())

mine = start()
{prepare}
def step():
    {step}
print("ready", flush=True)
while True:
    step()
"""
#: in struct vgpu_limits_file (region.h): offset of the arbiter's part, and its layout for the first card
ARBITER_AT, ARBITER = 2752, struct.Struct("=QIIIIQ")


def make_region(
    folder: Path,
    name: str = "region",
    *,
    cores: int = 30,
    policy: CorePolicy = "fixed",
    ceiling: int = 0,
    priority: int = 0,
    burst_ms: int = 0,
    memory: int | None = None,
    cards: str = "T4",
) -> Region:
    """A region in `folder`/`name` for the first simulated card; the cards are made if they are not there."""
    if not (folder / "cards").exists():
        simulator.create(folder / "cards", cards)
    uuid = simulator.cards(folder / "cards")[0].uuid
    (folder / name).mkdir()
    card = CardLimit(uuid, memory, cores=cores, cores_ceiling=ceiling)
    return Region.create(folder / name, Limits((card,), policy, priority, burst_ms=burst_ms))


def within(folder: Path, region: Region, *, cards: str = "T4", **variables: str) -> dict[str, str]:
    """Environment of a program of that region."""
    return environment(folder, cards=cards, VGPU_DIR=str(region.directory), **variables)


@contextmanager
def running(env: dict[str, str], step: str, prepare: str = "", *, processes: int = 1) -> Iterator[None]:
    """Processes that repeat `step` (Python, after `prepare`) until the block ends."""
    script = PROGRAM.format(prepare=prepare, step=step)
    found = []
    try:
        for _ in range(processes):
            found.append(subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True))
            assert found[-1].stdout
            assert found[-1].stdout.readline() == "ready\n"
        yield
        assert [process.poll() for process in found] == [None] * processes
    finally:
        for process in found:
            process.kill()
            process.communicate()


def busy(folder: Path) -> int:
    """GPU ns of the first card."""
    return simulator.cards(folder / "cards")[0].busy_ns


def share(folder: Path, seconds: float = WINDOW_S) -> float:
    """Percent of a window in which the first card was busy."""
    before, begun = busy(folder), time.monotonic()
    while time.monotonic() < begun + seconds:
        time.sleep(0.05)
    return (busy(folder) - before) / (time.monotonic() - begun) / 1e7


class Arbiter:
    """Publishes a test's values for the first card of a region, as the node agent would."""

    def __init__(self, region: Region, *, share: int = 0, yielding: bool = False, neighbours: int = 0) -> None:
        self.share, self.yielding, self.neighbours, self.refund_ns = share, yielding, neighbours, 0
        self._file = (region.directory / "limits").open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._publish)

    def publish(self) -> None:
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        words = (now, self.neighbours, self.share, int(self.yielding), 0, self.refund_ns)
        ARBITER.pack_into(self._map, ARBITER_AT, *words)

    def _publish(self) -> None:
        while not self._end.wait(0.02):
            self.publish()

    def __enter__(self) -> "Arbiter":
        self.publish()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._map.close()
        self._file.close()
