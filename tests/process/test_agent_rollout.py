"""Versions of the library on a node: which versions are kept for which containers; nothing starts without a library."""

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from agent_world import A, MakeWorld, World, until, worlds

from device_plugin import library, starts
from device_plugin.refusal import Refusal
from vgpu.devices import GpuSlice
from vgpu.kubelet import checkpoint


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    monkeypatch.setattr(starts, "ANSWER_SECONDS", 0.2)
    with worlds() as made:
        yield made


def versions(world: World) -> set[str]:
    return {file.name for file in world.places.library.glob("libvgpu-*.so")}


def upgrade(world: World, content: bytes) -> str:
    """The next agent brings another library; returns the name of the previous agent's library."""
    old: str = world.granting.rollout.library.name
    world.places.built_library.write_bytes(content)
    world.agent()
    until(lambda: world.pods.synced)
    return old


def clean(world: World, times: int = 2) -> set[str]:
    for _ in range(times):
        world.sweep.once(clean=True)
    return versions(world)


@pytest.mark.parametrize("strategy", ["cdi", "envvar"])
def test_a_version_goes_when_no_answer_and_no_spec_names_it(make: MakeWorld, strategy: str) -> None:
    world = make(strategy)
    uid = world.pod("p", {"main": [GpuSlice(A, 1)]})
    until(lambda: world.pods.get(uid))
    world.allocate(uid, "main", [f"{A}::0"])
    world.starts.start([f"{A}::0"])
    old = upgrade(world, b"another library")
    new = world.granting.rollout.library.name
    assert clean(world, 3) == {old, new}
    world.starts.start([f"{A}::0"])  # its container starts again
    assert clean(world, 3) == ({old, new} if strategy == "envvar" else {new})  # an answer is used again; a spec is not
    world.delete_pod("p")
    until(lambda: world.pods.get(uid) is None)
    world.forget(uid)
    assert clean(world) == {new}


def test_a_version_that_another_agent_brings_during_the_look_stays(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make("envvar")
    world.write_checkpoint()
    until(lambda: world.pods.synced)
    new, prune = f"libvgpu-{0:016}.so", library.prune

    def brought_meanwhile(folder: Path, paths: Collection[Path]) -> list[Path]:
        (folder / new).touch()
        return prune(folder, paths)

    monkeypatch.setattr(library, "prune", brought_meanwhile)
    assert new in clean(world, 1)


def test_nothing_goes_at_the_first_look_or_while_the_checkpoint_tells_nothing(make: MakeWorld) -> None:
    world = make("envvar")
    world.write_checkpoint()
    old = upgrade(world, b"another library")
    path = world.root / "kubelet" / "device-plugins" / checkpoint.FILE_NAME
    whole = path.read_bytes()
    for harmed in (b"{", None):
        path.write_bytes(harmed) if harmed else path.unlink()
        assert old in clean(world, 3)
    path.write_bytes(whole)
    assert old in clean(world, 1)  # an answer of the previous agent may come into the checkpoint now
    assert old not in clean(world, 1)


def test_an_answer_that_names_a_version_which_is_gone_starts_nothing(make: MakeWorld) -> None:
    world = make("envvar")
    uid = world.pod("p", {"main": [GpuSlice(A, 1)]})
    until(lambda: world.pods.get(uid))
    world.allocate(uid, "main", [f"{A}::0"])
    old = upgrade(world, b"another library")
    file: Path = world.places.library / old
    file.unlink()
    with pytest.raises(Refusal, match="without limits"):
        world.starts.start([f"{A}::0"])
    file.mkdir()  # a container runtime creates a folder for a missing source
    with pytest.raises(Refusal, match="without limits"):
        world.starts.start([f"{A}::0"])
    file.rmdir()
    file.write_bytes(b"the library")
    world.starts.start([f"{A}::0"])
