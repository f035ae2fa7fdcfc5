"""The charge of a killed process stays until the driver has given back what the process held."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preloaded import MIB, environment
from test_ledger import CONTAINER, may_make_namespaces

from vgpu.native import CardLimit, Limits, Region, simulator

# The kernel frees a dying process's memory, then closes its files, the highest descriptor first. Here the highest is
# the ledger's, whose lock means "alive". The driver's descriptor is low, and between them is a file that takes long to
# close.
SCRIPT = """
import os, sys
from driver_client import *
def descriptors():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink("/proc/self/fd/" + name)
        except FileNotFoundError:
            pass  # the listing's own
start()
ok(alloc(600 * MIB)[0])
driver, = [number for number, target in descriptors() if "/cards/nvidia-simulated." in target]
usage, = [number for number, target in descriptors() if target.endswith("/usage")]
slow = os.memfd_create("slow")
os.posix_fallocate(slow, 0, 256 * MIB)
os.dup2(slow, 500), os.close(slow)
os.dup2(usage, 600), os.close(usage)
assert driver < 500
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    simulator.create(tmp_path / "cards", "T4")
    (tmp_path / "region").mkdir()
    limits = Limits((CardLimit(simulator.cards(tmp_path / "cards")[0].uuid, 1000 * MIB),))
    with Region.create(tmp_path / "region", limits) as made:
        yield made


@contextmanager
def holder(folder: Path, *through: str) -> Iterator[subprocess.Popen[str]]:
    env = environment(folder, VGPU_DIR=str(folder / "region"))
    command = [*through, sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holds\n"
            yield process
        finally:
            process.kill()


def watch_it_die(folder: Path, region: Region) -> list[str]:
    """Charged and held bytes in the order of their changes, until both are zero."""
    seen: list[str] = []
    deadline = time.monotonic() + 60
    while not seen or seen[-1] != "free, free":
        assert time.monotonic() < deadline, seen
        region.reap()
        charged = region.usage().cards[0].used  # read first: bytes that are held afterwards were held then, too
        held = simulator.cards(folder / "cards")[0].used
        state = f"{'charged' if charged else 'free'}, {'held' if held else 'free'}"
        if state not in seen[-1:]:
            seen.append(state)
    return seen


def test_charges_outlast_what_the_driver_still_holds(tmp_path: Path, region: Region) -> None:
    with holder(tmp_path) as process:
        assert region.reap() == 0
        process.kill()
        assert "free, held" not in watch_it_die(tmp_path, region)


@pytest.mark.skipif(not may_make_namespaces(), reason="needs the right to make pid and mount namespaces (root)")
def test_the_agent_knows_it_of_other_pid_namespaces(tmp_path: Path, region: Region) -> None:
    with holder(tmp_path, *CONTAINER):
        (inside,) = region.usage().processes
        assert inside.pid_namespace != os.stat("/proc/self/ns/pid").st_ino
        (outside,) = (p for p in Path("/proc").glob("[0-9]*") if is_holder(p, inside.pid_namespace))
        os.kill(int(outside.name), 9)
        assert "free, held" not in watch_it_die(tmp_path, region)


def is_holder(process: Path, pid_namespace: int) -> bool:
    try:
        return (process / "ns/pid").stat().st_ino == pid_namespace
    except OSError:
        return False  # it has ended
