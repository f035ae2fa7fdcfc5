"""The cgroups of a run's kubelet: the only thing that outlives its namespaces, so somebody outside must remove them."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.cluster.errors import ClusterError

ROOT: Final = Path("/sys/fs/cgroup")
SECONDS: Final = 60  #: that the kernel may take to empty them
NAMES: Final = ("kubepods", "kubelet", "vgpu-cluster-probe")


#: Of version 2: without these no kubelet starts; it passes them on to its pods from the top down.
CONTROLLERS: Final = ("cpu", "memory", "pids")


def need() -> None:
    """Raises ClusterError where no cgroup can be made, or where those below get no controllers (version 2)."""
    for parent in {folder.parent for folder in _folders("cgroup.procs")}:
        probe = parent / NAMES[-1]
        try:
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except FileNotFoundError:
            continue  # the parent went meanwhile
        except OSError as error:
            raise ClusterError(f"no cgroup can be made in {parent}: {error.strerror}; a kubelet needs them") from None
    if (ROOT / "cgroup.controllers").exists():
        _pass_on()


def _pass_on() -> None:
    """As a kubelet does. A container whose own processes are in ROOT cannot: the kernel says that it is busy."""
    file, wanted = ROOT / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS)
    try:
        file.write_text(wanted)
    except OSError as error:
        raise ClusterError(
            f"{file} takes no {wanted}: {error.strerror}; a kubelet needs that. In a container: run it in the cgroup "
            "namespace of the machine (docker run --cgroupns=host), or move its processes into a cgroup below first"
        ) from None


def remove() -> bool:
    """Removes the empty cgroups of runs that are over; whether none is left."""
    left = False
    for name in NAMES:
        for folder in _folders(name):
            for inner in _bottom_up(folder):
                with suppress(OSError):  # not empty: another kubelet's, which is not ours to end
                    inner.rmdir()
            left |= folder.exists()
    return not left


def watch(alone: Callable[[], bool]) -> None:
    """Starts a process of its own that removes the cgroups once this one and all of its forks are gone, whatever ended
    them. `alone`: whether no other cluster runs, asked until it is so, or SECONDS have passed."""
    reading, writing = os.pipe()  # its writing end closes with the last process that holds it
    child = os.fork()
    if child:
        os.close(reading)
        os.waitpid(child, 0)
        return
    os.close(writing)
    os.setsid()  # neither an interrupt nor the end of a terminal is meant for it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)  # who reads our output must see its end
    try:
        os.read(reading, 1)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not (alone() and remove()):
            time.sleep(0.1)
    finally:
        os._exit(0)


def _folders(name: str) -> list[Path]:
    """Below every hierarchy of version 1; version 2 has one, ROOT itself, and its folders are other programs'."""
    one = (ROOT / "cgroup.controllers").exists()
    return [*ROOT.glob(name), *([] if one else ROOT.glob(f"*/{name}"))]


def _bottom_up(folder: Path) -> Iterator[Path]:
    with suppress(OSError):  # it went in the meantime
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                yield from _bottom_up(inner)
    yield folder
