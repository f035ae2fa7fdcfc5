"""Files of the agent on the node are removed while it runs, or cannot be written."""

import errno
import os
import shutil
from pathlib import Path

import pynvml
import pytest
from agent_world import NODE, A, MakeWorld, until
from prometheus_client import generate_latest

from device_plugin import files, ids
from device_plugin.readiness import CARDS
from vgpu.devices import GpuSlice
from vgpu.kube import writes

ID = f"{A}::0"


@pytest.mark.parametrize("strategy", ["cdi", "envvar"])
def test_folders_that_somebody_removed_are_made_again(make: MakeWorld, strategy: str) -> None:
    world = make(strategy)
    first = world.pod("first", {"main": [GpuSlice(A, 9000)]})
    world.allocate(first, "main", [ID])
    world.starts.start([ID])
    for folder in ("containers", "by-ids"):
        shutil.rmtree(world.root / "run" / folder)
    world.sweep.once(clean=True)
    second = world.pod("second", {"main": [GpuSlice(A, 5000)]})
    world.allocate(second, "main", [f"{A}::1"])
    world.starts.start([f"{A}::1"])
    assert world.limits(second).cards[0].uuid == A
    # What the first container holds is not forgotten with its folder; it is freed with its pod.
    assert set(world.sandboxes.granted()) == {first, second}
    assert [entry.pod_uid for entry in world.sandboxes.removed()] == [first]
    writes.delete_pod(world.client, "default", "first", first, grace_seconds=0)
    until(lambda: world.pods.get(first) is None)
    world.sweep.once(clean=False)
    assert set(world.sandboxes.granted()) == {second}
    assert (world.root / "run" / "containers").stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "spec.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*spec\.json"):
        files.replace(tmp_path / "spec.json", b"new", 0o644)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("spec.json", "old")]


def test_what_a_killed_agent_was_writing_goes_with_the_next_one(make: MakeWorld) -> None:
    world = make()
    world.places.cdi.mkdir()
    left, other = (world.places.cdi / name for name in (".vgpu.io-gpu_0-1.json.x1y2", ".nvidia.com-gpu.json.x1y2"))
    for file in (left, other):
        file.touch()
    world.agent()
    assert (left.exists(), other.exists()) == (False, True)


def test_a_folder_that_a_runtime_made_where_a_link_was_missing_makes_room(make: MakeWorld) -> None:
    world = make("envvar")
    uid = world.pod("p", {"main": [GpuSlice(A, 100)]})
    world.allocate(uid, "main", [ID])
    link = world.sandboxes.by_ids / ids.key([ID])
    (link / "limits").mkdir(parents=True)
    world.starts.start([ID])
    assert link.resolve() == world.sandboxes.directory(uid, "main").resolve()


def test_folders_go_and_cards_are_shown_while_the_driver_hangs(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    gone = world.pod("gone", {"main": [GpuSlice(A, 9000)]})
    world.allocate(gone, "main", [ID])
    world.starts.start([ID])
    world.cards.sicken(A, "it does not answer")
    asked = list[object]()
    monkeypatch.setattr(world.sweep, "_hangs", lambda: True)
    for entry in ("nvmlInitWithFlags", "nvmlInit"):
        monkeypatch.setattr(pynvml, entry, asked.append)
    until(lambda: world.pods.synced)
    world.delete_pod("gone")
    until(lambda: world.pods.get(gone) is None)
    before = world.exporter._shown
    world.sweep.once(clean=False)
    assert not world.sandboxes.directory(gone, "main").exists()
    shown = generate_latest(world.exporter.registry).decode()
    assert f'vgpu_card_healthy{{index="0",model="Tesla T4",node="{NODE}",uuid="{A}"}} 0.0' in shown
    assert asked == []
    assert world.exporter._shown == before  # so that the age shows the failure
    assert world.exporter.readiness.left == CARDS
