"""The cgroups of a run's kubelet.

Only these outlive the run's namespaces, so a process outside must remove them.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.cluster.errors import ClusterError

ROOT: Final = Path("/sys/fs/cgroup")
SECONDS: Final = 60  #: time for the kernel to empty them
NAMES: Final = ("kubepods", "kubelet", "vgpu-cluster-probe")


#: For version 2: no kubelet starts without these; it passes them on to its pods from the top down.
CONTROLLERS: Final = ("cpu", "memory", "pids")


def need() -> None:
    """Raises ClusterError where no cgroup can be made, or where child cgroups get no controllers (version 2)."""
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
    """Passes controllers on as a kubelet does.

    A container whose own processes are in ROOT cannot do this: the kernel reports that it is busy.
    """
    file, wanted = ROOT / "cgroup.subtree_control", " ".join(f"+{name}" for name in CONTROLLERS)
    try:
        file.write_text(wanted)
    except OSError as error:
        raise ClusterError(
            f"{file} takes no {wanted}: {error.strerror}; a kubelet needs that. In a container: run it in the cgroup "
            "namespace of the machine (docker run --cgroupns=host), or move its processes into a cgroup below first"
        ) from None


def remove() -> bool:
    """Removes the empty cgroups of finished runs; returns whether none is left."""
    left = False
    for name in NAMES:
        for folder in _folders(name):
            for inner in _bottom_up(folder):
                with suppress(OSError):  # not empty: it belongs to another kubelet, which this run must not end
                    inner.rmdir()
            left |= folder.exists()
    return not left


def watch(alone: Callable[[], bool]) -> None:
    """Starts a separate process that removes the cgroups once this process and all of its forks have ended.

    `alone`: whether no other cluster runs; asked until it is true, or SECONDS have passed.
    """
    reading, writing = os.pipe()  # its writing end closes with the last process that holds it
    child = os.fork()
    if child:
        os.close(reading)
        os.waitpid(child, 0)
        return
    os.close(writing)
    os.setsid()  # an interrupt or the end of a terminal must not end it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)  # a reader of our output must see its end
    try:
        os.read(reading, 1)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and not (alone() and remove()):
            time.sleep(0.1)
    finally:
        os._exit(0)


def _folders(name: str) -> list[Path]:
    """Folders of this name below every hierarchy of version 1.

    Version 2 has one hierarchy, ROOT itself, and its folders belong to other programs.
    """
    one = (ROOT / "cgroup.controllers").exists()
    return [*ROOT.glob(name), *([] if one else ROOT.glob(f"*/{name}"))]


def _bottom_up(folder: Path) -> Iterator[Path]:
    with suppress(OSError):  # it went in the meantime
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                yield from _bottom_up(inner)
    yield folder
