"""Rollout of the library: named by content, never replaced, always checked."""

import os
from pathlib import Path

import pytest

from device_plugin import library
from device_plugin.refusal import Refusal


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "built").mkdir()
    file = tmp_path / "built" / "libvgpu.so"
    file.write_bytes(b"one")
    (tmp_path / "built" / "simulator").mkdir()
    (tmp_path / "built" / "simulator" / "libcuda.so.1").write_bytes(b"cuda")
    return file


def test_a_new_version_stands_beside_the_old_one(tmp_path: Path, built: Path) -> None:
    """Case 53: a new library written over the old one crashes every program that has it mapped."""
    folder = tmp_path / "host"
    old = library.install(folder, built)
    built.write_bytes(b"two")
    new = library.install(folder, built)
    assert old.library != new.library
    assert (old.library.read_bytes(), new.library.read_bytes()) == (b"one", b"two")
    assert new.preload.read_text() == "/usr/local/vgpu/libvgpu.so\n"


def test_installing_again_leaves_the_file_that_containers_map(tmp_path: Path, built: Path) -> None:
    """Case 53, another of its kind: a restart of the agent installs what is there already."""
    folder = tmp_path / "host"
    first = library.install(folder, built)
    before = first.library.stat()
    assert library.install(folder, built) == first
    assert first.library.stat().st_ino == before.st_ino


@pytest.mark.parametrize("harm", ["missing", "changed", "directory", "link", "unreadable", "writable"])
@pytest.mark.parametrize("which", ["library", "preload"])
def test_a_harmed_source_is_refused_and_put_back(tmp_path: Path, built: Path, harm: str, which: str) -> None:
    rollout = library.install(tmp_path / "host", built)
    source: Path = getattr(rollout, which)
    library.verify(source)
    content = source.read_bytes()
    source.unlink()
    if harm == "changed":
        source.write_bytes(b"something else")
    elif harm == "directory":  # what a runtime makes of a missing mount source
        source.mkdir()
    elif harm == "link":
        source.symlink_to(built)
    elif harm in ("unreadable", "writable"):  # for the users of a container, or by them
        source.write_bytes(content)
        source.chmod(0o640 if harm == "unreadable" else 0o666)
    with pytest.raises(Refusal, match="without limits"):
        library.verify(source)
    library.install(tmp_path / "host", built)
    library.verify(source)
    assert source.read_bytes() == content


def test_a_library_that_cannot_be_executed_is_refused(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = library.install(tmp_path / "host", built)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*([0] * 8), os.ST_RDONLY | os.ST_NOEXEC, 255)))
    with pytest.raises(Refusal, match="noexec") as caught:
        library.verify(rollout.library)
    assert not caught.value.transient
    library.verify(rollout.preload)


def test_the_simulator_folder_is_checked_as_a_whole(tmp_path: Path, built: Path) -> None:
    rollout = library.install(tmp_path / "host", built, built.parent / "simulator")
    assert rollout.simulator is not None
    library.verify(rollout.simulator)
    (rollout.simulator / "libcuda.so.1").write_bytes(b"changed")
    with pytest.raises(Refusal):
        library.verify(rollout.simulator)
    assert library.install(tmp_path / "host", built, built.parent / "simulator") == rollout
    library.verify(rollout.simulator)


def test_only_versions_that_nobody_names_go(tmp_path: Path, built: Path) -> None:
    folder = tmp_path / "host"
    versions = []
    for content in (b"one", b"two", b"three"):
        built.write_bytes(content)
        versions.append(library.install(folder, built))
    strange = folder / "notes"
    strange.touch()
    assert library.prune(folder, {versions[1].library, strange}) == [versions[1].library]
    assert strange.exists()
    assert versions[0].library.exists()
    assert versions[2].preload.exists()


def test_what_a_killed_rollout_left_goes_with_the_next(tmp_path: Path, built: Path) -> None:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / ".libvgpu-0000000000000000.so.abc").write_bytes(b"half")
    (folder / ".simulator-0000000000000000.abc").mkdir()
    library.install(folder, built)
    assert sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(".")) == []
