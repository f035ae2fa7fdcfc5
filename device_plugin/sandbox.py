"""The folder of each container on the host: `containers/<podUID>_<container>/{limits,usage}`, and links to it by ids.

The folders are the agent's memory: after a crash, their content is what this node has granted.
"""

import errno
import logging
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from device_plugin import files, other_version
from device_plugin.cgroups import Running
from device_plugin.selinux import Labels
from vgpu.devices import GpuSlice
from vgpu.native import CardLimit, CardUsage, Limits, Region
from vgpu.native.region import CorePolicy
from vgpu.tier import on_tier

log = logging.getLogger(__name__)
MIB = 1 << 20


class Entry(msgspec.Struct, frozen=True):
    """One container's folder."""

    pod_uid: str
    container: str
    path: Path


class Sandboxes:
    """All container folders of this node, below `run_dir`."""

    def __init__(self, run_dir: Path, labels: Labels, proc: Path = Path("/proc")) -> None:
        """`proc`: /proc with the processes of the node."""
        self._labels = labels
        self._running = Running(proc)
        self._containers = run_dir / "containers"
        self.by_ids = run_dir / "by-ids"
        self._make()
        self._lock = threading.Lock()
        self._granted: dict[tuple[str, str], tuple[GpuSlice, ...]] = {}
        self._strangers: set[tuple[str, str]] = set()
        for entry in self.entries():
            try:
                with Region.open(entry.path) as region:
                    limits: Limits | None = region.limits()
            except OSError as error:
                if not other_version.is_one(entry.path):
                    log.warning("cannot read the limits in %s, so they do not count: %s", entry.path, error)
                    continue
                self._strangers.add((entry.pod_uid, entry.container))
                limits = other_version.limits_of(entry.path)
                what = "its limits" if limits else "its pod's allocation"
                log.info("%s is from another version: the agent counts %s and cannot read its use", entry.path, what)
            if limits:
                self._granted[entry.pod_uid, entry.container] = slices_of(limits)

    def _make(self) -> None:
        """Makes the two folders, also when they were removed while this agent runs."""
        self.by_ids.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Containers see only files that root binds into them; other users of the host need no access.
        self._containers.mkdir(mode=0o700, exist_ok=True)
        if self._containers.stat().st_mode & 0o7777 != 0o700:
            self._containers.chmod(0o700)

    def granted(self) -> dict[str, dict[str, tuple[GpuSlice, ...]]]:
        """pod uid → container → its slices, of all folders."""
        found: dict[str, dict[str, tuple[GpuSlice, ...]]] = {}
        with self._lock:
            for (pod_uid, container), slices in self._granted.items():
                found.setdefault(pod_uid, {})[container] = slices
        return found

    def strangers(self) -> set[str]:
        """UIDs of pods with containers that an agent of another version started: these containers may still run."""
        with self._lock:
            return {uid for uid, _ in self._strangers}

    def lives(self, pod_uid: str, container: str) -> bool:
        """Whether a process that uses a card still runs in this container.

        For a container of another version: whether any process of its pod runs.
        """
        directory = self.directory(pod_uid, container)
        try:
            with Region.open(directory, writable=True) as region:
                region.reap()
                return region.usage().process_count > 0
        except OSError:
            return other_version.is_one(directory) and bool(self._running.among({pod_uid}))

    def survivors(self, containers: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Those of `containers` that may still use a card.

        `containers`: (pod uid, container) of pods that the API server does not know any more. A pod that was deleted by
        force still has its grace period. As long as any of its processes runs, a process that has used no card so far
        may begin to use one.
        """
        living = {one for one in containers if self.lives(*one)}
        rest = set(containers) - living
        running = self._running.among({uid for uid, _ in rest})
        return living | {one for one in rest if one[0] in running}

    def directory(self, pod_uid: str, container: str) -> Path:
        return self._containers / f"{pod_uid}_{container}"

    def entries(self) -> list[Entry]:
        """All folders of containers."""
        found = []
        self._make()
        for path in sorted(self._containers.iterdir()):
            # neither a UID nor a container's name contains an underscore
            pod_uid, _, container = path.name.partition("_")
            if container and path.is_dir():
                found.append(Entry(pod_uid, container, path))
        return found

    def removed(self) -> list[Entry]:
        """Containers that were granted something here, and whose folders were removed from outside."""
        with self._lock:
            known = [Entry(uid, container, self.directory(uid, container)) for uid, container in self._granted]
        return [entry for entry in known if not entry.path.exists()]

    def prepare(self, pod_uid: str, container: str, limits: Limits) -> Path:
        """Makes the container's region, or writes new limits into the existing one; raises OSError, ValueError."""
        path = self.directory(pod_uid, container)
        self._make()
        path.mkdir(mode=0o755, exist_ok=True)
        try:
            Region.create(path, limits).close()
        except FileExistsError:
            try:
                with Region.open(path, writable=True) as region:
                    region.reap()
                    now = region.limits()
                    # Whether blocks may be in host memory, and may move, cannot change during the life of a region.
                    if (now.oversubscribe, now.movable) != (limits.oversubscribe, limits.movable):
                        if region.usage().process_count:
                            raise OSError(errno.EBUSY, "processes use its region, which must be recreated", str(path))
                        raise OSError(errno.EPROTO, "its memory has another mode now", str(path))
                    if now != limits:
                        region.set_limits(limits)
            except OSError as error:
                if error.errno not in {errno.EPROTO, errno.ENOENT}:
                    raise
                # The region is from another boot or version, or a killed agent made half of it: no process can use it.
                log.warning("recreating %s: %s", path, error)
                shutil.rmtree(path)
                path.mkdir(mode=0o755)
                Region.create(path, limits).close()
        (path / "limits").chmod(0o644)
        (path / "usage").chmod(0o666)  # shared by the container's processes of all users
        self._labels.put(path)
        with self._lock:
            self._granted[pod_uid, container] = slices_of(limits)
            self._strangers.discard((pod_uid, container))
        return path

    def point(self, key: str, directory: Path) -> Path:
        """Makes `by-ids/<key>` lead to `directory`.

        The runtime resolves the link when it creates the container.
        """
        self._make()
        place = self.by_ids / key
        files.link(Path("..") / "containers" / directory.name, place)
        return place

    def remove(self, entry: Entry) -> None:
        """Removes a folder and the links to it."""
        for link in self.by_ids.iterdir():
            if link.is_symlink() and link.readlink().name == entry.path.name:
                link.unlink(missing_ok=True)
        shutil.rmtree(entry.path, ignore_errors=True)
        with self._lock:
            self._granted.pop((entry.pod_uid, entry.container), None)
            self._strangers.discard((entry.pod_uid, entry.container))
        log.info("removed %s: its pod is gone", entry.path)


def limits_for(
    slices: Sequence[GpuSlice],
    *,
    contexts: Mapping[str, int] | None = None,
    core_policy: CorePolicy = "fixed",
    cores_limit: int | None = None,
    priority: int | None = None,
    allow_disable_control: bool = False,
    movable: bool = False,
    host_memory: int = 0,
    fills_on_engine: bool = False,
    copies_on_sms: bool = False,
) -> Limits:
    """The limits that the library enforces for one container; `slices` in the order in which it sees the cards.

    `contexts`: card UUID → bytes that one CUDA context takes there. `cores_limit`: % that an elastic share never
    exceeds; it does not reduce what is guaranteed. Where a slice is not guaranteed as a whole, `movable` says whether
    blocks may move between card and host memory, and `host_memory` is the bytes that they may take of it behind each
    card. `fills_on_engine` and `copies_on_sms` are those of Limits.
    """
    oversubscribe = on_tier(slices)
    return Limits(
        cards=tuple(
            CardLimit(
                uuid=piece.uuid,
                memory=piece.mem * MIB,
                guarantee=piece.guarantee * MIB if piece.guarantee < piece.mem else None,
                context_bytes=(contexts or {}).get(piece.uuid, 0),
                cores=piece.cores,
                cores_ceiling=max(cores_limit, piece.cores) if cores_limit else 0,
            )
            for piece in slices
        ),
        core_policy=core_policy,
        priority=priority or 0,
        allow_disable_control=allow_disable_control,
        oversubscribe=oversubscribe,
        movable=oversubscribe and movable,
        host_memory=host_memory if oversubscribe else 0,
        fills_on_engine=fills_on_engine,
        copies_on_sms=copies_on_sms,
    )


def on_card(slices: Sequence[GpuSlice], usage: CardUsage) -> int:
    """Bytes that a container with these slices was charged for the card itself; the driver should count the same."""
    return usage.resident if on_tier(slices) else usage.used


def slices_of(limits: Limits) -> tuple[GpuSlice, ...]:
    """The slices that a region's limits grant: the inverse of `limits_for`."""
    return tuple(
        GpuSlice(
            uuid=card.uuid,
            mem=(card.memory or 0) // MIB,
            cores=card.cores,
            phys=None if card.guarantee is None else card.guarantee // MIB,
        )
        for card in limits.cards
    )
